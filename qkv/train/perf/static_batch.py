"""Pad batches of varied lengths to a few static shapes, so that a few CUDA graphs serve them all.

Training has many short steps, which a GPU finishes before the host has launched the next kernel. A CUDA graph is one
launch (`qkv.train.perf.cuda_graphs`), but has one shape. Attention reads lengths on the device, so the shape of a batch
is its numbers of tokens and of sequences; a few added sequences without targets fill up both. Batches of long and of
short sequences have different numbers of them, and a shape for each costs less padding than one for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from qkv.nn import BatchLayout
from qkv.objectives.loss import LayoutChains

InputsT = TypeVar("InputsT", bound=tuple[Any, ...])

_NUM_SHAPES = 4  # on Multi30k 7 % of the tokens are padding; with one shape 14 %, with eight 6 %
_LARGEST_MARGIN = 1.1  # room in the largest shape for batches with more sequences or tokens than the observed ones
_TOKEN_MULTIPLE = 64  # numbers of tokens that suit matrix products
_LENGTH_MULTIPLE = 32


class LayoutShape(NamedTuple):
    """Numbers of sequences and tokens of a layout, and its longest sequence."""

    num_sequences: int
    num_tokens: int
    max_length: int

    @property
    def padded_length(self) -> int:
        """Length to which kernels pad sequences; a batch fits if none is longer."""
        return _round_up(self.max_length, _LENGTH_MULTIPLE)


ChainShape = tuple[LayoutShape, ...]
BatchShape = tuple[ChainShape, ...]  # as `LayoutChains`


@dataclass(frozen=True)
class StaticShapes:
    """The static shapes of a run, cheapest first."""

    shapes: tuple[BatchShape, ...]

    @classmethod
    def choose(cls, batches: Iterable[Any], num_shapes: int = _NUM_SHAPES) -> StaticShapes | None:
        """Choose shapes that fit all given batches, and a larger one for batches that fit none of them.

        None: they cannot be padded, because their inputs are no `qkv.objectives.loss.ExtensibleInputs`.
        """
        observed = []
        for inputs in batches:
            chains = layout_chains(inputs)
            if not chains:
                return None
            observed.append(tuple(tuple(_shape_of(layout) for layout in chain) for chain in chains))
        if not observed:
            return None
        max_tokens = max(map(_num_tokens, observed))
        # the small last batch of an epoch would need added sequences that are too long
        full_batches = [shape for shape in observed if 2 * _num_tokens(shape) >= max_tokens]
        groups = _divide(sorted(full_batches), min(num_shapes, len(full_batches)))
        shapes = {_enclosing_shape(group) for group in groups} | {_enclosing_shape(full_batches, _LARGEST_MARGIN)}
        return cls(tuple(sorted(shapes, key=_num_tokens)))

    def pad(self, inputs: InputsT) -> InputsT:
        """Return the inputs padded to the cheapest shape that they fit, or unchanged if there is none."""
        chains = layout_chains(inputs)
        for shape in self.shapes if chains else ():
            padded_chains = extend_chains(chains, shape)
            if padded_chains is not None:
                padded: InputsT = inputs.extend(padded_chains)  # type: ignore[attr-defined]  # it has chains
                return padded
        return inputs


def layout_chains(inputs: Any) -> LayoutChains:
    """Return the layouts of inputs that can be extended, or nothing; see `qkv.objectives.loss.ExtensibleInputs`."""
    chains: LayoutChains = getattr(inputs, "layout_chains", ())
    return chains


def _shape_of(layout: BatchLayout) -> LayoutShape:
    return LayoutShape(len(layout), layout.num_tokens, layout.max_length)


def _num_tokens(shape: BatchShape) -> int:
    return sum(chain[-1].num_tokens for chain in shape)


def _divide(items: list[BatchShape], num_groups: int) -> list[list[BatchShape]]:
    """Divide into groups of about equal size."""
    return [items[len(items) * i // num_groups : len(items) * (i + 1) // num_groups] for i in range(num_groups)]


def _enclosing_shape(group: Sequence[BatchShape], margin: float = 1.0) -> BatchShape:
    """Return the smallest shape that fits all batches of a group, times `margin`."""
    num_sequences = int(margin * max(shape[0][0].num_sequences for shape in group))
    while True:  # more sequences, until they have room for the tokens to add
        num_sequences += 1
        chains = [_enclosing_chain(chains, num_sequences, margin) for chains in zip(*group, strict=True)]
        shape = tuple(chain for chain in chains if chain is not None)
        if len(shape) == len(chains):
            return shape


def _enclosing_chain(chains: Sequence[ChainShape], num_sequences: int, margin: float) -> ChainShape | None:
    """Return the shape of one chain, or None if the added sequences would be too long."""
    added_sequences, result = [num_sequences - chain[0].num_sequences for chain in chains], []
    for layouts in zip(*chains, strict=True):
        max_length = max(2, *(layout.max_length for layout in layouts))
        counts = zip(layouts, added_sequences, strict=True)
        needed = max(layout.num_tokens + count for layout, count in counts)  # an added sequence has at least one token
        num_tokens = _round_up(int(margin * needed), _TOKEN_MULTIPLE)
        added_tokens = [num_tokens - layout.num_tokens for layout in layouts]
        if any(n > count * max_length for n, count in zip(added_tokens, added_sequences, strict=True)):
            return None
        result.append(LayoutShape(num_sequences, num_tokens, max_length))
        num_sequences, added_sequences = num_tokens, added_tokens
    return tuple(result)


def extend_chains(chains: LayoutChains, shape: BatchShape) -> LayoutChains | None:
    """Return the layouts of a batch with added sequences, marked as static; None if the batch does not fit."""
    lengths = [_added_lengths(chain, chain_shape) for chain, chain_shape in zip(chains, shape, strict=True)]
    if any(chain_lengths is None for chain_lengths in lengths):
        return None
    return tuple(
        tuple(
            BatchLayout([*layout.lengths_list, *added]).mark_static(layout_shape.padded_length)
            for layout, added, layout_shape in zip(chain, chain_lengths or (), chain_shape, strict=True)
        )
        for chain, chain_lengths, chain_shape in zip(chains, lengths, shape, strict=True)
    )


def _added_lengths(chain: tuple[BatchLayout, ...], shapes: ChainShape) -> list[list[int]] | None:
    """Return the lengths of the sequences to add to each layout; None if the batch does not fit."""
    num_added, result = shapes[0].num_sequences - len(chain[0]), []
    for layout, shape in zip(chain, shapes, strict=True):
        lengths = _spread(shape.num_tokens - layout.num_tokens, num_added, shape.max_length)
        if lengths is None or layout.max_length > shape.padded_length:
            return None
        result.append(lengths)
        num_added = shape.num_tokens - layout.num_tokens
    # a head would take sequences of one token for the tokens that it pools
    return result if max(chain[-1].max_length, *result[-1]) > 1 else None


def _spread(num_tokens: int, num_sequences: int, max_length: int) -> list[int] | None:
    """Return the lengths of added sequences with `num_tokens` tokens in all; None: there are none."""
    if num_sequences < 0 or not num_sequences <= num_tokens <= num_sequences * max_length:
        return None
    quotient, remainder = divmod(num_tokens, max(num_sequences, 1))
    return [quotient + (i < remainder) for i in range(num_sequences)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
