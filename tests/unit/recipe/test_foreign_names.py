"""Names of other toolkits in recipes and options: the message has the name that qkv uses."""

from __future__ import annotations

import pytest
from test_recipe_values import PAIRS, TASK, parse

from qkv import families, foreign_names
from qkv.errors import InputError
from qkv.recipe.messages import find_key, section_keys
from qkv.recipe.schema import RECIPE_CLASSES


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("lr=1", "train.learning_rate"),
        ("train.lr=1", "train.learning_rate"),
        ("num_train_epochs=3", "train.epochs"),
        ("train.num_epochs=3", "train.epochs"),
        ("train.per_device_train_batch_size=8", "train.batch_size"),
        ("train.weight_decay_rate=0.1", "train.weight_decay"),
        ("train.eval_steps=3", "validation.every_steps"),
        ("model.max_seq_length=99", "model.max_length"),
        ("model.dropout_rate=0.1", "model.dropout"),
        ("model.n_embd=64", "model.d_model"),
        ("model.num_hidden_layers=2", "model.layers"),
        ("train.max_update=4", "train.max_steps"),
        ("train.grad_clip=1", "train.max_grad_norm"),
        ("training.max_steps=3", "train"),
        ("max_steps=3", "train.max_steps"),
        ("train.patience=3", "validation.patience"),
    ],
)
def test_a_foreign_key_is_refused_with_the_key_of_qkv(override: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"unknown key .* {key}$".replace(".", r"\.").replace(r"\.*", ".*")):
        parse(PAIRS, override)


def test_a_foreign_name_of_a_key_that_the_family_lacks_is_answered_with_its_keys() -> None:
    with pytest.raises(InputError, match=r"unknown key 'model\.n_inner'; known: attention, "):
        parse(PAIRS, "model.n_inner=3")


def test_a_foreign_key_that_is_an_option_is_answered_with_it() -> None:
    with pytest.raises(InputError, match="unknown key 'output_dir'; use the option --output"):
        parse(TASK, "output_dir=x")


def test_every_key_of_the_table_exists() -> None:
    config_keys = {key for name in families.names() for key in families.get_family(name).Config.__dataclass_fields__}
    for key in {*foreign_names.RECIPE_KEYS.values(), *foreign_names.SECTIONS.values()}:
        section, _, rest = key.partition(".")
        if section == "model" and rest:
            assert rest in config_keys | {"family", "init_from"}, key
        elif not key.startswith("--"):
            *parents, name = key.split(".")
            parents = [] if parents[-1:] == ["hold_out"] else parents
            known = {name for cls in RECIPE_CLASSES.values() for name in section_keys(cls, parents)}
            assert name in known | {"valid", "test"}, key


def test_no_foreign_name_is_a_key_of_qkv() -> None:
    assert find_key("learning_rate") == "train.learning_rate"
    own = {name for cls in RECIPE_CLASSES.values() for name in section_keys(cls, ["train"])}
    assert own.isdisjoint(foreign_names.RECIPE_KEYS)


def test_a_family_that_is_not_supported_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="'distilbert' is not supported; the nearest family is bert"):
        parse(PAIRS, "model.family=distilbert")
    with pytest.raises(InputError, match="no family 'transformr'; did you mean 'transformer'"):
        parse(PAIRS, "model.family=transformr")
    assert set(foreign_names.FAMILIES.values()) <= set(families.names())
    assert set(foreign_names.FAMILIES).isdisjoint(families.names())


@pytest.mark.parametrize(
    ("option", "key", "hint"),
    [
        ("--num_beams", None, "qkv calls it --num-beams"),
        ("--beam", None, "qkv calls it --num-beams"),
        ("--output_dir", None, "qkv calls it --output"),
        ("--fp16", "train.precision", "write train.precision=VALUE, without dashes"),
        ("--num-train-epochs", "train.epochs", "qkv calls it --epochs"),
        ("--xyzzy", None, None),
    ],
)
def test_a_foreign_option_is_answered_with_that_of_qkv(option: str, key: str | None, hint: str | None) -> None:
    assert foreign_names.option_hint(option, ["--num-beams", "--output", "--epochs"], key) == hint
