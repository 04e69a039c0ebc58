"""A decoding step by fused kernels on a GPU, for up to 64 rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from qkv.nn import host_ops
from qkv.nn.indexed_cache import IndexedKVCache
from qkv.nn.kernels import attend_cached
from qkv.nn.kv_cache import KeyValues, KVCache

try:
    from qkv.nn import triton_argmax, triton_linear, triton_matmul

    HAS_TRITON = True
except ImportError:  # no Triton: the modules compute the same, one kernel per operation
    HAS_TRITON = False

if TYPE_CHECKING:
    from qkv.nn.attention import Attention
    from qkv.nn.block import Block, Residual
    from qkv.nn.stack import Stack, StackState

_FUSED_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


class RowTensors(Protocol):
    """The rows of greedy search that `append_best_token` updates."""

    tokens: Tensor  # [R] the last token
    history: Tensor  # [R, W] prompt and generated tokens
    log_probs: Tensor  # [R, W] of the generated tokens
    num_tokens: Tensor  # [R] tokens of the history
    prompt_lengths: Tensor  # [R]
    limits: Tensor  # [R] maximum number of generated tokens
    ended: Tensor  # [R] whether the output has ended


def _runs_kernels(x: Tensor) -> bool:
    return HAS_TRITON and x.is_cuda and not torch.is_grad_enabled()


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """Apply a linear layer.  # [R, K] -> [R, N]"""
    if _runs_kernels(x) and x.dtype == module.weight.dtype:
        if len(x) <= triton_linear.MAX_ROWS and x.shape[1] <= triton_linear.MAX_WIDTH:
            return triton_linear.fused_linear(x.contiguous(), module.weight, module.bias)
        is_aligned = len(module.weight) % 8 == 0
        if x.dtype != torch.float32 and (len(x) <= triton_matmul.MAX_ROWS or not is_aligned):
            return triton_matmul.matmul(x.contiguous(), module.weight, module.bias)
    out: Tensor = module(x)
    return out


def best_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable token of each row and its log-probability.  # [R, vocabulary] -> [R], [R]"""
    if HAS_TRITON and logits.is_cuda:
        return triton_argmax.argmax_with_log_prob(logits)
    logits = logits.float()
    tokens = host_ops.argmax(logits) if logits.device.type == "cpu" else logits.argmax(-1)
    return tokens, torch.log_softmax(logits, -1).gather(1, tokens[:, None]).squeeze(1)


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most probable tokens of each row: log-probabilities and tokens.  # [R, vocabulary] -> [R, k]"""
    if HAS_TRITON and logits.is_cuda and k <= triton_argmax.MAX_TOP:
        return triton_argmax.top_tokens(logits, k)
    logits = logits.float()
    _, tokens = host_ops.top_values(logits, k) if logits.device.type == "cpu" else logits.topk(k, -1)
    return torch.log_softmax(logits, -1).gather(1, tokens), tokens


def append_best_token(logits: Tensor, rows: RowTensors, eos_ids: Tensor) -> bool:
    """Append the most probable token to each row by one kernel, on a GPU; return whether it did."""
    if not (HAS_TRITON and logits.is_cuda):
        return False
    lengths = rows.num_tokens, rows.prompt_lengths, rows.limits
    triton_argmax.append_best_token(logits, rows.tokens, rows.history, rows.log_probs, *lengths, rows.ended, eos_ids)
    return True


def can_fuse(stack: Stack, x: Tensor, state: StackState) -> bool:
    """Return whether the kernels compute a step of this stack and number of rows."""
    if not (_runs_kernels(x) and isinstance(state.caches[0], IndexedKVCache)):
        return False
    blocks = [cast("Block", block) for block in stack.blocks]
    widest = max(blocks[0].feedforward.up.weight.shape)
    return len(x) <= triton_matmul.MAX_ROWS and widest <= triton_linear.MAX_WIDTH and all(map(_can_fuse_block, blocks))


def _can_fuse_block(block: Block) -> bool:
    attentions = [block.self_attention, *([block.cross_attention] if block.cross_attention is not None else [])]
    return (
        block.feedforward.gate is None
        and block.feedforward.activation_name in _FUSED_ACTIVATIONS
        and block.self_attention.qkv is not None
        and all(attention.o is not None and attention.hook is None for attention in attentions)
    )


def fused_step(stack: Stack, x: Tensor, state: StackState) -> Tensor:
    """Process one new token per row like `Stack.step`, in a third of its kernels.  # [R, width]"""
    layers = zip(cast("Iterable[Block]", stack.blocks), state.caches, state.cross_kv, strict=True)
    if len(x) > triton_linear.MAX_ROWS:
        return _step_of_many_rows(stack, x, layers)
    for block, cache, cross_kv in layers:
        assert isinstance(cache, IndexedKVCache)
        x = _step_of_few_rows(block, x, cache, cross_kv)
    return x if stack.norm is None else cast("Tensor", stack.norm(x))


