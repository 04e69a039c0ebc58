"""Old names are refused with one line that says the new ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from qkv import families, renamed, spec
from qkv.data.formats import reader_options
from qkv.data.formats.registry import FORMATS
from qkv.errors import InputError
from qkv.recipe import read_recipe
from qkv.recipe.parse import parse_recipe
from qkv.recipe.task_names import resolve_task_name

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.agree=2", "train.agree is now train.rdrop_alpha (the paper's alpha: twice the old value)"),
        ("train.warmup=100", "train.warmup is now train.warmup_steps (or train.warmup_ratio, a fraction of all steps)"),
        ("text.source.size=90", "text.source.size is now tokenizer.source.vocab_size"),
        ("tokenizer.source.size=90", "tokenizer.source.size is now tokenizer.source.vocab_size"),
        ("valid.every=5", "valid.every is now validation.every_steps"),
        ("model.from=models/a", "model.from is now model.init_from"),
        ("model.hidden=8", "model.hidden is now model.d_ff"),
        ("validation.metric=per", "validation.metric 'per' is now 'token_error_rate'"),
        ("objective=causal", "objective 'causal' is now 'clm'"),
        ("task=rate", "task 'rate' is now 'regression'"),
    ],
)
def test_an_override_with_an_old_name(override: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_recipe(RECIPES / "g2p-transformer.yaml", [override])
    assert str(error.value) == f"'{override}': {message}"


def test_all_old_names_of_a_recipe_are_told_in_one_line() -> None:
    raw: dict[str, Any] = {"name": "x", "objective": {"masked": {"rate": 0.1}}, "model": {"family": "rnn", "hidden": 8}}
    raw |= {"train": {"steps": 3}, "data": {"train": "a.txt", "pieces": "longest"}, "valid": {"patience": 2}}
    with pytest.raises(InputError) as error:
        parse_recipe(raw, "here")
    assert str(error.value) == (
        "here: objective.masked.rate is now objective.mlm.mask_prob; model.hidden is now model.hidden_size; "
        "train.steps is now train.max_steps; data.pieces is now data.chunking; data.pieces 'longest' is now 'greedy'; "
        "valid.patience is now validation.patience"
    )


def test_a_key_that_one_task_renamed_stays_in_another() -> None:
    raw: dict[str, Any] = {"name": "x", "model": {"init_from": "models/a"}, "train": {"max_steps": 3}}
    raw["data"] = {"format": "squad", "train": "a.json", "hold_out": {"valid": 0.1}}
    with pytest.raises(InputError, match=r"task\.threshold is now task\.null_score_diff_threshold"):
        parse_recipe(raw | {"task": {"name": "question_answering", "threshold": 0.5}}, "here")
    recipe = parse_recipe(raw | {"task": {"name": "multi_label", "threshold": 0.5}}, "here")
    assert recipe.task == {"name": "multi_label", "threshold": 0.5}  # type: ignore[union-attr]


def test_an_alias_of_a_task_is_its_name_and_an_old_name_is_refused() -> None:
    raw: dict[str, Any] = {"name": "x", "task": "tag", "model": {"init_from": "models/a"}, "train": {"max_steps": 3}}
    recipe = parse_recipe(raw | {"data": {"format": "conll", "train": "a.conll"}}, "here")
    assert recipe.task == {"name": "token_classification"}  # type: ignore[union-attr]
    assert resolve_task_name("classify") == "text_classification"
    with pytest.raises(InputError, match="task 'choose' is now 'multiple_choice'"):
        resolve_task_name("choose")


def test_no_name_that_is_in_use_is_called_an_old_one() -> None:
    for family in families.names():
        for field in dataclasses.fields(families.get_family(family).Config):
            assert renamed.renamed_recipe_key(f"model.{field.name}", family) is None
    for format in FORMATS.names():
        assert not [name for name in reader_options(format) if renamed.renamed_recipe_key(f"data.columns.{name}")]
    for path in sorted(RECIPES.glob("*.yaml")):
        read_recipe(path)


def test_every_new_name_of_a_spec_is_one() -> None:
    for type_name, keys in renamed.SPEC_KEYS.items():
        fields = {field.name for field in dataclasses.fields(getattr(spec, type_name))}
        assert set(keys.values()) <= fields
        assert not set(keys) & fields
    assert (
        renamed.renamed_spec_key("Stack", "depth")
        == renamed.renamed_spec_key("TransformerStack", "depth")
        == "num_layers"
    )


def test_options() -> None:
    assert renamed.renamed_option("--word") == "--subword-pooling"
    assert renamed.renamed_option("--word", "prompt") == "--verbalizer"
    assert renamed.renamed_option("--json") is None
    assert renamed.renamed_value("--pool", "first") == "cls"
