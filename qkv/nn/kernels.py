"""The one door to attention: softmax(score(q, k)) v, and the only softmax over keys in the project.

Behind it are kernels that give the same answer: on a GPU one fused call for sequences of one length and variable-length
flash attention for others, SDPA over groups of similar length on a CPU, and the explicit softmax where the weights are
watched or the score is no dot product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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

# takes the weights [b, H, n, m] of a watched layer, which sequences of the batch they belong to, and the real sizes of
# their queries and keys
AttentionHook = Callable[[Tensor, Sequence[int], Sequence[int], Sequence[int]], None]

# what distance adds to the scores of n queries and m keys that stand at the places 0 … of one sequence: [H, n, m].
# Sequences that share a row may use it as it is: between places of one of them it sees the same distances.
PositionBias = Callable[[int, int], Tensor]


def attend(
    q: Tensor,  # [Tq, H, query]
    k: Tensor,  # [Tk, H, key]
    v: Tensor,  # [Tk, H, value]
    query_layout: BatchLayout,
    key_layout: BatchLayout,
    *,
    score: AttentionScore,
    mask: Mask,
    bias: PositionBias | None = None,
    dropout: float = 0.0,
    hook: AttentionHook | None = None,
    kernel: str | None = None,
) -> Tensor:  # [Tq, H, value]
    """Each query's weighted average of the values of its own sequence; `bias` is what distance adds to a score."""
    if bias is not None and query_layout is not key_layout:
        raise InputError("distances are between places of one sequence; they do not go with cross-attention")
    if isinstance(mask, Causal) and query_layout is not key_layout and query_layout.lengths_list != key_layout.lengths_list:
        raise InputError("a causal mask needs as many queries as keys in each sequence")
    precomputed_keys = score.precompute_keys(k.transpose(0, 1)).transpose(0, 1)  # [Tk, H, P]
    uniform_length, return_weights = query_layout.is_uniform and key_layout.is_uniform, hook is not None
    kernel_name = kernel or select_kernel(q, v, score=score, has_bias=bias is not None, dropout=dropout, return_weights=return_weights, uniform_length=uniform_length)
    if kernel_name == "uniform":
        return _uniform(q, precomputed_keys, v, query_layout, key_layout, score.scale, mask, dropout)
    if kernel_name == "varlen":
        return _varlen(q, precomputed_keys, v, query_layout, key_layout, score.scale, mask)
    bucket_plan = plan_buckets(query_layout, key_layout, bucketed=kernel_name == "bucketed", causal=isinstance(mask, Causal))
    if kernel_name == "eager":
        out: Tensor = _eager(q, precomputed_keys, v, bucket_plan, score, mask, bias, dropout, hook)
    else:
        out = _bucketed(q, precomputed_keys, v, bucket_plan, score.scale, mask, bias, dropout)
    return out


def select_kernel(
    q: Tensor, v: Tensor, *, score: AttentionScore, dropout: float, return_weights: bool, has_bias: bool = False, uniform_length: bool = False
) -> str:
    """The fastest kernel that can do what is asked; `uniform_length`: queries are all equally long, and keys are."""
    if return_weights or not score.is_dot:
        return "eager"
    if q.device.type != "cuda":
        return "bucketed"
    half_precision = q.dtype in (torch.bfloat16, torch.float16)
    head_dim_supported = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    deterministic = torch.are_deterministic_algorithms_enabled()  # flash attention adds gradients in any order
    if not half_precision or not head_dim_supported or has_bias or deterministic:
        return "padded"
    return "uniform" if uniform_length else "padded" if dropout else "varlen"  # the last one drops nothing


def attend_cached(
    q: Tensor,  # [B, H, N, query]
    kv: KeyValues,
    *,
    score: AttentionScore,
    bias: Tensor | None = None,  # [H, N, M]
    dropout: float = 0.0,
    hook: AttentionHook | None = None,
    row_ids: Sequence[int] | None = None,
) -> Tensor:  # [B, H, N, value]
    """The same for a step of decoding: queries against keys that were prepared before."""
    if score.is_dot and hook is None:
        attn_mask = _bias_and_mask(bias, kv.mask)
        return _sdpa(q, kv.keys, kv.values, attn_mask, score.scale, dropout)
    scores = score(q, kv.keys) if bias is None else score(q, kv.keys) + bias
    weights = _softmax(scores, kv.mask)  # [B, H, N, M]
    if hook is not None:
        hook(kv.strip_padding(weights), row_ids if row_ids is not None else range(len(q)), [q.shape[2]] * len(q), kv.lengths)
    return F.dropout(weights, dropout) @ kv.values


