"""Tiny models in double precision, and text for them: tokens 0 to 4 are special, the last ten are sentinels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.data.rng import CounterRNG, PackedChunks
from qkv.families import get_family
from qkv.nn import build
from qkv.objectives.loss import LossSum
from qkv.tokenization.vocab_tables import VocabTables

VOCABULARY = 41
MASK, CLS, SEP = 4, 1, 2
SENTINELS = tuple(range(40, 30, -1))
CHANCE = CounterRNG(3, 1)


def marks() -> VocabTables:
    special = np.zeros(VOCABULARY, dtype=bool)
    special[[*range(5), *SENTINELS]] = True
    number = np.arange(VOCABULARY)
    return VocabTables(
        special,
        mask_id=MASK,
        is_sentence_end=number == 10,
        is_subword_continuation=number % 2 == 0,
        sentinel_ids=SENTINELS,
    )


MARKS = marks()


def model(name: str, *, vocabulary: int = VOCABULARY, length: int = 40, width: int = 12, **given: Any) -> Any:
    """Return a model with weights large enough that targets differ in probability."""
    module = get_family(name)
    shape = next(iter(module.PRESETS.values()))
    small = {"d_model": width, "heads": 2, "layers": 2, "d_ff": 24, "max_length": length, "d_kv": 6}
    small |= {"decoder_heads": 2, "decoder_layers": 1, "decoder_d_ff": 24}
    shape = replace(shape, **{key: size for key, size in small.items() if hasattr(shape, key)})
    sides = [side for side in ("source_vocab_size", "target_vocab_size") if side in module.make_spec.__kwdefaults__]
    torch.manual_seed(2)
    made = build(module.make_spec(shape, **dict.fromkeys(sides, vocabulary), **given)).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def text(lengths: Sequence[int] = (9, 1, 14, 2, 20), framed: bool = False) -> PackedChunks:
    random = np.random.default_rng(5)
    parts = [random.integers(5, 31, n) for n in lengths]
    if framed:
        parts = [np.concatenate([[CLS], part, [SEP]]) for part in parts]
    return PackedChunks.from_arrays(np.concatenate(parts), [len(part) for part in parts], 3 * np.arange(len(parts)))


def halves(pieces: PackedChunks, at: int = 2) -> list[PackedChunks]:
    """Return the chunks in two batches."""
    edge = int(pieces.lengths[:at].sum())
    first = PackedChunks(pieces.ids[:edge], pieces.lengths[:at], pieces.indices[:at])
    return [first, PackedChunks(pieces.ids[edge:], pieces.lengths[at:], pieces.indices[at:])]


def mean_loss(parts: Sequence[tuple[LossSum, ...]]) -> Tensor:
    """Return the sum of the mean losses of a batch that is split into micro-batches."""
    losses = [
        sum(term.total for term in terms) / max(sum(term.num_targets for term in terms), 1)
        for terms in zip(*parts, strict=True)
    ]
    return torch.stack(losses).sum()


def gradients(body: Any, parts: Sequence[Any], losses: Callable[[Any, Any], tuple[LossSum, ...]]) -> list[Tensor]:
    """Return the gradients of the loss of a batch that is split into micro-batches."""
    body.zero_grad()
    mean_loss([losses(body, part) for part in parts]).backward()
    return [parameter.grad.clone() for parameter in body.parameters() if parameter.grad is not None]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.allclose(a, b, atol=1e-12) for a, b in zip(one, other, strict=True))
