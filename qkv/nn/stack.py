"""Stack of Transformer blocks, and its state while decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from qkv import spec
from qkv.errors import InputError
from qkv.nn.attention import Attention
from qkv.nn.block import Block
from qkv.nn.decode_ops import can_fuse, fused_step
from qkv.nn.dropout import dropout
from qkv.nn.indexed_cache import CacheIndex
from qkv.nn.kernels import PositionBias
from qkv.nn.kv_cache import KeyValues, KVCache, source_rows
from qkv.nn.mask import Bidirectional, Causal, Mask
from qkv.nn.memory import Memory
from qkv.nn.norm import build_norm
from qkv.nn.position import RelativePositionBias
from qkv.nn.ragged import PooledToken, PooledTokens, Ragged
from qkv.nn.relative_attention import SegmentedRagged, TokenPairs, relative_sinusoids


@dataclass
class EncoderOutput:
    """Output of an encoder or decoder-only stack: hidden states, and what some stacks have in addition."""

    hidden: Ragged  # [T, width]
    final_state: Tensor | None = None  # [B, width] of a recurrent encoder
    memory: Memory | None = None  # of a stack with memory: that after the last token of each sequence
    undropped: Tensor | None = None  # [T, width] hidden states before dropout, in training


@dataclass
class StackState:
    """State of a stack between two decoding steps."""

    caches: list[KVCache]  # per layer: keys and values of the tokens so far
    cross_kv: list[KeyValues | None]  # per layer: keys and values of the encoder output

    def reorder(self, indices: Tensor) -> None:
        """Let row i continue from row indices[i]."""
        if torch.equal(indices, torch.arange(len(indices), device=indices.device)):
            return
        for cache in self.caches:
            cache.reorder(indices)

    def merge(self, kept: Tensor, other: StackState | None, rows_per_source: int) -> None:
        """Keep the sources at `kept`, and append those of another state."""
        rows = source_rows(kept, rows_per_source)
        for layer, (cache, kv) in enumerate(zip(self.caches, self.cross_kv, strict=True)):
            if other is None:
                cache.keep(rows)
                self.cross_kv[layer] = None if kv is None else kv.keep(kept)
                continue
            self.caches[layer] = cache.merge(rows, other.caches[layer])
            self.cross_kv[layer] = None if kv is None else kv.merge(kept, other.cross_kv[layer])

    @property
    def watchable_kv(self) -> KeyValues | None:
        """The keys of the last layer that attends to the encoder output, as in `qkv.alignments`; None: no layer."""
        return self.cross_kv[-1] if self.cross_kv else None


@dataclass
class IndexedStackState(StackState):
    """State of a stack whose caches are `IndexedKVCache`: beams are reordered in their index table."""

    index: CacheIndex

    def reorder(self, indices: Tensor) -> None:
        self.index.reorder(indices)


class Stack(nn.Module):
    """Blocks of the same configuration, with an optional final norm and relative position bias."""

    activation_checkpointing: bool = (
        False  # recompute activations in the backward pass; `enable_activation_checkpointing`
    )

    def __init__(self, s: spec.TransformerStack):
        super().__init__()
        self.spec = s
        self.mask: Mask = Causal() if s.causal else Bidirectional()
        self.blocks = nn.ModuleList(Block(_layer_spec(s, layer)) for layer in range(s.num_layers))
        self.norm = build_norm(s.block.norm, s.d_model) if s.final_norm else None
        self.relative_position_bias = (
            None
            if s.relative_position_bias is None
            else RelativePositionBias(s.relative_position_bias, s.block.self_attention.heads, s.causal)
        )

    def forward(
        self,
        x: Ragged,
        encoder_output: EncoderOutput | None = None,
        state: StackState | None = None,
        pooled_token: PooledToken | None = None,
    ) -> EncoderOutput:
        """Process all tokens at once and fill the caches of a state.

        With `pooled_token` the last block computes only that token of each sequence where possible.
        """
        hidden = x
        pooled_tokens = (
            x.layout.pooled_tokens(pooled_token)
            if pooled_token is not None and self._can_skip_other_tokens(pooled_token, encoder_output, state)
            else None
        )
        for hidden in self._run_layers(x, encoder_output, state, pooled_tokens):  # noqa: B007  # one layer's output is alive at a time
            pass
        return EncoderOutput(hidden.with_values(self.final_norm(hidden.values)))

    def _can_skip_other_tokens(
        self, pooled_token: PooledToken, encoder_output: EncoderOutput | None, state: StackState | None
    ) -> bool:
        """Return whether the last block may skip other tokens: the token attends to all, and nothing else uses them."""
        sees_all = pooled_token == "last" or not self.spec.causal
        has_positions = self.relative_position_bias is not None or self._relative_positions is not None
        plain = encoder_output is None and state is None and not has_positions
        return sees_all and plain and not _has_hook(self.blocks[-1])

    def all_hidden_states(self, x: Ragged, encoder_output: EncoderOutput | None = None) -> list[Tensor]:
        """Return the input of the first block and the output of each block; the final norm applies to the last."""
        hidden_states = [x.values, *(y.values for y in self._run_layers(x, encoder_output, None))]
        return [*hidden_states[:-1], self.final_norm(hidden_states[-1])]  # [T, width] each

    def _run_layers(
        self,
        x: Ragged,
        encoder_output: EncoderOutput | None,
        state: StackState | None,
        pooled_tokens: PooledTokens | None = None,
    ) -> Iterator[Ragged]:
        encoder_hidden = None if encoder_output is None else encoder_output.hidden
        bias = self._layer_bias(x)
        for layer, block in enumerate(self.blocks):
            selected_tokens = pooled_tokens if layer == len(self.blocks) - 1 else None
            if state is None and self.recomputes(block):
                x = self._checkpointed(block, x, encoder_hidden, bias, selected_tokens)
            else:
                x = block(
                    x, self.mask, encoder_hidden, bias, None if state is None else state.caches[layer], selected_tokens
                )
            yield x

    def recomputes(self, block: nn.Module) -> bool:
        """Return whether the backward pass computes a block's activations again."""
        is_enabled = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        return is_enabled and not _has_hook(block)  # a hook would be called twice

    def _checkpointed(
        self,
        block: nn.Module,
        x: Ragged,
        encoder_hidden: Ragged | None,
        bias: PositionBias | TokenPairs | None,
        pooled_tokens: PooledTokens | None,
    ) -> Ragged:
        """Run a block and keep only its input; the backward pass recomputes the rest."""
        query_layout, key_layout = x.layout, None if encoder_hidden is None else encoder_hidden.layout

        def forward(values: Tensor, encoder_values: Tensor | None) -> Tensor:
            encoder_input = None if encoder_values is None or key_layout is None else Ragged(encoder_values, key_layout)
            out: Tensor = block(
                Ragged(values, query_layout), self.mask, encoder_input, bias, None, pooled_tokens
            ).values
            return out

        # bare tensors as arguments: `checkpoint` infers from them which devices' random state to keep for dropout
        encoder_values = None if encoder_hidden is None else encoder_hidden.values
        values = checkpoint(forward, x.values, encoder_values, use_reentrant=False, preserve_rng_state=True)
        assert isinstance(values, Tensor)
        return x.with_values(values) if pooled_tokens is None else Ragged(values, pooled_tokens.layout)

    def init_state(
        self, encoder_output: EncoderOutput | None, num_rows: int, max_length: int, like: Tensor
    ) -> StackState:
        """Return empty caches for `max_length` tokens per row, on the device and in the dtype of `like`."""
        blocks = [b for b in self.blocks if isinstance(b, Block)]
        caches = [b.self_attention.new_cache(num_rows, max_length, like) for b in blocks]
        cross_kv = [
            b.cross_attention.precompute_kv(encoder_output.hidden)
            if b.cross_attention is not None and encoder_output
            else None
            for b in blocks
        ]
        return StackState(caches, cross_kv)

    def step(self, x: Tensor, state: StackState) -> Tensor:
        """Process one new token per row.  # [R, width]"""
        if can_fuse(self, x, state):
            return fused_step(self, x, state)
        bias = self._position_bias()
        for block, cache, layer_kv in zip(self.blocks, state.caches, state.cross_kv, strict=True):
            assert isinstance(block, Block)
            x = block.step(x, cache, layer_kv, bias)
        return self.final_norm(x)

    @property
    def _relative_positions(self) -> spec.RelativePositions | None:
        return self.spec.block.self_attention.relative_positions

    def _layer_bias(self, x: Ragged) -> PositionBias | TokenPairs | None:
        """Return the terms of the scores that depend on positions, as the blocks take them."""
        if self._relative_positions is None:
            return self._position_bias()
        segments = (x.segments, x.segments) if isinstance(x, SegmentedRagged) else None
        positions, window = x.layout.positions, self._relative_positions.window
        return TokenPairs(
            self.relative_sinusoids(x.layout.padded_length),
            segments=segments,
            window=None if window is None else (positions - window, positions),
        )

    def relative_sinusoids(self, max_length: int) -> Tensor:
        """Return the sinusoids of the distances in sequences of at most `max_length` keys, with dropout in training."""
        block = self.spec.block
        dropout_prob = block.dropout if self.training else 0.0
        device = next(self.parameters()).device
        return relative_sinusoids(max_length, block.self_attention, device, dropout_prob)

    def _position_bias(self) -> PositionBias | None:
        return None if self.relative_position_bias is None else _PositionBiasCache(self.relative_position_bias)

    def final_norm(self, x: Tensor) -> Tensor:
        """Apply the norm after the last block, if there is one, and dropout."""
        x = x if self.norm is None else self.norm(x)
        return dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x


