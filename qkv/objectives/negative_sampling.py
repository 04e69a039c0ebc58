"""Losses and gradients of skip-gram and CBOW with negative sampling, as products of small matrices.

word2vec.c updates two vectors at a time. Here 16 successive words are a group: their scores with all words around them
are one matrix product, and so are those with 16 noise words, which the group shares (Ji et al. 2016). The weight of a
noise word keeps the expected gradient that of word2vec. The gradients of the words of a block are added up before the
vectors change; words that are so frequent that this would overshoot have a smaller step (`WordBlock.in_steps`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE = 16  # successive words that share noise words, and the number of these


class WordBlock(NamedTuple):
    """Successive words in groups, each with its context; G groups.

    The windows of two texts do not overlap, so that the words of several texts follow each other.
    """

    tokens: Tensor  # [16 G + 2 window] words, after `window` unused ones; unused ones after the last, too
    spans: Tensor  # [16 G] row of the window table (`window_table`) of each word
    noise: Tensor  # [G, 16] noise words
    in_steps: Tensor  # [16 G + 2 window] factor on the gradient of each word's input vector
    out_steps: Tensor  # [16 G + 2 window] of its output vector
    noise_steps: Tensor  # [G, 16] of the noise words' output vectors

    @property
    def num_groups(self) -> int:
        return len(self.noise)

    def split(self, max_groups: int) -> Iterator[WordBlock]:
        """Yield blocks of at most `max_groups` groups."""
        padding = len(self.tokens) - len(self.spans)
        for first in range(0, self.num_groups, max_groups):
            last = min(first + max_groups, self.num_groups)
            words = slice(first * GROUP_SIZE, last * GROUP_SIZE)
            padded = slice(first * GROUP_SIZE, last * GROUP_SIZE + padding)
            yield WordBlock(
                self.tokens[padded],
                self.spans[words],
                self.noise[first:last],
                self.in_steps[padded],
                self.out_steps[padded],
                self.noise_steps[first:last],
            )


class RowGradient(NamedTuple):
    """The gradient of some rows of a matrix; a row may occur several times."""

    rows: Tensor  # [N]
    values: Tensor  # [N, width]


class Gradients(NamedTuple):
    """The gradients of both matrices."""

    input: list[RowGradient]
    output: list[RowGradient]


@lru_cache(8)
def window_table(window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return which words around a group are the context of a word: 1 or 0.

    # [(window + 1)² · 16, 16 + 2 window]
    Row (left (window + 1) + right) 16 + i is for word i of a group whose context is `left` words before it and `right`
    words after it.
    """
    distances = torch.arange(GROUP_SIZE + 2 * window) - window - torch.arange(GROUP_SIZE)[:, None]  # [16, keys]
    reach = torch.arange(window + 1)
    left, right = reach[:, None, None, None], reach[None, :, None, None]
    table = (distances >= -left) & (distances <= right) & (distances != 0)  # [window + 1, window + 1, 16, keys]
    return table.flatten(0, 2).to(device, dtype)


