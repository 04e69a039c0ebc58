"""Tiny models in double precision, and text for them: tokens 0 to 4 are special, the last ten are sentinels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.data.chance import Chance, Pieces
from qkv.families import family
from qkv.nn import build
from qkv.objectives.term import Term, mean
from qkv.text.marks import Marks

VOCABULARY = 41
MASK, CLS, SEP = 4, 1, 2
SENTINELS = tuple(range(40, 30, -1))
CHANCE = Chance(3, 1)


def marks() -> Marks:
    special = np.zeros(VOCABULARY, dtype=bool)
    special[[*range(5), *SENTINELS]] = True
    number = np.arange(VOCABULARY)
    return Marks(special, mask=MASK, stops=number == 10, continues=number % 2 == 0, sentinels=SENTINELS)


MARKS = marks()


def model(name: str, *, vocabulary: int = VOCABULARY, length: int = 40, width: int = 12, **given: Any) -> Any:
    """Sharp enough that targets differ in probability."""
    module = family(name)
    shape = next(iter(module.SIZES.values()))
    small = {"width": width, "heads": 2, "layers": 2, "hidden": 24, "length": length, "key": 6}
    small |= {"decoder_heads": 2, "decoder_layers": 1, "decoder_hidden": 24}
    shape = replace(shape, **{key: size for key, size in small.items() if hasattr(shape, key)})
    sides = [side for side in ("source", "target") if side in module.spec.__kwdefaults__]
    torch.manual_seed(2)
    made = build(module.spec(shape, **dict.fromkeys(sides, vocabulary), **given)).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def text(lengths: Sequence[int] = (9, 1, 14, 2, 20), framed: bool = False) -> Pieces:
    random = np.random.default_rng(5)
    parts = [random.integers(5, 31, n) for n in lengths]
    if framed:
        parts = [np.concatenate([[CLS], part, [SEP]]) for part in parts]
    return Pieces.of(np.concatenate(parts), [len(part) for part in parts], 3 * np.arange(len(parts)))


def halves(pieces: Pieces, at: int = 2) -> list[Pieces]:
    """The same pieces in two batches."""
    edge = int(pieces.lengths[:at].sum())
    first = Pieces(pieces.ids[:edge], pieces.lengths[:at], pieces.numbers[:at])
    return [first, Pieces(pieces.ids[edge:], pieces.lengths[at:], pieces.numbers[at:])]


def gradients(body: Any, parts: Sequence[Any], losses: Callable[[Any, Any], tuple[Term, ...]]) -> list[Tensor]:
    """Of the loss of a batch that comes in parts."""
    body.zero_grad()
    mean([losses(body, part) for part in parts]).backward()
    return [parameter.grad.clone() for parameter in body.parameters() if parameter.grad is not None]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.allclose(a, b, atol=1e-12) for a, b in zip(one, other, strict=True))