def _step_of_few_rows(block: Block, x: Tensor, cache: IndexedKVCache, cross_kv: KeyValues | None) -> Tensor:
    """Run a block by kernels that read whole rows of the weights, norm and residual connection included."""
    attention = block.self_attention
    assert attention.qkv is not None
    projected = _apply(x, attention.qkv, block.self_attention_residual)
    x = _project_out(attention, _attend(attention, projected, cache), x, block.self_attention_residual)
    cross, cross_residual = block.cross_attention, block.cross_attention_residual
    if cross is not None and cross_residual is not None and cross_kv is not None:
        assert cross.q is not None
        heads = _cross_attend(cross, _apply(x, cross.q, cross_residual), cross_kv)
        x = _project_out(cross, heads, x, cross_residual)
    feedforward = block.feedforward
    hidden = _apply(x, feedforward.up, block.feedforward_residual, feedforward.activation_name)
    y = triton_linear.fused_linear(hidden, *_parameters(feedforward.down), residual=x)
    return _post_norm(block.feedforward_residual, y)


def _apply(x: Tensor, module: nn.Linear, residual: Residual, activation: str | None = None) -> Tensor:
    """Apply the norm before a sublayer, its first linear layer and its activation."""
    norm = _norm_parameters(residual.norm) if residual.norm_first else None
    return triton_linear.fused_linear(x, *_parameters(module), norm=norm, activation=activation)


def _project_out(attention: Attention, heads: Tensor, x: Tensor, residual: Residual) -> Tensor:
    assert attention.o is not None
    return _post_norm(residual, triton_linear.fused_linear(heads, *_parameters(attention.o), residual=x))


def _post_norm(residual: Residual, y: Tensor) -> Tensor:
    """Apply the norm after a residual connection, of post-norm blocks."""
    out: Tensor = y if residual.norm_first else residual.norm(y)
    return out


def _step_of_many_rows(stack: Stack, x: Tensor, layers: Iterable[tuple[Block, KVCache, KeyValues | None]]) -> Tensor:
    """Run all blocks by matrix products; a sublayer ends with the norm that comes before the next one."""
    norms = _following_norms(stack)
    first = cast("Block", stack.blocks[0]).self_attention_residual
    y = first.pre(x)
    for block, cache, cross_kv in layers:
        assert isinstance(cache, IndexedKVCache)
        attention, feedforward = block.self_attention, block.feedforward
        assert attention.qkv is not None
        assert attention.o is not None
        heads = _attend(attention, triton_matmul.matmul(y, *_parameters(attention.qkv)), cache)
        x, y = _add(x, heads, attention.o, next(norms), first.norm_first)
        if block.cross_attention is not None and cross_kv is not None:
            cross = block.cross_attention
            assert cross.q is not None
            assert cross.o is not None
            heads = _cross_attend(cross, triton_matmul.matmul(y, *_parameters(cross.q)), cross_kv)
            x, y = _add(x, heads, cross.o, next(norms), first.norm_first)
        hidden = triton_matmul.matmul(y, *_parameters(feedforward.up), feedforward.activation_name)
        x, y = _add(x, hidden, feedforward.down, next(norms), first.norm_first)
    return y


def _following_norms(stack: Stack) -> Iterator[triton_linear.Norm | None]:
    """Yield the norm after each sublayer: of pre-norm blocks it belongs to the next one, or to the stack."""
    residuals = [
        residual
        for block in cast("Iterable[Block]", stack.blocks)
        for residual in (block.self_attention_residual, block.cross_attention_residual, block.feedforward_residual)
        if residual is not None
    ]
    norms: list[nn.Module | None] = [residual.norm for residual in residuals]
    if residuals[0].norm_first:
        norms = [*norms[1:], stack.norm]
    for norm in norms:
        yield None if norm is None else _norm_parameters(norm)


def _add(
    x: Tensor, hidden: Tensor, module: nn.Linear, norm: triton_linear.Norm | None, norm_first: bool
) -> tuple[Tensor, Tensor]:
    """Return the sum of x and a linear layer, and the input of the next sublayer."""
    total, normed = triton_matmul.add_and_norm(triton_matmul.partial_sums(hidden, module.weight), module.bias, x, norm)
    return (total, normed) if norm_first else (normed, normed)


def _attend(attention: Attention, projected: Tensor, cache: IndexedKVCache) -> Tensor:
    """Return the merged heads of self-attention.  # [R, 3 * H * size] -> [R, H * size]"""
    q, k, v = projected.view(len(projected), 3, attention.heads, -1).unbind(1)
    return cache.attend(q, k, v, attention.score.scale).flatten(1)


def _cross_attend(cross: Attention, q: Tensor, cross_kv: KeyValues) -> Tensor:
    """Return the merged heads of cross-attention; beams of a source are adjacent rows.  # [R, H * size]"""
    by_source = q.view(len(cross_kv.keys), -1, cross.heads, q.shape[1] // cross.heads).transpose(1, 2)
    return attend_cached(by_source, cross_kv, score=cross.score).transpose(1, 2).reshape(len(q), -1)


def _norm_parameters(norm: nn.Module) -> triton_linear.Norm:
    bias = getattr(norm, "bias", None)
    return triton_linear.Norm(norm.weight, bias, float(norm.eps), isinstance(norm, nn.LayerNorm))  # type: ignore[arg-type]


def _parameters(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return module.weight, module.bias
