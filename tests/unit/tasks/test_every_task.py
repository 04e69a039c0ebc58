"""Laws of all tasks: what is asked can be read off again, learned, and does not depend on who else is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from task_models import CASES, FAMILIES, LENGTH, Case, learn, logits_of, model, tokeniser, told

from qkv.checkpoints import load, save
from qkv.checkpoints.inputs import max_input_length
from qkv.data.pair import Pair
from qkv.errors import InputError
from qkv.families import head_names
from qkv.objectives.classification import head_logits
from qkv.recipe.task_names import ALIASES, trainable_task_names
from qkv.tasks import get_task
from qkv.tasks.base import compute_metrics, predict
from qkv.tasks.head_outputs import input_processor

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def unlabelled(example: Any) -> Any:
    for name, nothing in (("label", None), ("tags", None)):
        if hasattr(example, name):
            return replace(example, **{name: nothing})
    return replace(example, answers=(), answerable=None)


def test_every_task_has_a_case() -> None:
    assert {case.task for case in CASES.values()} == set(trainable_task_names())


@EVERY
@pytest.mark.parametrize("family", FAMILIES)
def test_perfect_logits_give_perfect_predictions(case: Case, family: str) -> None:
    task = case.make()
    labels = task.labels(case.examples)
    found = told(task, case.examples, labels, LENGTH, tokeniser(family))
    figures = compute_metrics(task, found, case.examples, labels)
    decides = task.primary_metric(labels)
    assert figures[decides] == pytest.approx(100.0 if task.name == "question_answering" else 1.0)


@EVERY
def test_a_tiny_model_learns_eight_examples_by_heart(case: Case) -> None:
    task = case.make()
    labels = task.labels(case.examples)
    bundle = model(task, labels)
    before = compute_metrics(task, predict(task, bundle, case.examples), case.examples, labels)[
        task.primary_metric(labels)
    ]
    learn(task, bundle, case.examples, case.steps)
    after = compute_metrics(task, predict(task, bundle, case.examples), case.examples, labels)[
        task.primary_metric(labels)
    ]
    assert before < after
    assert after > (99.9 if task.name == "question_answering" else 0.99)


def with_heads() -> list[Any]:
    """Every case under every family that has the head for it."""
    heads = {name: head_names(module) for name, module in FAMILIES.items()}
    of_text = {name: case.make().head_kind for name, case in CASES.items() if case.task != "image_classification"}
    fitting = [(name, family) for name, kind in of_text.items() for family in FAMILIES if kind in heads[family]]
    fitting += [("image_classification", "vit")]
    return [pytest.param(CASES[name], family, id=f"{family}-{name}") for name, family in fitting]


@pytest.mark.parametrize(("case", "family"), with_heads())
def test_batch_mates_do_not_matter_and_order_is_kept(case: Case, family: str) -> None:
    task = case.make()
    bundle = model(task, task.labels(case.examples), family=family)
    together = logits_of(task, bundle, case.examples)
    alone = logits_of(task, bundle, case.examples[::-1], max_tokens=1)[::-1]
    for parts, others in zip(together, alone, strict=True):
        assert len(parts) == len(others)
        for (_, ours), (_, theirs) in zip(sorted_by_ids(parts), sorted_by_ids(others), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def sorted_by_ids(parts: list[Any]) -> list[Any]:
    return sorted(parts, key=lambda part: [list(one) for one in part[0].input_ids])


@EVERY
def test_the_loss_of_a_batch_is_that_of_its_parts(case: Case) -> None:
    task = case.make()
    labels = task.labels(case.examples)
    bundle = model(task, labels)
    asked = task.featurize(case.examples, input_processor(task, bundle), labels, max_input_length(bundle.model.spec))
    with torch.no_grad():
        whole, *parts = (
            task.loss(head_logits(bundle.model, batch), batch)
            for batch in (task.collate(some, True) for some in (asked, asked[:3], asked[3:]))
        )
    assert whole.num_targets == sum(part.num_targets for part in parts)
    assert float(whole.total) == pytest.approx(sum(float(part.total) for part in parts), rel=1e-4)


@EVERY
def test_what_nobody_has_labelled_is_predicted_alike(case: Case) -> None:
    task = case.make()
    bundle = model(task, task.labels(case.examples))
    mixed = [unlabelled(one) if i % 2 else one for i, one in enumerate(case.examples)]
    assert predict(task, bundle, mixed) == predict(task, bundle, case.examples)


@EVERY
def test_what_nobody_has_labelled_is_no_training_example(case: Case) -> None:
    with pytest.raises(InputError, match=r"has no .*; add"):
        case.make().labels([*case.examples, unlabelled(case.examples[0])])


@EVERY
def test_no_examples_have_no_predictions(case: Case) -> None:
    task = case.make()
    assert predict(task, model(task, task.labels(case.examples)), []) == []


@EVERY
def test_what_the_task_makes_of_the_head_is_saved_with_the_model(case: Case, tmp_path: Path) -> None:
    task = case.make()
    bundle = model(task, task.labels(case.examples))
    save(bundle, tmp_path / "ours")
    save(bundle, tmp_path / "theirs", "huggingface")
    for folder in ("ours", "theirs"):
        head = load(tmp_path / folder).model.spec.head
        assert head == bundle.model.spec.head
        assert all(getattr(head, name) == value for name, value in task.head_overrides.items())


@pytest.mark.parametrize("name", trainable_task_names())
def test_the_examples_of_another_task_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"task {name}: takes .* this format gives Pair"):
        get_task(name).labels([Pair("a", "b", "here")])


@pytest.mark.parametrize("name", trainable_task_names())
def test_a_model_with_another_head_is_refused(name: str) -> None:
    case = next(case for case in CASES.values() if case.task == name)
    other = get_task("token_classification" if name != "token_classification" else "multiple_choice")
    with pytest.raises(InputError, match=f"{name}: needs a head of kind"):
        predict(get_task(name), model(other, ("a", "b")), case.examples)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_its_task(alias: str, name: str) -> None:
    assert get_task(alias) == get_task(name)
    assert get_task(alias).name == name
