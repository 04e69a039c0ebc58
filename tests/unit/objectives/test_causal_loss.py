"""Causal language modelling: each token but the first is asked for, or each behind a start token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.data.rng import PackedChunks
from qkv.nn import Ragged
from qkv.objectives import clm
from qkv.objectives.loss import LossSum

sys.path.append(str(Path(__file__).parent))
from bodies import gradients, halves, model, same, text


def losses(body: Any, batch: clm.Inputs) -> tuple[LossSum, ...]:
    return (clm.loss(body, batch),)


def test_labels_are_shifted_inside_each_piece() -> None:
    batch = clm.make_inputs(PackedChunks.from_arrays([5, 6, 7, 8, 9], [3, 2], [0, 1]))
    assert [x.tolist() for x in batch.tokens.sequences()] == [[5, 6], [8]]
    assert batch.labels.tolist() == [6, 7, 9]
    assert batch.positions is None
    assert batch.num_targets == (3, 3)  # labels, and tokens for the penalty on hidden states


def test_behind_a_start_token_the_first_is_asked_for_too() -> None:
    batch = clm.make_inputs(PackedChunks.from_arrays([5, 6, 7, 8], [3, 1], [0, 1]), bos_id=2)
    assert [x.tolist() for x in batch.tokens.sequences()] == [[2, 5, 6], [2]]
    assert batch.labels.tolist() == [5, 6, 7, 8]
    assert batch.positions is None


def test_a_piece_of_one_token_asks_for_nothing_and_disturbs_nobody() -> None:
    batch = clm.make_inputs(PackedChunks.from_arrays([5, 6, 7, 8, 9], [1, 3, 1], [0, 1, 2]))
    assert [x.tolist() for x in batch.tokens.sequences()] == [[5], [6, 7], [9]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [1, 2]
    assert batch.labels.tolist() == [7, 8]
    alone = clm.make_inputs(PackedChunks.from_arrays([5], [1], [0]))
    total, targets = clm.loss(model("gpt2"), alone)
    assert (total.item(), targets) == (0.0, 0)


def test_a_family_without_a_start_token_has_none() -> None:
    pieces = text()
    assert clm.make_inputs(pieces, bos_id=-1).labels.tolist() == clm.make_inputs(pieces).labels.tolist()


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
    total, targets = clm.loss(body, clm.make_inputs(pieces, bos_id=start))
    assert targets == count
    torch.testing.assert_close(total, wanted)


def test_the_gradient_does_not_depend_on_how_a_batch_is_cut() -> None:
    body, pieces = model("gpt2"), text()
    whole, parts = [clm.make_inputs(pieces)], [clm.make_inputs(part) for part in halves(pieces)]
    assert same(gradients(body, whole, losses), gradients(body, parts, losses))
