"""The Python examples of the documentation run as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import qkv

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def examples(page: str) -> str:
    """Return all Python examples of a page as one program."""
    return "\n".join(BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", ["api.md", "tokenizers.md"])
def test_the_examples_of_a_page_run_in_order(page):
    done = subprocess.run(
        [sys.executable, "-c", examples(page)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_has_an_example():
    program = examples("api.md")
    assert [name for name in qkv.__all__ if f"qkv.{name}" not in program and name != "ModelBundle"] == []
