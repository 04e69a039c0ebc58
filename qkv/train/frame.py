"""Batches of varied lengths in a frame that stays, so that one CUDA graph serves them all.

Fine-tuning is many short steps, which a GPU has done before the host has launched the next kernel; a graph is one
launch (`qkv.train.graph`), but of one shape. Variable-length attention reads lengths from the device, so that the shape
of a batch is no more than its tokens and its sequences, and a few sequences that nobody is asked about fill both up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkv.nn import Layout, Ragged
from qkv.objectives.label import Inputs

AnyPart = TypeVar("AnyPart", bound=tuple[Any, ...])

_SEEN = 16  # batches from which the frame is learned
_GROWTHS = 2  # each is another recording, of which there are four at most
_ROOM = 1.05  # for a batch that has more sequences than those
_EVEN = 64  # a number of tokens that matrix products like
_IGNORED = -100  # what cross-entropy leaves out; of other losses, what is not a number


@dataclass
class Framing:
    """Learns a frame from the first batches and puts those that come after into it; for some it grows, others go as
    they came."""

    seen: list[tuple[int, int, int]] = field(default_factory=list)  # tokens, sequences, longest
    frame: tuple[int, int, int] | None = None
    growths: int = _GROWTHS  # that are left

    def __call__(self, part: AnyPart) -> AnyPart:
        if not framable(part):
            return part
        layout = part[0].layout
        inside = part if self.frame is None else framed(part, *self.frame)  # type: ignore[arg-type]
        if inside is not part:
            return inside  # type: ignore[return-value]
        if self.frame is None or (self.growths and 2 * layout.total >= self.frame[0]):  # a remainder is let go
            self.growths -= self.frame is not None
            self.seen.append((layout.total, len(layout), layout.longest))
            self.frame = _frame(self.seen) if len(self.seen) >= _SEEN else None
        return part


def framable(part: Any) -> bool:
    """Whether it is a batch of texts that are asked for a class each, for numbers, or token by token."""
    if not isinstance(part, Inputs) or part.source.values.dim() > 1 or part.choices or part.words:
        return False
    if part.at is not None:
        return part.labels.shape == part.at.shape
    spans = part.labels.dim() > 1 and not part.labels.is_floating_point()
    return len(part.labels) == len(part.source) and not spans


def _frame(seen: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """The smallest one in which the batches fit that are not mere remainders."""
    longest = max(2, *(length for _, _, length in seen))
    most = max(tokens for tokens, _, _ in seen)
    full = [(tokens, sequences) for tokens, sequences, _ in seen if 2 * tokens >= most]
    fewest, sequences = min(n for _, n in full), int(max(n for _, n in full) * _ROOM)
    while True:  # each sequence that is added needs one token, and has room for `longest`
        sequences += 1
        room = -(-(most + sequences - fewest) // _EVEN) * _EVEN
        if all(room - tokens <= (sequences - n) * longest for tokens, n in full):
            return room, sequences, longest


def framed(part: Inputs, tokens: int, sequences: int, longest: int) -> Inputs:
    """The same batch with so many tokens and sequences: the last ones are of zeros, and have no label. Where tokens are
    judged, as many are as there are: some once more, for nothing.

    The sum of losses and its gradient stay as they were. What does not fit is given back as it is. What is added is not
    over `longest`, which the model can take; the batch's own may be, as long as a kernel is told the same of both.
    """
    layout = part.source.layout
    extra, more = tokens - layout.total, sequences - len(layout)
    if more < 1 or extra < more or -(-extra // more) > longest:
        return part
    fill = [extra // more + (number < extra % more) for number in range(more)]
    whole = Layout([*layout.sizes, *fill]).in_frame()
    if whole.longest < 2:  # a head would take it for the ends alone
        return part
    segments = None if part.segments is None else _padded(part.segments, extra)
    source = Ragged(_padded(part.source.values, extra), whole)
    ignored = float("nan") if part.labels.is_floating_point() else _IGNORED
    asked = sequences if part.at is None else tokens
    labels = _padded(part.labels, asked - len(part.labels), ignored)
    at = None if part.at is None else _padded(part.at, asked - len(part.at))
    return part._replace(source=source, segments=segments, at=at, labels=labels)


def _padded(values: Tensor, more: int, fill: float = 0) -> Tensor:
    return torch.cat([values, values.new_full((more, *values.shape[1:]), fill)])
