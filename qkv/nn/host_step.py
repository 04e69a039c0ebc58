"""A decoding step of a stack on a CPU as one flat function: what `Stack.step` computes, with a third of its Python.

The layers of a small model take some ten microseconds each, as long as the calls of a few modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.nn.attention import Attention
from qkv.nn.attention_score import DotScore, ScaledDotScore
from qkv.nn.block import Block, Residual
from qkv.nn.feedforward import FeedForward
from qkv.nn.kernels import attend_cached
from qkv.nn.kv_cache import KeyValues, KVCache
from qkv.nn.packed_linear import PackedLinear
from qkv.nn.stack import Stack, StackState

Function = Callable[[Tensor], Tensor]  # [R, width] -> [R, other width]


def can_flatten(stack: Stack) -> bool:
    """Return whether a stack consists of parts that `HostStep` computes."""
    blocks = [cast("Block", block) for block in stack.blocks]
    attentions = [a for block in blocks for a in (block.self_attention, block.cross_attention) if a is not None]
    return all(block.self_attention.qkv is not None for block in blocks) and all(
        type(a) is Attention and type(a.score) in (DotScore, ScaledDotScore) and a.o is not None for a in attentions
    )


class HostStep:
    """The step of a stack in eval mode, whose modules must not be replaced afterwards."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.layers = [_Layer(cast("Block", block)) for block in stack.blocks]
        self.final_norm = None if stack.norm is None else _norm(stack.norm)
        self.unpacked = [module for module in stack.modules() if isinstance(module, PackedLinear)]
        self.bias_table = torch.empty(0)  # [H, M] bias of a key at each distance before the query, the longest first

    def __call__(self, x: Tensor, state: StackState) -> Tensor:
        """Process one new token per row.  # [R, width]"""
        cache = state.caches[0]
        if type(cache) is not KVCache:
            return Stack.step(self.stack, x, state)
        if len(x) > 1:
            while self.unpacked:
                self.unpacked.pop().pack()
        mask = self._mask(cache)
        for layer, cache, cross_kv in zip(self.layers, state.caches, state.cross_kv, strict=True):
            x = layer.step(x, cache, cross_kv, mask)
        return x if self.final_norm is None else self.final_norm(x)

    def _mask(self, cache: KVCache) -> Tensor | None:
        """Return the mask of SDPA, which all layers share, after one more token.  # [1 or R, 1 or H, 1, M]"""
        first, end = cache.first, cache.length + 1
        mask = None if cache.mask is None else cache.mask[..., first:end]
        bias = self.stack.relative_position_bias
        if bias is None:
            return mask
        if self.bias_table.shape[-1] < end:
            positions = torch.arange(max(end, cache.keys.shape[2]))
            self.bias_table = bias(positions[-1:], positions)[:, 0].contiguous()
        table = self.bias_table[None, :, None, first - end :]
        return table if mask is None else table.masked_fill(~mask, float("-inf"))


class _Layer:
    """The functions of a block."""

    def __init__(self, block: Block) -> None:
        attention = block.self_attention
        assert attention.qkv is not None
        self.attention, self.cross = attention, block.cross_attention
        self.heads, self.scale = attention.heads, attention.score.scale
        self.project = _after_norm(attention.qkv, block.self_attention_residual)
        self.project_out = _Output(attention.o, block.self_attention_residual)
        if self.cross is not None and block.cross_attention_residual is not None:
            self.project_cross = _after_norm(self.cross.q, block.cross_attention_residual)
            self.project_cross_out = _Output(self.cross.o, block.cross_attention_residual)
        self.hidden = _hidden(block.feedforward, block.feedforward_residual)
        self.down = _Output(block.feedforward.down, block.feedforward_residual)

    def step(self, x: Tensor, cache: KVCache, cross_kv: KeyValues | None, mask: Tensor | None) -> Tensor:
        num_rows, first, n = len(x), cache.first, cache.length
        q, k, v = self.project(x).view(num_rows, 3, self.heads, 1, -1).unbind(1)  # [R, H, 1, size] each
        cache.keys.narrow(2, n, 1).copy_(k)
        cache.values.narrow(2, n, 1).copy_(v)
        cache.length = n + 1
        keys, values = (buffer.narrow(2, first, n + 1 - first) for buffer in (cache.keys, cache.values))
        heads = F.scaled_dot_product_attention(q, keys, values, mask, scale=self.scale)
        x = self.project_out(heads.view(num_rows, -1), x)
        if self.cross is not None and cross_kv is not None:
            q = self.project_cross(x).view(len(cross_kv.keys), -1, self.cross.heads, cross_kv.keys.shape[3])
            heads = attend_cached(q.transpose(1, 2), cross_kv, score=self.cross.score)  # [B, H, beams, value]
            x = self.project_cross_out(heads.transpose(1, 2).reshape(num_rows, -1), x)
        return self.down(self.hidden(x), x)


class _Output:
    """The last linear layer of a sublayer, the residual connection and the norm after it."""

    def __init__(self, linear: nn.Module | None, residual: Residual) -> None:
        assert linear is not None
        self.linear = linear.forward
        self.add = linear.forward_add if isinstance(linear, PackedLinear) else None
        self.norm = None if residual.norm_first else _norm(residual.norm)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self.linear(x).add_(residual) if self.add is None else self.add(x, residual)
        return y if self.norm is None else self.norm(y)


def _after_norm(linear: nn.Module | None, residual: Residual) -> Function:
    """Return the first linear layer of a sublayer, with the norm before it."""
    assert linear is not None
    forward: Function = linear.forward
    if not residual.norm_first:
        return forward
    norm = _norm(residual.norm)
    return lambda x: forward(norm(x))


def _norm(norm: nn.Module) -> Function:
    if not isinstance(norm, nn.LayerNorm):
        return norm.forward
    shape, weight, bias, eps = list(norm.normalized_shape), norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _hidden(feedforward: FeedForward, residual: Residual) -> Function:
    """Return the hidden layer of a feed-forward network, with the norm before it."""
    up, gate, activation = feedforward.up, feedforward.gate, feedforward.activation
    norm = _norm(residual.norm) if residual.norm_first else None
    if gate is not None:
        project_up, project_gate = up.forward, gate.forward

        def gated(x: Tensor) -> Tensor:
            x = x if norm is None else norm(x)
            return activation(project_gate(x)) * project_up(x)

        return gated
    if isinstance(up, PackedLinear):
        name, forward = feedforward.activation_name, up.forward_activation
        return lambda x: forward(x if norm is None else norm(x), name)
    project = _after_norm(up, residual)
    return lambda x: activation(project(x))