def _bias_and_mask(bias: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """What a fused kernel adds to the scores, or the places that it may look at where nothing is added."""
    if bias is None:
        return attn_mask
    return bias[None] if attn_mask is None else bias.masked_fill(~attn_mask, float("-inf"))  # [1 or B, H, N, M]


def _softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return torch.softmax(scores, dim=-1)


# ---- sequences of similar length, padded together -------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, bucket_plan: BucketPlan, scale: float, mask: Mask, bias: PositionBias | None, dropout: float
) -> Tensor:  # [Tq, H, value]
    causal = isinstance(mask, Causal)
    outputs = []
    for bucket, gq, gk, gv in pad_to_buckets(q, k, v, bucket_plan):
        # behind a causal mask no real query can see padding, which lies behind all of them
        attn_mask = bucket.mask if bucket.packs_sequences or not causal else None
        is_causal = causal and not bucket.packs_sequences
        if bias is not None:  # a kernel takes a causal flag or something to add, not both
            mask_tensor = mask.as_tensor(bucket.query_length, bucket.key_length, q.device) if is_causal else attn_mask
            attn_mask, is_causal = _bias_and_mask(bias(bucket.query_length, bucket.key_length), mask_tensor), False
        outputs.append(_sdpa(gq, gk, gv, attn_mask, scale, dropout, causal=is_causal))
    return unpad(outputs, bucket_plan)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket_plan: BucketPlan,
    score: AttentionScore,
    mask: Mask,
    bias: PositionBias | None,
    dropout: float,
    hook: AttentionHook | None,
) -> Tensor:  # [Tq, H, value]
    ((bucket, gq, gk, gv),) = pad_to_buckets(q, k, v, bucket_plan)
    attn_mask = bucket.mask
    if not isinstance(mask, Bidirectional):
        mask_tensor = mask.as_tensor(bucket.query_length, bucket.key_length, q.device)[None, None]  # [1, 1, N, M]
        attn_mask = mask_tensor if attn_mask is None else attn_mask & mask_tensor
    scores = score(gq, gk) if bias is None else score(gq, gk) + bias(bucket.query_length, bucket.key_length)
    weights = _softmax(scores, attn_mask)  # [B, H, N, M]
    if hook is not None:
        query_lengths, key_lengths = _row_lengths(bucket_plan.scatter_q, bucket.num_rows, bucket.query_length), _row_lengths(bucket_plan.scatter_k, bucket.num_rows, bucket.key_length)
        hook(weights, bucket_plan.order, query_lengths, key_lengths)
    return unpad([F.dropout(weights, dropout) @ gv], bucket_plan)


def _row_lengths(scatter_index: Tensor, num_rows: int, max_length: int) -> list[int]:
    lengths: list[int] = torch.bincount(scatter_index // max_length, minlength=num_rows).tolist()
    return lengths


# ---- one call for a whole batch, on a GPU ---------------------------------------------------------------------------


def _uniform(
    q: Tensor, k: Tensor, v: Tensor, query_layout: BatchLayout, key_layout: BatchLayout, scale: float, mask: Mask, dropout: float
) -> Tensor:  # [Tq, H, value]
    """Sequences of one length lie as a padded batch does: a view is enough."""
    sides = (q, query_layout.max_length), (k, key_layout.max_length), (v, key_layout.max_length)
    q, k, v = (x.view(-1, n, *x.shape[1:]).transpose(1, 2) for x, n in sides)  # [B, H, N, size]
    causal = isinstance(mask, Causal)
    return _sdpa(q, k, v, None, scale, dropout, causal).transpose(1, 2).flatten(0, 1)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:  # [B, H, N, value]
    """torch's own choice of a kernel, but cuDNN's, which is planned for every new shape in 70 ms, only for lengths that
    somebody chose: those that chance made hardly come again."""
    sdpa = partial(F.scaled_dot_product_attention, attn_mask=attn_mask, dropout_p=dropout, is_causal=causal, scale=scale)
    if q.device.type != "cuda" or q.shape[2] % _CUDNN_MULTIPLE == k.shape[2] % _CUDNN_MULTIPLE == 0:
        return sdpa(q, k, v)
    with sdpa_kernel(_BACKENDS_WITHOUT_CUDNN):
        return sdpa(q, k, v)


_CUDNN_MULTIPLE = 64
_BACKENDS_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _varlen(q: Tensor, k: Tensor, v: Tensor, query_layout: BatchLayout, key_layout: BatchLayout, scale: float, mask: Mask) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if isinstance(mask, Causal) else (-1, -1)
    out = varlen_attn(
        q, k, v, query_layout.cu_seqlens, key_layout.cu_seqlens, query_layout.kernel_max_length, key_layout.kernel_max_length, scale=scale, window_size=window
    )
    assert isinstance(out, Tensor)
    return out