@lru_cache(8)
def _mean_table(window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return `window_table` with rows that sum to 1, or to 0 for a word without context."""
    table = window_table(window, device, dtype)
    return table / table.sum(-1, keepdim=True).clamp(min=1)


class _Scores(NamedTuple):
    """Vectors of a block, and the products of the predicting ones with those of context and noise."""

    predictors: Tensor  # [G, 16, width] input vectors, or means of them
    targets: Tensor  # [G, keys or 16, width] output vectors of the words that are predicted
    noise: Tensor  # [G, 16, width]
    positive: Tensor  # [G, 16, keys or 1]
    negative: Tensor  # [G, 16, 16]


def _window(block: WordBlock) -> int:
    return (len(block.tokens) - len(block.spans)) // 2


def _around_groups(values: Tensor, block: WordBlock) -> Tensor:
    """Return the rows of the words in and around each group, as a view.  # [16 G + 2 window, w] -> [G, keys, w]"""
    width, num_keys = values.shape[-1], GROUP_SIZE + 2 * _window(block)
    return values.as_strided((block.num_groups, num_keys, width), (GROUP_SIZE * width, width, 1))


def _own_tokens(block: WordBlock) -> Tensor:
    """Return the words of all groups, without those around them.  # [16 G]"""
    window = _window(block)
    return block.tokens[window : window + len(block.spans)]


def _grouped(rows: Tensor) -> Tensor:
    return rows.view(-1, GROUP_SIZE, rows.shape[-1])


def _skipgram_scores(in_weight: Tensor, out_weight: Tensor, block: WordBlock) -> _Scores:
    predictors = _grouped(torch.embedding(in_weight, _own_tokens(block)))
    targets = _around_groups(torch.embedding(out_weight, block.tokens), block)
    noise = torch.embedding(out_weight, block.noise)
    positive, negative = (torch.bmm(predictors, vectors.transpose(1, 2)) for vectors in (targets, noise))
    return _Scores(predictors, targets, noise, positive, negative)


def _cbow_scores(in_weight: Tensor, out_weight: Tensor, block: WordBlock) -> _Scores:
    means = _grouped(torch.embedding(_mean_table(_window(block), in_weight.device, in_weight.dtype), block.spans))
    predictors = torch.bmm(means, _around_groups(torch.embedding(in_weight, block.tokens), block))
    targets = _grouped(torch.embedding(out_weight, _own_tokens(block)))
    noise = torch.embedding(out_weight, block.noise)
    positive = (predictors * targets).sum(-1, keepdim=True)
    return _Scores(predictors, targets, noise, positive, torch.bmm(predictors, noise.transpose(1, 2)))


def _contexts(block: WordBlock, like: Tensor) -> Tensor:
    """Return the context of each word as 1 and 0.  # [G, 16, keys]"""
    return _grouped(torch.embedding(window_table(_window(block), like.device, like.dtype), block.spans))


def skipgram_loss(in_weight: Tensor, out_weight: Tensor, block: WordBlock, negatives: int) -> Tensor:
    """Return -log σ(u_c · v_w) - Σ log σ(-u_n · v_w), summed over words w and their context c.  # []"""
    scores, contexts = _skipgram_scores(in_weight, out_weight, block), _contexts(block, in_weight)
    weights = contexts.sum(-1, keepdim=True) * (negatives / GROUP_SIZE)  # [G, 16, 1] of each noise word
    return (F.softplus(-scores.positive) * contexts).sum() + (F.softplus(scores.negative) * weights).sum()


def skipgram_gradients(in_weight: Tensor, out_weight: Tensor, block: WordBlock, negatives: int) -> Gradients:
    """Return the gradients of `skipgram_loss`, times the factors of the block's words."""
    scores, contexts = _skipgram_scores(in_weight, out_weight, block), _contexts(block, in_weight)
    weights = contexts.sum(-1, keepdim=True) * (negatives / GROUP_SIZE)
    positive = scores.positive.neg_().sigmoid_().mul_(contexts).neg_()  # σ(s) - 1 = -σ(-s)
    negative = scores.negative.sigmoid_().mul_(weights)
    in_gradient = torch.bmm(positive, scores.targets).baddbmm_(negative, scores.noise)  # [G, 16, width]
    window, width = _window(block), in_weight.shape[1]
    in_gradient *= _grouped(block.in_steps[window : window + len(block.spans), None])
    positive *= _around_groups(block.out_steps[:, None], block).transpose(1, 2)
    negative *= block.noise_steps[:, None]
    target_gradient = torch.bmm(positive.transpose(1, 2), scores.predictors)  # [G, keys, width]
    noise_gradient = torch.bmm(negative.transpose(1, 2), scores.predictors)  # [G, 16, width]
    targets = _around_groups(block.tokens[:, None], block).flatten()
    return Gradients(
        [RowGradient(_own_tokens(block), in_gradient.view(-1, width))],
        [
            RowGradient(targets, target_gradient.view(-1, width)),
            RowGradient(block.noise.flatten(), noise_gradient.view(-1, width)),
        ],
    )


def cbow_loss(in_weight: Tensor, out_weight: Tensor, block: WordBlock, negatives: int) -> Tensor:
    """Return -log σ(u_w · h) - Σ log σ(-u_n · h), summed over words w; h is the mean of their context.  # []"""
    scores = _cbow_scores(in_weight, out_weight, block)
    has_context = _contexts(block, in_weight).amax(-1, keepdim=True)  # [G, 16, 1]
    noise_loss = F.softplus(scores.negative).sum(-1, keepdim=True) * (negatives / GROUP_SIZE)
    return ((F.softplus(-scores.positive) + noise_loss) * has_context).sum()


def cbow_gradients(
    in_weight: Tensor, out_weight: Tensor, block: WordBlock, negatives: int, *, divide: bool
) -> Gradients:
    """Return the gradients of `cbow_loss`, times the factors of the block's words.

    With `divide` False a context word gets the gradient of the mean h, as if h were the sum (word2vec.c).
    """
    scores, contexts = _cbow_scores(in_weight, out_weight, block), _contexts(block, in_weight)
    counts = contexts.sum(-1, keepdim=True)  # [G, 16, 1]
    has_context = counts.clamp(max=1)
    positive = scores.positive.neg_().sigmoid_().mul_(has_context).neg_()  # [G, 16, 1]
    negative = scores.negative.sigmoid_().mul_(has_context * (negatives / GROUP_SIZE))
    mean_gradient = (positive * scores.targets).baddbmm_(negative, scores.noise)  # [G, 16, width]
    if divide:
        mean_gradient /= counts.clamp(min=1)
    contexts *= _around_groups(block.in_steps[:, None], block).transpose(1, 2)
    in_gradient = torch.bmm(contexts.transpose(1, 2), mean_gradient)  # [G, keys, width]
    window, width = _window(block), in_weight.shape[1]
    positive *= _grouped(block.out_steps[window : window + len(block.spans), None])
    negative *= block.noise_steps[:, None]
    noise_gradient = torch.bmm(negative.transpose(1, 2), scores.predictors)  # [G, 16, width]
    target_gradient = scores.predictors.mul_(positive)  # after its last use
    return Gradients(
        [RowGradient(_around_groups(block.tokens[:, None], block).flatten(), in_gradient.view(-1, width))],
        [
            RowGradient(_own_tokens(block), target_gradient.view(-1, width)),
            RowGradient(block.noise.flatten(), noise_gradient.view(-1, width)),
        ],
    )
