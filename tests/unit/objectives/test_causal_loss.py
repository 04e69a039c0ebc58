"""Causal language modelling: each token but the first is asked for, or each behind a start token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.data.chance import Pieces
from qkv.nn import Ragged
from qkv.objectives import causal
from qkv.objectives.term import Term

sys.path.append(str(Path(__file__).parent))
from bodies import gradients, halves, model, same, text


def losses(body: Any, batch: causal.Inputs) -> tuple[Term, ...]:
    return (causal.loss(body, batch),)


def test_labels_are_shifted_inside_each_piece() -> None:
    batch = causal.prepare(Pieces.of([5, 6, 7, 8, 9], [3, 2], [0, 1]))
    assert [x.tolist() for x in batch.tokens.sequences()] == [[5, 6], [8]]
    assert batch.labels.tolist() == [6, 7, 9]
    assert batch.at is None
    assert batch.targets == (3,)


def test_behind_a_start_token_the_first_is_asked_for_too() -> None:
    batch = causal.prepare(Pieces.of([5, 6, 7, 8], [3, 1], [0, 1]), start=2)
    assert [x.tolist() for x in batch.tokens.sequences()] == [[2, 5, 6], [2]]
    assert batch.labels.tolist() == [5, 6, 7, 8]
    assert batch.at is None


def test_a_piece_of_one_token_asks_for_nothing_and_disturbs_nobody() -> None:
    batch = causal.prepare(Pieces.of([5, 6, 7, 8, 9], [1, 3, 1], [0, 1, 2]))
    assert [x.tolist() for x in batch.tokens.sequences()] == [[5], [6, 7], [9]]
    assert batch.at is not None
    assert batch.at.tolist() == [1, 2]
    assert batch.labels.tolist() == [7, 8]
    alone = causal.prepare(Pieces.of([5], [1], [0]))
    total, targets = causal.loss(model("gpt2"), alone)
    assert (total.item(), targets) == (0.0, 0)


def test_a_family_without_a_start_token_has_none() -> None:
    pieces = text()
    assert causal.prepare(pieces, start=-1).labels.tolist() == causal.prepare(pieces).labels.tolist()


@pytest.mark.parametrize("start", [None, 2])
def test_the_loss_is_the_sum_of_negative_log_probabilities(start: int | None) -> None:
    body, pieces = model("gpt2"), text()
    wanted, count = torch.zeros((), dtype=torch.float64), 0
    for ids in torch.from_numpy(pieces.ids).split(pieces.lengths.tolist()):
        read = ids if start is None else torch.cat([torch.tensor([start]), ids])
        said = torch.log_softmax(body(Ragged.pack([read])), -1)
        for place in range(len(read) - 1):
            wanted -= said[place, read[place + 1]]
            count += 1
    total, targets = causal.loss(body, causal.prepare(pieces, start=start))
    assert targets == count
    torch.testing.assert_close(total, wanted)


def test_the_gradient_does_not_depend_on_how_a_batch_is_cut() -> None:
    body, pieces = model("gpt2"), text()
    whole, parts = [causal.prepare(pieces)], [causal.prepare(part) for part in halves(pieces)]
    assert same(gradients(body, whole, losses), gradients(body, parts, losses))
