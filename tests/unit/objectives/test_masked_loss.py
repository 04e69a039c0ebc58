"""Masked language modelling: what goes in, what is asked for, and the loss, alone and beside next-sentence's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.data.noise.config import MLMConfig
from qkv.objectives import mlm
from qkv.objectives.loss import LossSum, to_device

sys.path.append(str(Path(__file__).parent))
from bodies import CHANCE, MARKS, MASK, gradients, halves, model, same, text

MANY = MLMConfig(mask_prob=0.4)
FOLLOWS = torch.tensor([True, False, False, True, True])


def batches(parts: int = 1) -> list[mlm.Inputs]:
    """Framed pieces whose second half is segment 1, in one batch or two."""
    found = []
    for part, follows in zip(
        halves(text(framed=True)) if parts == 2 else [text(framed=True)],
        [FOLLOWS[:2], FOLLOWS[2:]] if parts == 2 else [FOLLOWS],
        strict=True,
    ):
        segments = torch.cat([torch.arange(n) * 2 // n for n in part.lengths.tolist()])
        found.append(mlm.make_inputs(part, MARKS, CHANCE, MANY, segments=segments, is_next=follows))
    return found


def one(body: Any, batch: mlm.Inputs) -> tuple[LossSum, ...]:
    return (mlm.loss(body, batch),)


def test_the_loss_is_the_sum_of_negative_log_probabilities_of_what_stood_there() -> None:
    body, (batch,), before = model("bert"), batches(), text(framed=True)
    said = torch.log_softmax(body(batch.source, batch.segments), -1)  # of every token
    wanted = -sum(said[place, before.ids[place]] for place in batch.positions.tolist())
    total, targets = mlm.loss(body, batch)
    assert targets == len(batch.positions) > 5
    torch.testing.assert_close(total, wanted)


def test_logits_are_computed_only_where_a_target_stands() -> None:
    body, (batch,) = model("bert"), batches()
    seen = []
    body.head.linear.register_forward_hook(lambda _module, _given, logits: seen.append(len(logits)))
    mlm.loss(body, batch)
    assert seen == [len(batch.positions)]


def test_the_encoder_reads_the_masks_and_not_what_stood_there() -> None:
    (batch,) = batches()
    assert (batch.source.values[batch.positions] == MASK).any()
    assert batch.source.layout.lengths_list == tuple(text(framed=True).lengths)


def test_next_sentence_is_binary_cross_entropy_and_the_first_logit_says_that_it_follows() -> None:
    logits = torch.randn(5, 2, dtype=torch.float64)
    follows = torch.sigmoid(logits[:, 0] - logits[:, 1])
    wanted = torch.nn.functional.binary_cross_entropy(follows, FOLLOWS.double(), reduction="sum")
    total, targets = mlm.next_sentence_loss(logits, FOLLOWS)
    assert targets == 5
    torch.testing.assert_close(total, wanted)


def test_both_losses_of_one_pass_are_those_of_two() -> None:
    body, (batch,) = model("bert", head="pretraining"), batches()
    words, pairs = mlm.mlm_and_nsp_losses(body, batch)
    said, judged = body.forward_with_aux_head(batch.source, batch.segments)
    torch.testing.assert_close(
        words.total, torch.nn.functional.cross_entropy(said[batch.positions], batch.labels) * len(batch.positions)
    )
    torch.testing.assert_close(pairs.total, mlm.next_sentence_loss(judged, FOLLOWS).total)
    assert batch.num_targets == (words.num_targets, pairs.num_targets) == (len(batch.positions), 5)


@pytest.mark.parametrize(("head", "losses"), [("masked_lm", one), ("pretraining", mlm.mlm_and_nsp_losses)])
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(head: str, losses: Any) -> None:
    body = model("bert", head=head)
    assert same(gradients(body, batches(1), losses), gradients(body, batches(2), losses))


def test_a_batch_without_targets_costs_nothing() -> None:
    batch = mlm.make_inputs(text([1, 1]), MARKS, CHANCE, MLMConfig(mask_prob=0.0))
    total, targets = mlm.loss(model("bert"), batch)
    assert (total.item(), targets) == (0.0, 0)


def test_a_batch_goes_to_a_device_whole() -> None:
    (batch,) = batches()
    moved = to_device(batch, "meta")
    tensors = [
        moved.source.values,
        moved.source.layout.lengths,
        moved.segments,
        moved.positions,
        moved.labels,
        moved.is_next,
    ]
    assert {x.device.type for x in tensors} == {"meta"}
    assert to_device(mlm.make_inputs(text(), MARKS, CHANCE), "meta").segments is None
