"""The loss of an encoder-decoder: what goes in, what is asked for, and what smoothing and agreement add."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qkv.data.batching import EncodedPairs
from qkv.objectives.seq2seq import loss, make_inputs

sys.path.append(str(Path(__file__).parents[1] / "generation"))
from writers import tiny

PAIRS = EncodedPairs([[5, 6, 7], [8]], [[4], [9, 10, 4]])


@pytest.fixture
def batch():
    return make_inputs(PAIRS.gather(range(2)), bos_id=2, eos_id=3)


def test_a_source_is_closed_and_a_target_opened(batch):
    assert [s.tolist() for s in batch.source.sequences()] == [[5, 6, 7, 3], [8, 3]]
    assert [s.tolist() for s in batch.target.sequences()] == [[2, 4], [2, 9, 10, 4]]


def test_labels_are_the_target_shifted_by_one_and_closed(batch):
    assert batch.labels.tolist() == [4, 3, 9, 10, 4, 3]


def test_the_loss_is_the_sum_of_negative_log_probabilities(batch):
    model = tiny("transformer")
    log_probabilities = torch.log_softmax(model(batch.source, batch.target), -1)
    wanted = -sum(log_probabilities[i, label] for i, label in enumerate(batch.labels))
    torch.testing.assert_close(loss(model, batch), wanted)


def test_label_smoothing_spreads_its_share_evenly_over_the_vocabulary(batch):
    model = tiny("transformer")
    log_probabilities = torch.log_softmax(model(batch.source, batch.target), -1)
    evenly = -log_probabilities.mean(-1).sum()
    torch.testing.assert_close(loss(model, batch, label_smoothing=0.1), 0.9 * loss(model, batch) + 0.1 * evenly)


@pytest.mark.parametrize("family", ["transformer", "rnn"])
def test_two_passes_without_dropout_agree_and_add_nothing(batch, family):
    model = tiny(family)
    torch.testing.assert_close(loss(model, batch, rdrop_alpha=3.0), loss(model, batch))


def test_two_passes_with_dropout_differ_and_agreement_costs(batch):
    model = tiny("transformer").train()
    costs = []
    for agree in (1e-9, 3.0):
        torch.manual_seed(1)
        costs.append(loss(model, batch, rdrop_alpha=agree).item())
    assert costs[1] > costs[0] + 0.01
