"""Choices among a vocabulary on a CPU, where PyTorch's own `argmax` and `topk` are not vectorized.

The largest value of each block of columns is found first, by vector instructions; then only the blocks that can hold
a result are searched.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128
_MIN_COLUMNS = 16 * _BLOCK  # shorter rows are searched directly


def argmax(x: Tensor) -> Tensor:
    """Return the index of the largest value of each row, the first one of equal values.  # [R, V] -> [R]"""
    if x.shape[-1] < _MIN_COLUMNS:
        return x.argmax(-1)
    blocks = _block_maxima(x).argmax(-1, keepdim=True)  # [R, 1]
    columns, values = _open_blocks(x, blocks)
    return columns.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)


def top_values(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row in descending order, and their indices.  # [R, V] -> [R, k], [R, k]"""
    if x.shape[-1] < max(_MIN_COLUMNS, 4 * k * _BLOCK):
        return tuple(x.topk(k, -1))  # type: ignore[return-value]
    # the k largest values lie in the k blocks with the largest maxima
    columns, values = _open_blocks(x, _block_maxima(x).topk(k, -1).indices)
    top = values.topk(k, -1)
    return top.values, columns.gather(1, top.indices)


def _block_maxima(x: Tensor) -> Tensor:
    """Return the largest value of each block of columns; the last block may be shorter.  # [R, V] -> [R, blocks]"""
    num_columns = x.shape[1]
    end = num_columns - num_columns % _BLOCK
    maxima = x[:, :end].reshape(len(x), -1, _BLOCK).amax(-1)  # a view
    return maxima if end == num_columns else torch.cat([maxima, x[:, end:].amax(-1, keepdim=True)], 1)


def _open_blocks(x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of blocks [R, k] and their values; columns beyond the last one have the value -inf."""
    columns = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)  # [R, k * block]
    last = x.shape[-1] - 1
    values = x.gather(1, columns.clamp(max=last)).masked_fill_(columns > last, float("-inf"))
    return columns, values
