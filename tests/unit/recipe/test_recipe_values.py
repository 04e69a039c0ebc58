"""Values of recipes: numbers have bounds, empty sections are defaults, overrides replace their alternatives."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from qkv.errors import InputError
from qkv.limits import limit, raise_hint
from qkv.recipe.parse import apply_overrides, validate_recipe

PAIRS: dict[str, Any] = {
    "name": "r",
    "model": {"family": "rnn"},
    "data": {"format": "pairs:tsv", "train": "a.tsv", "hold_out": {"valid": 0.1}},
    "tokenizer": {"source": {"kind": "character"}},
    "train": {"max_steps": 10, "batch_tokens": 100, "warmup_steps": 3},
}
TASK: dict[str, Any] = {
    "name": "r",
    "task": "classify",
    "model": {"init_from": "m"},
    "data": {"format": "csv", "train": "a.csv"},
    "train": {"epochs": 1},
}


def parse(raw: dict[str, Any], *overrides: str) -> Any:
    raw = deepcopy(raw)
    apply_overrides(raw, overrides)
    return validate_recipe(raw, "r.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("validation.num_beams=100000", f"100,000 is too large; {raise_hint('beams')}"),
        ("test.num_beams=100000", raise_hint("beams")),
        ("train.num_workers=100000000000000000000", raise_hint("workers")),
        ("validation.num_samples=1000000", raise_hint("samples")),
        ("tokenizer.source.vocab_size=1000000000", raise_hint("vocabulary")),
        ("model.layers=100000", "key 'model.layers' cannot be 100000; the limit is 1,000"),
        ("model.d_model=10000000", "key 'model.d_model' cannot be 10000000; the limit is 1,048,576"),
        ("model.layers=true", "key 'model.layers' cannot be true"),
        ("train.max_steps=true", "key 'train.max_steps': true is not a number"),
        ("train.max_steps=10000000000000000", "it must be at most 1,000,000,000,000"),
        ("train.max_steps=2.5", "it must be a whole number"),
        ("train.learning_rate=.nan", "it must be a finite number"),
        ("train.learning_rate=.inf", "it must be a finite number"),
        ("train.learning_rate=1e400", "it must be a finite number"),
        ("train.learning_rate=-1", "it must be 0 or more"),
        ("train.learning_rate=false", "false is not a number"),
        ("test.length_penalty=.nan", "it must be a finite number"),
        ("seed=-1", "key 'seed' cannot be -1: it must be 0 or more"),
        ("seed=9223372036854775808", "it must be less than 9,223,372,036,854,775,808"),
        ("model.attention=aditive", "no score function 'aditive'; did you mean 'additive'?"),
        ("data=null", "key 'data' cannot be null: it is a section of keys"),
        ("name=" + "x" * 100 + ": 3", "key 'name' cannot be {'xxx"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_limit(override: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse(PAIRS, override)
    assert message in str(error.value)
    assert len(str(error.value)) < 500


def test_a_limit_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    num_beams = limit("beams") + 1
    monkeypatch.setenv("QKV_LIMIT_BEAMS", str(num_beams))
    assert parse(PAIRS, f"validation.num_beams={num_beams}").validation.num_beams == num_beams


@pytest.mark.parametrize("raw", [PAIRS, TASK], ids=["pairs", "task"])
@pytest.mark.parametrize("value", ["null", "{}"])
def test_an_empty_section_is_the_same_as_a_missing_one(raw: dict[str, Any], value: str) -> None:
    expected = parse({key: section for key, section in raw.items() if key != "tokenizer"})
    assert parse(raw, f"tokenizer={value}", f"validation={value}") == expected


def test_a_message_about_the_whole_recipe_names_no_empty_key() -> None:
    with pytest.raises(InputError, match=r"^r\.yaml: train\.rdrop_alpha: goes with pairs"):
        parse(TASK, "train.rdrop_alpha=1")


def test_an_override_replaces_its_alternative() -> None:
    train = parse(PAIRS, "train.epochs=2", "train.batch_size=8", "train.warmup_ratio=0.1").train
    assert (train.max_steps, train.epochs) == (None, 2)
    assert (train.batch_tokens, train.batch_size) == (None, 8)
    assert (train.warmup_steps, train.warmup_ratio) == (None, 0.1)


def test_two_overrides_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(InputError, match="max_steps and epochs are both set"):
        parse(PAIRS, "train.epochs=2", "train.max_steps=3")


def test_a_batch_has_4096_tokens_unless_a_recipe_sets_its_size() -> None:
    assert parse(TASK).train.batch_tokens == 4096


@pytest.mark.parametrize("section", ["train", "model", "data"])
def test_a_key_of_no_section_is_named_in_the_message_about_a_section(section: str) -> None:
    with pytest.raises(InputError, match=f"unknown key '{section}.seed'; it belongs to no section: seed"):
        parse(PAIRS, f"{section}.seed=3")