def enable_activation_checkpointing(model: nn.Module, enabled: bool = True) -> None:
    """Recompute the activations of each block in the backward pass, which saves memory (Chen et al. 2016).

    Outputs and gradients are bit-equal.
    """
    stacks = [m for m in model.modules() if isinstance(m, Stack)]
    if not stacks:
        raise InputError("activation_checkpointing: this model has no Transformer blocks; leave it out")
    for stack in stacks:
        stack.activation_checkpointing = enabled


def _has_hook(block: nn.Module) -> bool:
    return any(isinstance(m, Attention) and m.hook is not None for m in block.children())


def _layer_spec(s: spec.TransformerStack, layer: int) -> spec.Block:
    if not s.scale_attn_by_inverse_layer_idx:
        return s.block
    attention = s.block.self_attention
    return spec.replace(
        s.block, self_attention=spec.replace(attention, score_scale=attention.score_scale / (layer + 1))
    )


class _PositionBiasCache:
    """Position bias of one forward pass: each size is computed once and shared by all layers."""

    def __init__(self, bias_module: RelativePositionBias):
        self.bias_module = bias_module
        self.cached: dict[tuple[int, int, int], Tensor] = {}

    def __call__(self, num_queries: int, num_keys: int, offset: int = 0, queries: Tensor | None = None) -> Tensor:  # noqa: ARG002
        size = num_queries, num_keys, offset
        if size not in self.cached:
            positions = torch.arange(max(offset + num_queries, num_keys), device=self.bias_module.weight.device)
            # shared by all layers, so it must not be recomputed inside the checkpointed block that requests it first
            with saved_tensors_hooks(_identity, _identity):
                self.cached[size] = self.bias_module(
                    positions[offset : offset + num_queries], positions[:num_keys]
                )  # [H, N, M]
        return self.cached[size]


def _identity(tensor: Tensor) -> Tensor:
    return tensor
