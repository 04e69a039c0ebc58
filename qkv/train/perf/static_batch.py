"""Pad batches of varied lengths to one static shape, so that one CUDA graph serves them all.

Fine-tuning has many short steps, which a GPU finishes before the host has launched the next kernel. A CUDA graph is one
launch (`qkv.train.perf.cuda_graphs`), but has one shape. Variable-length attention reads lengths on the device, so the
shape of a batch is its numbers of tokens and of sequences; a few added sequences without targets fill up both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkv.nn import BatchLayout, Ragged
from qkv.objectives.classification import Inputs

InputsT = TypeVar("InputsT", bound=tuple[Any, ...])

_LEARN_BATCHES = 16  # batches from which the static shape is chosen
_MAX_GROWTHS = 2  # times that the shape may grow; each needs another graph, of which there are at most four
_SEQUENCE_MARGIN = 1.05  # room for batches with more sequences than the observed ones
_TOKEN_MULTIPLE = 64  # numbers of tokens that suit matrix products
_IGNORE_INDEX = -100  # label that cross-entropy ignores; other losses ignore NaN


@dataclass
class StaticShapePadder:
    """Chooses a static shape from the first batches and pads later ones to it.

    For a larger batch the shape may grow; a batch that still does not fit stays unchanged.
    """

    observed_shapes: list[tuple[int, int, int]] = field(default_factory=list)  # tokens, sequences, longest sequence
    static_shape: tuple[int, int, int] | None = None  # None until it is chosen
    growths_left: int = _MAX_GROWTHS

    def __call__(self, inputs: InputsT) -> InputsT:
        """Return the inputs padded to the static shape, or unchanged."""
        if not can_pad(inputs):
            return inputs
        layout = inputs[0].layout
        padded = inputs if self.static_shape is None else pad_to_static(inputs, *self.static_shape)  # type: ignore[arg-type]
        if padded is not inputs:
            return padded  # type: ignore[return-value]  # an Inputs, as `can_pad` checked
        # the shape does not grow for the small last batch of an epoch
        if self.static_shape is None or (self.growths_left and 2 * layout.num_tokens >= self.static_shape[0]):
            self.growths_left -= self.static_shape is not None
            self.observed_shapes.append((layout.num_tokens, len(layout), layout.max_length))
            is_known = len(self.observed_shapes) >= _LEARN_BATCHES
            self.static_shape = _choose_static_shape(self.observed_shapes) if is_known else None
        return inputs


def can_pad(inputs: Any) -> bool:
    """Return whether inputs are texts with one label or number each, or with labels of tokens."""
    if not isinstance(inputs, Inputs) or inputs.source.values.dim() > 1 or inputs.num_choices or inputs.word_ids:
        return False
    if inputs.head_inputs is not None:  # a step of the head alone
        return False
    if inputs.positions is not None:
        return inputs.labels.shape == inputs.positions.shape
    spans = inputs.labels.dim() > 1 and not inputs.labels.is_floating_point()
    return len(inputs.labels) == len(inputs.source) and not spans


def _choose_static_shape(observed_shapes: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Return the smallest shape that fits all observed batches, except small last batches of an epoch."""
    max_length = max(2, *(length for _, _, length in observed_shapes))
    max_tokens = max(tokens for tokens, _, _ in observed_shapes)
    full_batches = [(tokens, num_sequences) for tokens, num_sequences, _ in observed_shapes if 2 * tokens >= max_tokens]
    min_sequences = min(n for _, n in full_batches)
    num_sequences = int(max(n for _, n in full_batches) * _SEQUENCE_MARGIN)
    while True:  # each added sequence needs one token, and has room for `max_length`
        num_sequences += 1
        num_tokens = -(-(max_tokens + num_sequences - min_sequences) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        if all(num_tokens - tokens <= (num_sequences - n) * max_length for tokens, n in full_batches):
            return num_tokens, num_sequences, max_length


def pad_to_static(inputs: Inputs, num_tokens: int, num_sequences: int, max_length: int) -> Inputs:
    """Return a batch with added sequences of zeros, which have no labels; unchanged if it does not fit.

    The sum of losses and its gradient do not change. If tokens have labels, every token gets a row of logits, and the
    added rows are ignored.

    Args:
        inputs: the batch.
        num_tokens: tokens of the result.
        num_sequences: sequences of the result.
        max_length: maximum length of an added sequence; the batch's own sequences may be longer.
    """
    layout = inputs.source.layout
    extra_tokens, extra_sequences = num_tokens - layout.num_tokens, num_sequences - len(layout)
    if extra_sequences < 1 or extra_tokens < extra_sequences or -(-extra_tokens // extra_sequences) > max_length:
        return inputs
    quotient, remainder = divmod(extra_tokens, extra_sequences)
    fill_lengths = [quotient + (index < remainder) for index in range(extra_sequences)]
    padded_layout = BatchLayout([*layout.lengths_list, *fill_lengths]).mark_static()
    if padded_layout.max_length < 2:  # a head would treat the rows as the first tokens of sequences
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
