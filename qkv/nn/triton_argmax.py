"""The most probable token of each row, and greedy search's bookkeeping; imported only if Triton is installed.

A greedy step would otherwise launch some twenty kernels for a few numbers per row, which take longer than a layer.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]  # only on machines with a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from qkv.nn.triton_launch import gdc_launch_dependents, gdc_wait, launch_options

MAX_TOP = 32  # tokens that the kernel takes one after the other
_VOCABULARY_BLOCK = 1024
_TOP_BLOCK = 2048


def argmax_with_log_prob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable token of each row and its log-probability; each value is read once.  # [R, V] -> [R]"""
    blocks = _block_maxima(logits)
    num_rows, num_blocks = blocks[0].shape
    best = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    options = launch_options(logits.device)
    _merge_kernel[(num_rows,)](
        *blocks, best, log_probs, num_blocks, BLOCK=triton.next_power_of_2(num_blocks), num_warps=1, **options
    )
    return best, log_probs


def append_best_token(
    logits: Tensor,  # [R, vocabulary]
    tokens: Tensor,  # [R] int64: receives the most probable token
    history: Tensor,  # [R, W] int64: receives it after the tokens so far, unless the row is complete
    log_probs: Tensor,  # [R, W] float32: receives its log-probability
    num_tokens: Tensor,  # [R] int64: tokens of the history
    prompt_lengths: Tensor,  # [R] int64
    limits: Tensor,  # [R] int64: maximum number of generated tokens
    ended: Tensor,  # [R] bool
    eos_ids: Tensor,  # [E] int64
) -> None:
    """Append the most probable token of each row to its history, in place."""
    blocks = _block_maxima(logits)
    num_rows, num_blocks = blocks[0].shape
    _append_kernel[(num_rows,)](
        *blocks,
        tokens,
        history,
        log_probs,
        num_tokens,
        prompt_lengths,
        limits,
        ended.view(torch.uint8),
        eos_ids,
        num_blocks,
        history.stride(0),
        log_probs.stride(0),
        len(eos_ids),
        BLOCK=triton.next_power_of_2(num_blocks),
        BLOCK_EOS=triton.next_power_of_2(len(eos_ids)),
        num_warps=1,
        **launch_options(logits.device),
    )


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most probable tokens of each row: log-probabilities and tokens.  # [R, vocabulary] -> [R, k]

    The kernel takes the best of each block of the vocabulary; the best of these are the best of all.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _TOP_BLOCK)
    sizes = num_rows, num_blocks, k
    values = torch.empty(sizes, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(sizes, dtype=torch.long, device=logits.device)
    sums = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    options = launch_options(logits.device)
    _block_top_kernel[(num_rows, num_blocks)](
        logits, values, tokens, sums, vocab_size, num_blocks, logits.stride(0), TOP=k, BLOCK=_TOP_BLOCK, **options
    )
    maxima = values[:, :, 0]  # [R, B]
    maximum = maxima.amax(1, keepdim=True)
    normalizer = maximum + (sums * torch.exp(maxima - maximum)).sum(1, keepdim=True).log()  # [R, 1]
    best, index = values.flatten(1).topk(k, 1)
    return best - normalizer, tokens.flatten(1).gather(1, index)


def _block_maxima(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return per block of the vocabulary the maximum, the sum of exp(logit - maximum) and the best token.  # [R, B]"""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _VOCABULARY_BLOCK)
    maxima, sums = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_blocks, dtype=torch.long, device=logits.device)
    _block_max_kernel[(num_rows, num_blocks)](
        logits,
        maxima,
        sums,
        tokens,
        vocab_size,
        num_blocks,
        logits.stride(0),
        BLOCK=_VOCABULARY_BLOCK,
        num_warps=4,
        **launch_options(logits.device),
    )
    return maxima, sums, tokens


@triton.jit  # type: ignore[untyped-decorator]
def _block_max_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    logits, maxima, sums, tokens, vocab_size, num_blocks, stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    maximum = tl.max(values, 0)
    index = row * num_blocks + block
    tl.store(maxima + index, maximum)
    tl.store(sums + index, tl.sum(tl.exp(values - maximum), 0))
    tl.store(tokens + index, (block * BLOCK + tl.argmax(values, 0)).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _block_top_kernel(  # type: ignore[no-untyped-def]
    logits,
    top_values,
    top_tokens,
    sums,
    vocab_size,
    num_blocks,
    stride,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    token = block * BLOCK + column
    values = tl.load(logits + row * stride + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    index = row * num_blocks + block
    # a block whose tokens are all suppressed has no finite maximum
    maximum = tl.maximum(tl.max(values, 0), -3.0e38)
    tl.store(sums + index, tl.sum(tl.exp(values - maximum), 0))
    for rank in range(TOP):
        best = tl.argmax(values, 0)
        tl.store(top_values + index * TOP + rank, tl.maximum(tl.max(values, 0), -3.0e38))
        tl.store(top_tokens + index * TOP + rank, tl.minimum(block * BLOCK + best, vocab_size - 1).to(tl.int64))
        values = tl.where(column == best, -float("inf"), values)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(maxima, sums, tokens, row, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a row's most probable token and its log-probability."""
    block = tl.arange(0, BLOCK)
    is_block = block < num_blocks
    values = tl.load(maxima + row * num_blocks + block, mask=is_block, other=-float("inf"))
    counts = tl.load(sums + row * num_blocks + block, mask=is_block, other=0.0)
    maximum = tl.max(values, 0)
    best = tl.load(tokens + row * num_blocks + tl.argmax(values, 0))
    return best, -tl.log(tl.sum(counts * tl.exp(values - maximum), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    maxima, sums, tokens, best, log_probs, num_blocks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token, log_prob = _merge(maxima, sums, tokens, row, num_blocks, BLOCK)
    tl.store(best + row, token)
    tl.store(log_probs + row, log_prob)


@triton.jit  # type: ignore[untyped-decorator]
def _append_kernel(  # type: ignore[no-untyped-def]
    maxima,
    sums,
    block_tokens,
    tokens,
    history,
    log_probs,
    num_tokens,
    prompt_lengths,
    limits,
    ended,
    eos_ids,
    num_blocks,
    history_stride,
    log_probs_stride,
    num_eos,
    BLOCK: tl.constexpr,
    BLOCK_EOS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token, log_prob = _merge(maxima, sums, block_tokens, row, num_blocks, BLOCK)
    length = tl.load(num_tokens + row)
    is_open = (tl.load(ended + row) == 0) & (length - tl.load(prompt_lengths + row) < tl.load(limits + row))
    eos = tl.arange(0, BLOCK_EOS)
    is_eos = tl.max((tl.load(eos_ids + eos, mask=eos < num_eos, other=-1) == token).to(tl.int32), 0)
    tl.store(history + row * history_stride + length, token, mask=is_open)
    tl.store(log_probs + row * log_probs_stride + length, log_prob, mask=is_open)
    tl.store(num_tokens + row, length + 1, mask=is_open)
    tl.store(ended + row, is_eos.to(tl.uint8), mask=is_open)
    tl.store(tokens + row, token)  # of complete rows too, which run along until they leave
