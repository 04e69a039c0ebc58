"""Reference attention from the formulas, one query and one key at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.nn.attention_score import AttentionScore


def raw_score(score: AttentionScore, head: int, query: Tensor, key: Tensor) -> Tensor:
    """Return g(k, q) of one head, as on the slides."""
    if score.kind == "dot":
        return torch.dot(key, query)
    if score.kind == "scaled_dot":
        return torch.dot(key, query) / math.sqrt(len(key))
    if score.kind == "bilinear":
        return key @ score.matrix[head] @ query
    joint = torch.cat([score.from_key[head], score.from_query[head]]).T  # W of W [k; q]
    hidden = joint @ torch.cat([key, query])
    vector = score.vector[head, :, 0]
    if score.kind == "additive":
        return vector @ torch.tanh(hidden)
    first = torch.relu(hidden + score.bias[head, 0, 0])
    return vector @ torch.relu(score.hidden_weight[head].T @ first + score.hidden_bias[head, 0, 0])


def one_sequence(score: AttentionScore, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """[N, H, query], [M, H, key], [M, H, value] -> [N, H, value]"""
    rows = []
    for i in range(len(q)):
        keys = range(len(k) - len(q) + i + 1) if causal else range(len(k))  # queries are the last tokens of the keys
        for head in range(q.shape[1]):
            e = torch.stack([raw_score(score, head, q[i, head], k[j, head]) for j in keys])
            w = e.exp() / e.exp().sum()
            rows.append(sum(w[n] * v[j, head] for n, j in enumerate(keys)))
    return torch.stack(rows).view(len(q), q.shape[1], -1)


def naive_attend(
    score: AttentionScore, q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], causal: bool
) -> Tensor:
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([one_sequence(score, *part, causal) for part in parts])
