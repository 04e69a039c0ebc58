"""Losses of heads that label: sums that can be cut, equal to torch's own on padded tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qkv import spec
from qkv.data.rng import PackedChunks
from qkv.families import gpt2
from qkv.nn import BatchLayout, Ragged, build
from qkv.objectives import classification, clm
from qkv.objectives.classification import Inputs


def inputs(labels: torch.Tensor, lengths: list[int] | None = None, **others: object) -> Inputs:
    source = Ragged.from_lengths(torch.arange(sum(lengths or [1])), lengths or [1])
    return Inputs(source, None, None, labels, **others)


@pytest.fixture
def chance() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def test_the_loss_of_classes_is_a_sum_over_examples(chance: torch.Generator) -> None:
    logits, right = torch.randn(5, 3, generator=chance), torch.tensor([0, 2, 1, 1, 0])
    total, targets = classification.cross_entropy(logits, inputs(right))
    assert targets == 5
    assert float(total) == pytest.approx(5 * float(F.cross_entropy(logits, right)))


def test_a_weighted_loss_is_the_same_however_a_batch_is_cut(chance: torch.Generator) -> None:
    logits, right = torch.randn(5, 3, generator=chance), torch.tensor([0, 2, 1, 1, 0])
    weights = torch.tensor([1.0, 2.0, 5.0])
    whole = float(classification.cross_entropy(logits, inputs(right), weights).total)
    parts = [
        float(classification.cross_entropy(logits[cut], inputs(right[cut]), weights).total)
        for cut in (slice(0, 2), slice(2, 5))
    ]
    assert whole == pytest.approx(sum(parts))
    assert whole == pytest.approx(float(F.cross_entropy(logits, right, weights, reduction="sum")))


def test_numbers_have_the_squared_error() -> None:
    total, targets = classification.mse(torch.tensor([[1.0], [2.0]]), inputs(torch.tensor([3.0, 2.5])))
    assert (float(total), targets) == (4.25, 2)


def test_several_labels_are_judged_each_for_itself(chance: torch.Generator) -> None:
    logits, right = torch.randn(4, 3, generator=chance), torch.randint(0, 2, (4, 3), generator=chance).float()
    total, targets = classification.multi_label_bce(logits, inputs(right))
    assert targets == 4
    assert float(total / targets) == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, right)))


def test_a_span_is_a_choice_among_the_tokens_of_its_own_sequence(chance: torch.Generator) -> None:
    lengths, logits = [4, 2, 3], torch.randn(9, 2, generator=chance)
    right = torch.tensor([[1, 3], [0, 0], [2, 2]])
    total, targets = classification.span_cross_entropy(logits, inputs(right, lengths))
    wanted = 0.0
    for rows, places in zip(torch.split(logits, lengths), right.tolist(), strict=True):
        for side, place in enumerate(places):
            wanted -= float(torch.log_softmax(rows[:, side], 0)[place]) / 2
    assert float(total) == pytest.approx(wanted)
    assert targets == 3


def test_options_compete_within_their_example(chance: torch.Generator) -> None:
    logits = torch.randn(5, 1, generator=chance)
    batch = inputs(torch.tensor([1, 2]), choices=BatchLayout([2, 3]))
    wanted = sum(
        float(F.cross_entropy(rows[:, 0], torch.tensor(right)))
        for rows, right in zip(torch.split(logits, [2, 3]), (1, 2), strict=True)
    )
    assert float(classification.multiple_choice_ce(logits, batch).total) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["span_cross_entropy", "multiple_choice_ce"])
def test_what_is_not_there_gets_no_gradient_and_breaks_none(kind: str, chance: torch.Generator) -> None:
    logits = torch.randn(5, 2 if kind == "span_cross_entropy" else 1, generator=chance, requires_grad=True)
    right = torch.tensor([[1, 1], [0, 2]]) if kind == "span_cross_entropy" else torch.tensor([1, 2])
    getattr(classification, kind)(logits, inputs(right, [2, 3], choices=BatchLayout([2, 3]))).total.backward()
    assert torch.isfinite(logits.grad).all()
    assert all(abs(float(rows.sum())) < 1e-6 for rows in torch.split(logits.grad, [2, 3]))


def test_the_language_loss_is_the_causal_one_of_each_text(chance: torch.Generator) -> None:
    model = build(
        gpt2.make_spec(
            spec.replace(gpt2.PRESETS["small"], d_model=8, heads=2, layers=1, max_length=8), target_vocab_size=11
        )
    ).eval()
    ids, lengths = torch.randint(0, 11, (7,), generator=chance), [3, 4]
    batch = classification.Inputs(Ragged.from_lengths(ids, lengths), None, None, torch.zeros(2))
    total, targets = classification.auxiliary_lm_loss(model, batch, model.hidden_states(batch.source).hidden.values)
    wanted = clm.loss(model, clm.make_inputs(PackedChunks.from_arrays(ids, lengths, [0, 1])))
    assert targets == wanted.num_targets == batch.num_targets[1] == 5
    assert total.item() == pytest.approx(wanted.total.item(), rel=1e-5)
