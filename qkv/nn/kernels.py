"""Attention: softmax(score(q, k)) v. The only entry point, and the only softmax over keys in the project.

All kernels give the same result. On a GPU in half precision: one fused call for sequences of equal length, and for
others a kernel for short sequences or variable-length flash attention. On a CPU: SDPA over buckets of similar length.
The explicit softmax ("eager") computes recorded weights and scores that are no dot product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkv.errors import InputError
from qkv.nn.attention_score import AttentionScore
from qkv.nn.bucketing import BucketPlan, pad_to_buckets, plan_buckets, unpad
from qkv.nn.kv_cache import KeyValues
from qkv.nn.mask import Bidirectional, Causal, Mask
from qkv.nn.ragged import BatchLayout

try:
    from qkv.nn.triton_short_attention import MAX_LENGTH, short_attention
except ImportError:  # no Triton: flash attention computes the same
    MAX_LENGTH = 0

# receives the weights [b, H, n, m] of a recorded layer, the indices of their sequences in the batch, and the real
# numbers of queries and keys of each
AttentionHook = Callable[[Tensor, Sequence[int], Sequence[int], Sequence[int]], None]


class PositionBias(Protocol):
    """Term that is added to the scores and depends on positions, and possibly on the queries (Transformer-XL)."""

    def __call__(self, num_queries: int, num_keys: int, offset: int = 0, queries: Tensor | None = None) -> Tensor:
        """Return the bias of queries at positions offset, offset + 1, … and keys at 0, 1, …  # [(b,) H, N, M]

        Only differences of positions may matter: several short sequences can share a row of padded queries, one after
        the other. `queries` are the padded queries [b, H, N, size].
        """


class PairBias(ABC):
    """Bias and mask that depend on the tokens of each pair: their positions, segments, order (`relative_attention`)."""

    aligned: bool  # queries are the last tokens of their key sequence, as with a `PositionBias`

    @abstractmethod
    def __call__(self, bucket_plan: BucketPlan, bucket_index: int, queries: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the bias of a bucket, which `queries` [b, H, N, size] may enter, and a mask; None: no key is masked.

        # [b, H, N, M], [b, 1, N, M] True where a query attends to a key
        """


ScoreBias = PositionBias | PairBias


def attend(
    q: Tensor,  # [Tq, H, query]
    k: Tensor,  # [Tk, H, key]
    v: Tensor,  # [Tk, H, value]
    query_layout: BatchLayout,
    key_layout: BatchLayout,
    *,
    score: AttentionScore,
    mask: Mask,
    bias: ScoreBias | None = None,
    dropout: float = 0.0,
    hook: AttentionHook | None = None,
    kernel: str | None = None,
) -> Tensor:  # [Tq, H, value]
    """Return each query's weighted mean of the values of its own sequence.

    With a causal mask or a position bias, the queries are the last tokens of their key sequence. A sequence with more
    keys than queries has a memory: its first keys precede all queries.
    """
    is_aligned_bias = bias.aligned if isinstance(bias, PairBias) else bias is not None
    aligned = is_aligned_bias or isinstance(mask, Causal)
    has_memory = aligned and _lengths_differ(query_layout, key_layout)
    if isinstance(bias, PairBias):
        query_layout.use_on_host("pair bias")
    if has_memory and any(m < n for n, m in zip(query_layout.lengths_list, key_layout.lengths_list, strict=True)):
        raise InputError("a causal mask or a position bias needs at least as many keys as queries in each sequence")
    precomputed_keys = score.precompute_keys(k.transpose(0, 1)).transpose(0, 1)  # [Tk, H, P]
    max_length = max(query_layout.padded_length, key_layout.padded_length)
    kernel_name = kernel or select_kernel(
        q,
        v,
        score=score,
        has_bias=bias is not None,
        dropout=dropout,
        return_weights=hook is not None,
        uniform_length=query_layout.is_uniform and key_layout.is_uniform,
        has_memory=has_memory,
        max_length=max_length,
    )
    if kernel_name == "short":
        offsets, causal = (query_layout.cu_seqlens, key_layout.cu_seqlens), isinstance(mask, Causal)
        return short_attention(q, precomputed_keys, v, *offsets, max_length, score.scale, causal)
    if kernel_name == "uniform":
        return _uniform(q, precomputed_keys, v, query_layout, key_layout, score.scale, mask, dropout)
    if kernel_name == "varlen":
        return _varlen(q, precomputed_keys, v, query_layout, key_layout, score.scale, mask)
    causal, bucketed = isinstance(mask, Causal), kernel_name == "bucketed"
    bucket_plan = plan_buckets(query_layout, key_layout, bucketed=bucketed, causal=causal, aligned=aligned)
    if kernel_name == "eager":
        out: Tensor = _eager(q, precomputed_keys, v, bucket_plan, score, mask, bias, dropout, hook)
    else:
        out = _bucketed(q, precomputed_keys, v, bucket_plan, score.scale, mask, bias, dropout)
    return out


