"""Objectives from outside the package: registered by name, validated in a recipe, trained by the same workload."""

# ruff: noqa: ARG001, ARG002  # an interface to implement, and a fixture to use

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from test_pretraining import recipe_of, run_all

from qkv import register
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import CounterRNG
from qkv.errors import InputError
from qkv.objectives import clm, registry
from qkv.objectives.base import Objective, TextContext
from qkv.objectives.loss import LossSum
from qkv.objectives.mixture import ObjectiveMixture
from qkv.objectives.registry import OBJECTIVES
from qkv.recipe import objectives as recipe_objectives
from qkv.recipe.objectives import OBJECTIVE_CONFIGS, CLMObjective, ObjectiveConfig
from qkv.recipe.parse import parse_recipe, recipe_to_yaml


@dataclass(frozen=True, kw_only=True)
class SuffixConfig(ObjectiveConfig):
    """Settings of the objective below."""

    scale: float = 1.0
    """Factor of the loss."""

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"scale is {self.scale}; give a number above 0")


class SuffixLM(Objective[SuffixConfig]):
    """Causal language modeling with a factor, as a user would write it."""

    config_class = SuffixConfig
    architectures = frozenset({"decoder"})
    inputs_class = clm.Inputs

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        return max_length

    def prepare(self, batch: ChunkBatch, context: TextContext, rng: CounterRNG) -> clm.Inputs:
        return clm.make_inputs(batch.chunks)

    def losses(self, model: Any, inputs: clm.Inputs, label_smoothing: float = 0.0) -> tuple[LossSum, ...]:
        total, num_targets = clm.loss(model, inputs)
        return (LossSum(total * self.config.scale, num_targets),)

    def sample(self, model: Any, chunk: ChunkBatch, context: TextContext, rng: CounterRNG) -> str:
        return "a sample of mine"


@pytest.fixture
def suffix_lm(monkeypatch: pytest.MonkeyPatch) -> type[SuffixLM]:
    """The objective above as `suffix_lm`, for one test."""
    for entries in (OBJECTIVES, OBJECTIVE_CONFIGS):
        monkeypatch.setattr(entries, "_entries", dict(entries._entries))
    return register.objective("suffix_lm")(SuffixLM)


def test_a_registered_objective_is_trained_and_scored(suffix_lm, tmp_path):
    recipe = recipe_of("gpt2", tmp_path, "objective={suffix_lm: {scale: 2}}", "validation.num_samples=1")
    assert recipe.objective == {"suffix_lm": SuffixConfig(scale=2.0)}
    records = run_all(recipe, tmp_path / "run")
    valid = next(record for record in records if record.kind == "valid")
    assert tuple(valid.samples) == ("a sample of mine",)
    half = recipe_of("gpt2", tmp_path, "objective=suffix_lm", "validation.num_samples=0")
    plain = run_all(half, tmp_path / "half")
    first, other = (next(r.values["loss"] for r in found if r.kind == "train") for found in (records, plain))
    assert first == pytest.approx(2 * other, rel=0.05)  # the updates of Adam do not depend on the scale


def test_its_settings_are_validated_like_those_of_the_built_in_ones(suffix_lm, tmp_path):
    for change, message in [
        ("objective={suffix_lm: {scael: 2}}", "unknown key 'objective.suffix_lm.scael'; did you mean 'scale'"),
        ("objective={suffix_lm: {scale: often}}", "key 'objective.suffix_lm.scale' cannot be 'often'"),
        ("objective={suffix_lm: {scale: 0}}", "scale is 0"),
        ("objective={suffix_lm: {weight: -1}}", "key 'objective.suffix_lm.weight' cannot be -1"),
        ("objective=sufix_lm", "unknown key 'objective.sufix_lm'; did you mean 'suffix_lm'"),
    ]:
        with pytest.raises(InputError, match=message):
            recipe_of("gpt2", tmp_path, change)


def test_a_model_that_it_does_not_fit_is_refused(suffix_lm, tmp_path):
    with pytest.raises(InputError, match="objective: suffix_lm needs a decoder, and bert is an encoder; try mlm"):
        run_all(recipe_of("bert", tmp_path, "objective=suffix_lm"), tmp_path / "run")


def test_objectives_that_prepare_the_same_class_of_inputs_are_not_mixed(suffix_lm):
    with pytest.raises(InputError, match="clm and suffix_lm cannot be mixed"):
        ObjectiveMixture({"clm": CLMObjective(), "suffix_lm": SuffixConfig()}, seed=1)


def test_a_recipe_is_written_and_read_back_with_its_objectives(suffix_lm, tmp_path):
    import yaml

    for change in ("objective={suffix_lm: {scale: 3}}", "objective={clm: {weight: 2}}", "objective=clm"):
        recipe = recipe_of("gpt2", tmp_path, change)
        assert parse_recipe(yaml.safe_load(recipe_to_yaml(recipe)), "here") == recipe


def test_a_config_class_of_another_kind_is_refused():
    class Wrong:
        config_class = dict

    with pytest.raises(InputError, match="config_class must be a subclass"):
        OBJECTIVES.register("wrong", Wrong)
    assert "wrong" not in OBJECTIVES


def test_a_taken_name_is_refused():
    with pytest.raises(InputError, match="'mlm' is already registered"):
        OBJECTIVES.register("mlm", SuffixLM)


@pytest.mark.parametrize("name", ["clm", "mlm", "denoising", "span_corruption"])
def test_every_objective_has_a_config_in_recipes_and_its_own_name(name):
    assert OBJECTIVES.names()[:4] == OBJECTIVE_CONFIGS.names()[:4]
    assert OBJECTIVES.get(name).config_class is OBJECTIVE_CONFIGS.get(name)
    assert OBJECTIVES.get(name).name == name


@pytest.mark.parametrize(
    "module", [registry.__name__, recipe_objectives.__name__, "qkv.recipe.schema", "qkv.tokenization.tokenizer"]
)
def test_names_configs_and_tokenizers_need_no_torch(module):
    code = f"import sys, {module}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
