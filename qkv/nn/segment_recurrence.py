"""Segment recurrence: a stack attends to the hidden states of preceding segments (Dai et al. 2019, 3.2).

The memory of a text holds the inputs of every layer for its last tokens; its layers attend to them as to the tokens of
the segment itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv import spec
from qkv.errors import InputError
from qkv.nn.block import Block
from qkv.nn.memory import Memory
from qkv.nn.ragged import BatchLayout, Ragged
from qkv.nn.relative_attention import HIDDEN_RANK, RelativeAttention, TokenPairs
from qkv.nn.stack import EncoderOutput, Stack

MEMORY_RANK = -1  # before every token


@dataclass(eq=False)
class SegmentKeys:
    """Tokens that a segment attends to: those of the memory, then its own."""

    layout: BatchLayout
    index: Tensor | None  # [Tk] of each key in the memory of all texts followed by the segments; None: no memory

    @staticmethod
    def of(source: BatchLayout, memory_length: int) -> SegmentKeys:
        """Return the keys of segments of this layout."""
        if not memory_length:
            return SegmentKeys(source, None)
        layout = BatchLayout([memory_length + n for n in source.lengths_list], source.device)
        rows, num_memory = layout.sequence_ids(), memory_length * len(source)
        starts = source.cu_seqlens[:-1].long()
        in_segment = num_memory + starts[rows] + layout.positions - memory_length
        index = torch.where(layout.positions < memory_length, rows * memory_length + layout.positions, in_segment)
        return SegmentKeys(layout, index)

    def join(self, memory: Tensor, segment: Tensor) -> Tensor:
        """Put the memory of each text before its segment.  # [B * memory, …], [T, …] -> [Tk, …]"""
        return segment if self.index is None else torch.cat([memory, segment]).index_select(0, self.index)


def empty_memory(s: spec.TransformerStack, num_streams: int, like: Tensor) -> Memory:
    """Return the memory of texts before their first token, on the device and in the dtype of `like`."""
    hidden = like.new_zeros(num_streams, s.num_layers, s.memory_length, s.d_model)
    return Memory({"hidden": hidden, "num_tokens": torch.zeros(num_streams, dtype=torch.long, device=like.device)})


def resize_memory(memory: Memory, memory_length: int | None) -> Memory:
    """Return an empty memory of another length; None keeps the length."""
    if memory_length is None:
        return memory
    if "hidden" not in memory.tensors:
        raise InputError("memory_length: the memory of this model is the state of a recurrent network; leave it out")
    num_streams, num_layers, _, width = memory["hidden"].shape
    hidden = memory["hidden"].new_zeros(num_streams, num_layers, memory_length, width)
    return Memory(memory.tensors | {"hidden": hidden})


def memory_ranks(memory: Memory) -> Tensor:
    """Return the rank of each token of the memory; those before the beginning of a text are hidden.  # [B * memory]"""
    memory_length, num_tokens = memory["hidden"].shape[2], memory["num_tokens"]
    is_real = torch.arange(memory_length, device=num_tokens.device) >= memory_length - num_tokens[:, None]
    return torch.where(is_real, MEMORY_RANK, HIDDEN_RANK).int().flatten()


def update_memory(
    s: spec.TransformerStack, memory: Memory, layer_inputs: Sequence[Tensor], keys: SegmentKeys, layout: BatchLayout
) -> Memory:
    """Return the last tokens of each text, those of its segment included; `layer_inputs` are of all keys.

    # [Tk, width] per layer
    """
    memory_length = memory["hidden"].shape[2]
    added = layout.lengths if s.reuse_length is None else layout.lengths.clamp(max=s.reuse_length)  # [B]
    first = keys.layout.cu_seqlens[:-1].long() + added  # of the tokens to keep
    index = first[:, None] + torch.arange(memory_length, device=first.device)  # [B, memory]
    hidden = torch.stack([inputs[index] for inputs in layer_inputs], 1)  # [B, layers, memory, width]
    return Memory({"hidden": hidden, "num_tokens": (memory["num_tokens"] + added).clamp(max=memory_length)})


@dataclass(eq=False)
class _CausalStream:
    """One layer of a causal stack with memory; implements `qkv.nn.block.Streams`."""

    keys: SegmentKeys
    pairs: TokenPairs
    key_inputs: Tensor  # [Tk, width] of this layer

    def run_block(self, block: Block, x: Ragged) -> Ragged:
        """Return the output of a block.  # [T, width]"""
        attention, residual = block.self_attention, block.self_attention_residual
        assert isinstance(attention, RelativeAttention)
        q = attention.project_q(residual.pre(x.values))
        k, v = attention.project_kv(residual.pre(self.key_inputs.to(x.values.dtype)))
        bias = attention.pair_bias(self.pairs)
        heads = attention.attend_heads(q, k, v, x.layout, self.keys.layout, bias=bias)
        return x.with_values(block.attn_out_and_ffn(x.values, heads))


def run_with_memory(stack: Stack, x: Ragged, memory: Memory) -> EncoderOutput:
    """Return the hidden states of a segment of each text, and the memory after it; the stack is causal."""
    memory_length = memory["hidden"].shape[2]
    keys = SegmentKeys.of(x.layout, memory_length)
    positions = x.layout.positions.int()
    pairs = TokenPairs(
        stack.relative_sinusoids(keys.layout.padded_length),
        ranks=(positions, keys.join(memory_ranks(memory), positions)),
        window=_window(stack.spec, x.layout.positions + memory_length, keys.layout.positions),
    )
    layer_inputs = []
    for layer, block in enumerate(stack.blocks):
        layer_memory = memory["hidden"][:, layer].flatten(0, 1)  # [B * memory, width]
        layer_inputs.append(keys.join(layer_memory, x.values.to(layer_memory.dtype)))
        x = block(x, stack.mask, streams=_CausalStream(keys, pairs, layer_inputs[-1]))
    new_memory = update_memory(stack.spec, memory, layer_inputs, keys, x.layout)
    return EncoderOutput(x.with_values(stack.final_norm(x.values)), memory=new_memory)


def _window(s: spec.TransformerStack, query_positions: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the last position that each query does not attend to, and the positions of the keys."""
    positions = s.block.self_attention.relative_positions
    if positions is None or positions.window is None:
        return None
    return query_positions - positions.window, key_positions