def _lengths_differ(query_layout: BatchLayout, key_layout: BatchLayout) -> bool:
    """Return whether some sequence has more keys than queries; static layouts are used without memory."""
    if query_layout is key_layout or query_layout.is_static:
        return False
    return query_layout.lengths_list != key_layout.lengths_list


def select_kernel(
    q: Tensor,
    v: Tensor,
    *,
    score: AttentionScore,
    dropout: float,
    return_weights: bool,
    has_bias: bool = False,
    uniform_length: bool = False,
    has_memory: bool = False,
    max_length: int | None = None,
) -> str:
    """Return the fastest kernel that supports the arguments.

    `uniform_length`: all sequences have the same number of queries and the same number of keys. `has_memory`: with a
    causal mask, some sequence has more keys than queries. `max_length`: no sequence has more queries or keys; None: any
    number.
    """
    if return_weights or not score.is_dot:
        return "eager"
    if q.device.type != "cuda":
        return "bucketed"
    half_precision = q.dtype in (torch.bfloat16, torch.float16)
    head_dim_supported = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    deterministic = torch.are_deterministic_algorithms_enabled()  # flash attention sums gradients in arbitrary order
    if not half_precision or not head_dim_supported or has_bias:
        return "padded"
    is_short = max_length is not None and max_length <= MAX_LENGTH and q.shape[-1] <= _MAX_SHORT_SIZE
    if is_short and not dropout and not uniform_length:
        return "short"
    if deterministic:
        return "padded"
    if uniform_length and not has_memory:
        return "uniform"
    return "padded" if dropout else "varlen"  # varlen does not support dropout


def attend_cached(
    q: Tensor,  # [B, H, N, query]
    kv: KeyValues,
    *,
    score: AttentionScore,
    bias: PositionBias | None = None,
    dropout: float = 0.0,
    hook: AttentionHook | None = None,
    row_ids: Sequence[int] | None = None,
) -> Tensor:  # [B, H, N, value]
    """Attend to cached keys and values in a decoding step; `row_ids` are the batch rows that a hook is given."""
    num_queries, num_keys = q.shape[2], kv.keys.shape[2]
    bias_tensor = None if bias is None else bias(num_queries, num_keys, num_keys - num_queries, q)
    # on a CPU two products of contiguous matrices are faster than the fused kernel for a few queries
    is_product_faster = q.device.type == "cpu" and kv.keys.is_contiguous() and kv.values.is_contiguous()
    if score.is_dot and hook is None and not kv.watched and not is_product_faster:
        attn_mask = _bias_and_mask(bias_tensor, kv.mask)
        return _sdpa(q, kv.keys, kv.values, attn_mask, score.scale, dropout)
    scores = score(q, kv.keys) if bias_tensor is None else score(q, kv.keys) + bias_tensor
    weights = _softmax(scores, kv.mask)  # [B, H, N, M]
    if kv.watched:
        kv.weights = weights.mean(1).flatten(0, 1)  # [R, M]
    if hook is not None:
        hook(
            kv.strip_padding(weights),
            row_ids if row_ids is not None else range(len(q)),
            [num_queries] * len(q),
            kv.lengths,
        )
    return (F.dropout(weights, dropout) if dropout else weights) @ kv.values


