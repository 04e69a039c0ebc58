"""docs/recipes.md is generated from the sentences under the fields of the recipe schema."""

from __future__ import annotations

import dataclasses

import pytest

from qkv.recipe import schema
from qkv.recipe.objectives import OBJECTIVE_CONFIGS
from qkv.recipe.reference import PAGE, field_docs, updated

SECTIONS = [
    *(getattr(schema, name) for name in schema.__all__ if dataclasses.is_dataclass(getattr(schema, name))),
    *(OBJECTIVE_CONFIGS.get(name) for name in OBJECTIVE_CONFIGS.names()),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_of_a_recipe_has_a_sentence(section):
    docs = field_docs(section)
    missing = [f.name for f in dataclasses.fields(section) if not docs.get(f.name, "").strip()]
    assert missing == []


def test_the_reference_in_the_docs_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "run: python -m qkv.recipe.reference"
