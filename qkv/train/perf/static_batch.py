"""Batches of varied lengths in a frame that stays, so that one CUDA graph serves them all.

Fine-tuning is many short steps, which a GPU has done before the host has launched the next kernel; a graph is one
launch (`qkv.train.perf.cuda_graphs`), but of one shape. Variable-length attention reads lengths from the device, so that the shape
of a batch is no more than its tokens and its sequences, and a few sequences that nobody is asked about fill both up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkv.nn import BatchLayout, Ragged
from qkv.objectives.classification import Inputs

InputsT = TypeVar("InputsT", bound=tuple[Any, ...])

_LEARN_BATCHES = 16  # batches from which the frame is learned
_MAX_GROWTHS = 2  # each is another recording, of which there are four at most
_SEQUENCE_MARGIN = 1.05  # for a batch that has more sequences than those
_TOKEN_MULTIPLE = 64  # a number of tokens that matrix products like
_IGNORE_INDEX = -100  # what cross-entropy leaves out; of other losses, what is not a number


@dataclass
class StaticShapePadder:
    """Learns a frame from the first batches and puts those that come after into it; for some it grows, others go as
    they came."""

    observed_shapes: list[tuple[int, int, int]] = field(default_factory=list)  # tokens, sequences, longest
    static_shape: tuple[int, int, int] | None = None
    growths_left: int = _MAX_GROWTHS  # that are left

    def __call__(self, inputs: InputsT) -> InputsT:
        if not can_pad(inputs):
            return inputs
        layout = inputs[0].layout
        padded = inputs if self.static_shape is None else pad_to_static(inputs, *self.static_shape)  # type: ignore[arg-type]
        if padded is not inputs:
            return padded  # type: ignore[return-value]
        if self.static_shape is None or (self.growths_left and 2 * layout.num_tokens >= self.static_shape[0]):  # a remainder is let go
            self.growths_left -= self.static_shape is not None
            self.observed_shapes.append((layout.num_tokens, len(layout), layout.max_length))
            self.static_shape = _choose_static_shape(self.observed_shapes) if len(self.observed_shapes) >= _LEARN_BATCHES else None
        return inputs


def can_pad(inputs: Any) -> bool:
    """Whether it is a batch of texts that are asked for a class each, for numbers, or token by token."""
    if not isinstance(inputs, Inputs) or inputs.source.values.dim() > 1 or inputs.num_choices or inputs.word_ids:
        return False
    if inputs.positions is not None:
        return inputs.labels.shape == inputs.positions.shape
    spans = inputs.labels.dim() > 1 and not inputs.labels.is_floating_point()
    return len(inputs.labels) == len(inputs.source) and not spans


def _choose_static_shape(observed_shapes: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """The smallest one in which the batches fit that are not mere remainders."""
    max_length = max(2, *(length for _, _, length in observed_shapes))
    max_tokens = max(tokens for tokens, _, _ in observed_shapes)
    full_batches = [(tokens, num_sequences) for tokens, num_sequences, _ in observed_shapes if 2 * tokens >= max_tokens]
    min_sequences, num_sequences = min(n for _, n in full_batches), int(max(n for _, n in full_batches) * _SEQUENCE_MARGIN)
    while True:  # each sequence that is added needs one token, and has room for `max_length`
        num_sequences += 1
        num_tokens = -(-(max_tokens + num_sequences - min_sequences) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        if all(num_tokens - tokens <= (num_sequences - n) * max_length for tokens, n in full_batches):
            return num_tokens, num_sequences, max_length


def pad_to_static(inputs: Inputs, num_tokens: int, num_sequences: int, max_length: int) -> Inputs:
    """The same batch with so many tokens and sequences: the last ones are of zeros, and have no label. Where tokens are
    judged, as many are as there are: some once more, for nothing.

    The sum of losses and its gradient stay as they were. What does not fit is given back as it is. What is added is not
    over `max_length`, which the model can take; the batch's own may be, as long as a kernel is told the same of both.
    """
    layout = inputs.source.layout
    extra_tokens, extra_sequences = num_tokens - layout.num_tokens, num_sequences - len(layout)
    if extra_sequences < 1 or extra_tokens < extra_sequences or -(-extra_tokens // extra_sequences) > max_length:
        return inputs
    fill_lengths = [extra_tokens // extra_sequences + (index < extra_tokens % extra_sequences) for index in range(extra_sequences)]
    padded_layout = BatchLayout([*layout.lengths_list, *fill_lengths]).mark_static()
    if padded_layout.max_length < 2:  # a head would take it for the ends alone
        return inputs
    token_type_ids = None if inputs.segments is None else _pad(inputs.segments, extra_tokens)
    source = Ragged(_pad(inputs.source.values, extra_tokens), padded_layout)
    ignore_value = float("nan") if inputs.labels.is_floating_point() else _IGNORE_INDEX
    num_targets = num_sequences if inputs.positions is None else num_tokens
    labels = _pad(inputs.labels, num_targets - len(inputs.labels), ignore_value)
    positions = None if inputs.positions is None else _pad(inputs.positions, num_targets - len(inputs.positions))
    return inputs._replace(source=source, segments=token_type_ids, positions=positions, labels=labels)


def _pad(values: Tensor, count: int, fill_value: float = 0) -> Tensor:
    return torch.cat([values, values.new_full((count, *values.shape[1:]), fill_value)])