def _bias_and_mask(bias: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Return the `attn_mask` argument of SDPA: a float tensor to add, or without a bias the boolean mask."""
    if bias is None:
        return attn_mask
    if attn_mask is not None:
        return bias.masked_fill(~attn_mask, float("-inf"))  # [1 or B, H, N, M]
    return bias[None] if bias.dim() == 3 else bias


def _bucket_bias(
    bias: ScoreBias, bucket_plan: BucketPlan, bucket_index: int, queries: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the bias of a bucket [(b,) H, N, M], and the mask of a bias that has one."""
    if isinstance(bias, PairBias):
        return bias(bucket_plan, bucket_index, queries)
    bucket = bucket_plan.buckets[bucket_index]
    return bias(bucket.query_length, bucket.key_length, bucket.offset, queries), None


def _both_masks(attn_mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if attn_mask is None else attn_mask if other is None else attn_mask & other


def _softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, dim=-1)


# ---- padded buckets of similar length --------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _bucketed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket_plan: BucketPlan,
    scale: float,
    mask: Mask,
    bias: ScoreBias | None,
    dropout: float,
) -> Tensor:  # [Tq, H, value]
    causal, aligned = isinstance(mask, Causal), not isinstance(bias, PairBias) or bias.aligned
    outputs = []
    for index, (bucket, bucket_q, bucket_k, bucket_v) in enumerate(pad_to_buckets(q, k, v, bucket_plan)):
        num_queries, num_keys = bucket.query_length, bucket.key_length
        # under a causal mask no real query attends to padding, which follows all real keys
        attn_mask = bucket.mask if bucket.packs_sequences or not causal else None
        is_causal = causal and not bucket.packs_sequences
        if is_causal and (
            bias is not None or bucket.offset
        ):  # SDPA takes either its causal flag, without offset, or a mask
            attn_mask, is_causal = mask.as_tensor(num_queries, num_keys, bucket.offset, q.device), False
        has_keys = None
        if bias is not None:
            bias_tensor, pair_mask = _bucket_bias(bias, bucket_plan, index, bucket_q)
            attn_mask = _both_masks(attn_mask, pair_mask)
            if pair_mask is not None and attn_mask is not None and not aligned:
                has_keys = attn_mask.any(-1, keepdim=True)  # [B, 1, N, 1]
                attn_mask = attn_mask | ~has_keys  # a softmax over nothing is NaN on some devices
            attn_mask = _bias_and_mask(bias_tensor, attn_mask)
        out = _sdpa(bucket_q, bucket_k, bucket_v, attn_mask, scale, dropout, causal=is_causal)
        outputs.append(out if has_keys is None else out.masked_fill(~has_keys, 0.0))
    return unpad(outputs, bucket_plan)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket_plan: BucketPlan,
    score: AttentionScore,
    mask: Mask,
    bias: ScoreBias | None,
    dropout: float,
    hook: AttentionHook | None,
) -> Tensor:  # [Tq, H, value]
    outputs = []
    for index, (bucket, bucket_q, bucket_k, bucket_v) in enumerate(pad_to_buckets(q, k, v, bucket_plan)):
        num_queries, num_keys, attn_mask = bucket.query_length, bucket.key_length, bucket.mask
        if not isinstance(mask, Bidirectional):
            mask_tensor = mask.as_tensor(num_queries, num_keys, bucket.offset, q.device)[None, None]  # [1, 1, N, M]
            attn_mask = _both_masks(attn_mask, mask_tensor)
        scores, pair_mask = score(bucket_q, bucket_k), None
        if bias is not None:
            bias_tensor, pair_mask = _bucket_bias(bias, bucket_plan, index, bucket_q)
            scores, attn_mask = scores + bias_tensor, _both_masks(attn_mask, pair_mask)
        weights = _softmax(scores, attn_mask)  # [B, H, N, M]
        if pair_mask is not None and attn_mask is not None:  # the weights of a query without keys are zero
            weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
        if hook is not None:
            hook(weights, bucket.sequences, bucket.query_lengths, bucket.key_lengths)
        outputs.append(F.dropout(weights, dropout) @ bucket_v)
    return unpad(outputs, bucket_plan)


# ---- one call for a whole batch on a GPU ----------------------------------------------------------------------------


def _uniform(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_layout: BatchLayout,
    key_layout: BatchLayout,
    scale: float,
    mask: Mask,
    dropout: float,
) -> Tensor:  # [Tq, H, value]
    """Attend in sequences of equal length: a packed batch of these is a view of a padded one."""
    num_queries, num_keys = query_layout.max_length, key_layout.max_length
    sides = (q, num_queries), (k, num_keys), (v, num_keys)
    q, k, v = (x.view(-1, n, *x.shape[1:]).transpose(1, 2) for x, n in sides)  # [B, H, N, size]
    is_causal, attn_mask = isinstance(mask, Causal), None
    if is_causal and num_queries != num_keys:
        is_causal, attn_mask = False, mask.as_tensor(num_queries, num_keys, num_keys - num_queries, q.device)
    return _sdpa(q, k, v, attn_mask, scale, dropout, is_causal).transpose(1, 2).flatten(0, 1)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:  # [B, H, N, value]
    """Call SDPA with PyTorch's choice of backend, but cuDNN only if both lengths are multiples of 64.

    cuDNN builds a plan per shape (about 70 ms), which does not pay off for arbitrary lengths.
    """
    sdpa = partial(
        F.scaled_dot_product_attention, attn_mask=attn_mask, dropout_p=dropout, is_causal=causal, scale=scale
    )
    if q.device.type != "cuda" or q.shape[2] % _CUDNN_MULTIPLE == k.shape[2] % _CUDNN_MULTIPLE == 0:
        return sdpa(q, k, v)
    with sdpa_kernel(_BACKENDS_WITHOUT_CUDNN):
        return sdpa(q, k, v)


_CUDNN_MULTIPLE = 64
_MAX_SHORT_SIZE = 128  # head size up to which a tile of a short sequence fits into registers
_BACKENDS_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, query_layout: BatchLayout, key_layout: BatchLayout, scale: float, mask: Mask
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # the causal window of flash attention is aligned to the last key, so it covers a memory too
    window = (-1, 0) if isinstance(mask, Causal) else (-1, -1)
    out = varlen_attn(
        q,
        k,
        v,
        query_layout.cu_seqlens,
        key_layout.cu_seqlens,
        query_layout.kernel_max_length,
        key_layout.kernel_max_length,
        scale=scale,
        window_size=window,
    )
    assert isinstance(out, Tensor)
    return out
