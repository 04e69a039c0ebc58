"""Position-wise parts of a decoding step, with fused kernels for few rows on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qkv.nn.indexed_cache import IndexedKVCache
from qkv.nn.kernels import attend_cached
from qkv.nn.kv_cache import KeyValues

try:
    from qkv.nn import triton_linear as kernels
except ImportError:  # no Triton: the modules compute the same, one kernel per operation
    kernels = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from qkv.nn.attention import Attention
    from qkv.nn.block import Block, Residual


def has_few_rows(x: Tensor) -> bool:
    """Return whether the fused kernels apply to the rows of a decoding step."""
    return kernels is not None and x.is_cuda and len(x) <= kernels.MAX_ROWS and not torch.is_grad_enabled()


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """Apply a linear layer.  # [R, K] -> [R, N]"""
    if has_few_rows(x):
        return kernels.fused_linear(x.contiguous(), module.weight, module.bias)
    out: Tensor = module(x)
    return out


def best_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable token of each row and its log-probability.  # [R, vocabulary] -> [R], [R]"""
    if kernels is not None and logits.is_cuda:
        return kernels.argmax_with_log_prob(logits)
    log_probs = torch.log_softmax(logits.float(), -1)
    tokens = log_probs.argmax(-1)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def can_fuse(block: Block) -> bool:
    """Return whether a block consists of parts that the kernels compute."""
    attentions = [block.self_attention, *([block.cross_attention] if block.cross_attention is not None else [])]
    return (
        block.feedforward.gate is None
        and block.feedforward.activation_name in ("relu", "gelu", "gelu_tanh", "silu")
        and block.self_attention.qkv is not None
        and all(attention.o is not None and attention.hook is None for attention in attentions)
    )


def fused_step(block: Block, x: Tensor, cache: IndexedKVCache, cross_kv: KeyValues | None) -> Tensor:
    """Process one new token per row like `Block.step`, in a third of its kernels.  # [R, width]"""
    attention = block.self_attention
    assert attention.qkv is not None
    projected = _apply(x, attention.qkv, block.self_attention_residual).view(len(x), 3, attention.heads, -1)
    heads = cache.attend(projected[:, 0], projected[:, 1], projected[:, 2], attention.score.scale)
    x = _project_out(attention, heads, x, block.self_attention_residual)
    cross, cross_residual = block.cross_attention, block.cross_attention_residual
    if cross is not None and cross_residual is not None and cross_kv is not None:
        assert cross.q is not None
        q = _apply(x, cross.q, cross_residual)  # [R, H * query]
        q = q.view(len(cross_kv.keys), -1, cross.heads, q.shape[1] // cross.heads).transpose(1, 2)
        heads = attend_cached(q, cross_kv, score=cross.score).transpose(1, 2).flatten(0, 1)  # [R, H, value]
        x = _project_out(cross, heads, x, cross_residual)
    feedforward = block.feedforward
    hidden = _apply(x, feedforward.up, block.feedforward_residual, feedforward.activation_name)
    return _add(block.feedforward_residual, kernels.fused_linear(hidden, *_parameters(feedforward.down), residual=x))


def _apply(x: Tensor, module: nn.Linear, residual: Residual, activation: str | None = None) -> Tensor:
    """Apply the norm before a sublayer, its first linear layer and its activation."""
    norm = None
    if residual.norm_first:
        module_norm = residual.norm
        bias = getattr(module_norm, "bias", None)
        centered = isinstance(module_norm, nn.LayerNorm)
        norm = kernels.InputNorm(module_norm.weight, bias, float(module_norm.eps), centered)  # type: ignore[arg-type]
    return kernels.fused_linear(x, *_parameters(module), norm=norm, activation=activation)


def _project_out(attention: Attention, heads: Tensor, x: Tensor, residual: Residual) -> Tensor:
    assert attention.o is not None
    merged = heads.reshape(len(x), -1)
    return _add(residual, kernels.fused_linear(merged, *_parameters(attention.o), residual=x))


def _add(residual: Residual, y: Tensor) -> Tensor:
    """Apply the norm after a residual connection, of post-norm blocks."""
    out: Tensor = y if residual.norm_first else residual.norm(y)
    return out


def _parameters(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return module.weight, module.bias
