"""The limits: each is in the documentation with its default, and each has a sentence."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from qkv.data.examples import TextExample
from qkv.errors import InputError
from qkv.limits import Limits, limit, raise_hint
from qkv.tasks import get_task


def test_the_documentation_lists_every_limit_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    listed = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| `QKV_LIMIT_")]
    assert listed == [[f"| `QKV_LIMIT_{field.name.upper()}`", f"{field.default:,}"] for field in fields(Limits)]


def test_the_hint_names_the_limit_and_its_variable() -> None:
    assert raise_hint("beams") == f"the limit is {limit('beams'):,}; QKV_LIMIT_BEAMS raises it"


@pytest.mark.parametrize("name", ["token_classification", "text_classification", "question_answering"])
def test_a_text_that_would_keep_a_model_busy_for_hours_is_refused(name: str) -> None:
    text = "word " * 250_000
    for value in (text, ("who?", text), TextExample(text, "here")):
        with pytest.raises(InputError, match="the text has 1,250,000 characters; the limit is 1,000,000"):
            get_task(name).parse_input(value, "line 1")
