"""Which objective fits which model, and which of several a step gets."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from pathlib import Path

import pytest

from qkv.errors import InputError
from qkv.families import get_family, names
from qkv.objectives.base import Objective
from qkv.objectives.mixture import sample_objective
from qkv.objectives.registry import OBJECTIVES
from qkv.recipe.objectives import OBJECTIVE_CONFIGS

sys.path.append(str(Path(__file__).parent))
from bodies import model


def made(name: str) -> Objective:
    return OBJECTIVES.get(name)(OBJECTIVE_CONFIGS.get(name)())


WEIGHTS = {"mlm": 3.0, "clm": 1.0, "span_corruption": 0.0}


def test_each_objective_comes_as_often_as_its_weight_says() -> None:
    found = Counter(sample_objective(WEIGHTS, seed=1, step=step) for step in range(8000))
    assert found["mlm"] / 8000 == pytest.approx(0.75, abs=0.015)
    assert found["span_corruption"] == 0
    assert set(found) == {"mlm", "clm"}


def test_the_choice_is_a_function_of_seed_and_step() -> None:
    def run(seed: int, first: int, weights: dict[str, float]) -> list[str]:
        return [sample_objective(weights, seed=seed, step=step) for step in range(first, 200)]

    whole = run(1, 0, WEIGHTS)
    assert run(1, 120, WEIGHTS) == whole[120:]
    assert run(1, 0, dict(reversed(WEIGHTS.items()))) == whole
    assert run(2, 0, WEIGHTS) != whole


@pytest.mark.parametrize("weights", [{}, {"mlm": 0.0}, {"mlm": -1.0, "clm": 3.0}])
def test_weights_that_mean_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(InputError, match="weight"):
        sample_objective(weights, seed=0, step=0)


@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("bert", {"mlm"}),
        ("xlnet", {"plm"}),
        ("gpt2", {"clm"}),
        ("t5", {"denoising", "span_corruption"}),
        ("bart", {"denoising", "span_corruption"}),
    ],
)
def test_an_objective_takes_the_models_that_it_fits_and_refuses_others_in_one_line(
    name: str, fitting: set[str]
) -> None:
    spec = model(name).spec
    for objective in OBJECTIVES.names():
        if objective in fitting:
            made(objective).check_model(spec)
        else:
            with pytest.raises(InputError, match=f"^objective: {objective} needs .*{name} is .*try [^\n]*$"):
                made(objective).check_model(spec)


def test_a_model_without_a_vocabulary_to_choose_from_is_refused() -> None:
    with pytest.raises(InputError, match="needs a head of kind 'lm'"):
        made("mlm").check_model(model("bert", head="sequence").spec)


def test_an_unknown_objective_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match="did you mean 'mlm'"):
        made("mml")


def test_every_family_that_reads_text_has_an_objective() -> None:
    for name in names():
        module = get_family(name)
        spec = module.make_spec(next(iter(module.PRESETS.values())), **_vocabularies(module))
        if spec.head is not None and spec.head.kind == "lm":
            assert any(_fits(objective, spec) for objective in OBJECTIVES.names()), name


def _fits(objective: str, spec: object) -> bool:
    try:
        made(objective).check_model(spec)  # type: ignore[arg-type]
    except InputError:
        return False
    return True


def _vocabularies(module: object) -> dict[str, int]:
    wanted = inspect.signature(module.make_spec).parameters  # type: ignore[attr-defined]
    return {side: 13 for side in ("source_vocab_size", "target_vocab_size") if side in wanted}
