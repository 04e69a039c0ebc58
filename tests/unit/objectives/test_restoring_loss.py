"""Denoising and span corruption: the encoder reads what was spoilt, the decoder is asked for the target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.data.noise.config import SpanCorruptionConfig
from qkv.data.noise.denoising import add_noise
from qkv.data.noise.span_corruption import corrupt_spans
from qkv.nn import Ragged
from qkv.objectives import denoising, reconstruction, span_corruption
from qkv.objectives.loss import LossSum

sys.path.append(str(Path(__file__).parent))
from bodies import CHANCE, MARKS, gradients, halves, model, same, text

SHORT = SpanCorruptionConfig(noise_density=0.3, mean_noise_span_length=2)
CASES = [
    ("bart", denoising, add_noise, None),
    ("t5", span_corruption, corrupt_spans, None),
    ("t5", span_corruption, corrupt_spans, SHORT),
]


def losses(body: Any, batch: Any) -> tuple[LossSum, ...]:
    return (reconstruction.loss(body, batch),)


def ragged(ids: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    return [x.tolist() for x in Ragged.from_lengths(ids, lengths).sequences()]


@pytest.mark.parametrize(("name", "objective", "make", "how"), CASES)
def test_both_sides_are_closed_and_the_target_opened_as_the_model_says(
    name: str, objective: Any, make: Any, how: Any
) -> None:
    body, pieces = model(name), text()
    options = () if how is None else (how,)
    plain = make(pieces, MARKS, CHANCE, *options)
    found = objective.make_inputs(pieces, MARKS, CHANCE, *options, model=body.spec)
    start, end = body.spec.bos_id, body.spec.eos_id
    assert (start, end) == ((2, 2) if name == "bart" else (0, 1))
    sources, targets = ragged(plain.source, plain.source_lengths), ragged(plain.target, plain.target_lengths)
    assert [x.tolist() for x in found.source.sequences()] == [[*ids, end] for ids in sources]
    assert [x.tolist() for x in found.target.sequences()] == [[start, *ids] for ids in targets]
    assert found.labels.tolist() == [token for ids in targets for token in (*ids, end)]


@pytest.mark.parametrize(("name", "objective", "make", "how"), CASES[:2])
def test_the_loss_is_the_sum_of_negative_log_probabilities(name: str, objective: Any, make: Any, how: Any) -> None:
    del make, how
    body = model(name)
    batch = objective.make_inputs(text(), MARKS, CHANCE, model=body.spec)
    said = torch.log_softmax(body(batch.source, batch.target), -1)
    total, targets = reconstruction.loss(body, batch)
    assert targets == len(batch.labels)
    torch.testing.assert_close(total, -sum(said[place, label] for place, label in enumerate(batch.labels.tolist())))


@pytest.mark.parametrize(("name", "objective", "make", "how"), CASES[:2])
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(name: str, objective: Any, make: Any, how: Any) -> None:
    del make, how
    body, pieces = model(name), text()
    whole = [objective.make_inputs(pieces, MARKS, CHANCE, model=body.spec)]
    parts = [objective.make_inputs(part, MARKS, CHANCE, model=body.spec) for part in halves(pieces)]
    assert same(gradients(body, whole, losses), gradients(body, parts, losses))
