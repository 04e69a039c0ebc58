"""Writing token by token, greedily or by sampling, over the one interface `step(tokens, state) -> logits, state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qkv.nn import EncoderDecoder, Ragged


@dataclass(frozen=True)
class Hypothesis:
    """What a model wrote, without the end token, and how likely it found that (sum of log-probabilities)."""

    tokens: list[int]
    score: float
    finished: bool = True  # False: the limit came before the end token


def write(
    model: EncoderDecoder,
    source: Ragged,
    *,
    limits: Sequence[int],
    choose: Callable[[Tensor, int], Tensor],
    rows: int = 1,
) -> list[list[Hypothesis]]:
    """`rows` outputs a source, of at most its limit; `choose` picks from each row's log-probabilities at a step."""
    memory = model.encode(source)
    count, device = len(source) * rows, source.values.device
    state = model.begin(memory, count, max(limits))
    token = torch.full((count,), model.spec.start, device=device)
    total = torch.zeros(count, device=device)
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    room = torch.tensor(limits, device=device).repeat_interleave(rows)  # [R]
    written = []
    for step in range(max(limits)):
        logits, state = model.step(token, state)
        log_probabilities = torch.log_softmax(logits.float(), -1)  # [R, vocabulary]
        token = choose(log_probabilities, step)  # [R]
        chosen = log_probabilities.gather(1, token[:, None]).squeeze(1)
        done = ended | (room <= step)
        total += torch.where(done, 0.0, chosen)
        written.append(torch.where(done, model.spec.end, token))
        ended = ended | (~done & (token == model.spec.end))
        if (ended | (room <= step + 1)).all():
            break
    tokens, scores, ends = torch.stack(written, 1).tolist(), total.tolist(), ended.tolist()
    hypotheses = [
        Hypothesis(_until(row, model.spec.end), score, finished)
        for row, score, finished in zip(tokens, scores, ends, strict=True)
    ]
    return [hypotheses[i : i + rows] for i in range(0, count, rows)]


def greedy(model: EncoderDecoder, source: Ragged, *, limits: Sequence[int]) -> list[list[Hypothesis]]:
    """The likeliest token at each step."""
    return write(model, source, limits=limits, choose=lambda log_probabilities, _: log_probabilities.argmax(-1))


def sample(
    model: EncoderDecoder,
    source: Ragged,
    *,
    limits: Sequence[int],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    rows: int = 1,
    numbers: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Tokens drawn from the model's distribution, sharpened and cut.

    A source's draws come from the seed and its number alone: neither its batch mates nor the device change them.
    """
    keys = [(n, row) for n in (numbers if numbers is not None else range(len(source))) for row in range(rows)]
    uniform = [np.random.Generator(np.random.PCG64([seed, *key])).random(max(limits)) for key in keys]
    draws = torch.tensor(np.stack(uniform), dtype=torch.float32, device=source.values.device)  # [R, limit]

    def draw(log_probabilities: Tensor, step: int) -> Tensor:
        chances = torch.softmax(cut(log_probabilities / temperature, top_k, top_p), -1)  # [R, vocabulary]
        below = chances.cumsum(-1) <= draws[:, step : step + 1] * chances.sum(-1, keepdim=True)
        last = chances.shape[-1] - 1 - (chances.flip(-1) > 0).int().argmax(-1)  # rounding never picks the impossible
        return torch.minimum(below.sum(-1), last)

    return write(model, source, limits=limits, choose=draw, rows=rows)


def cut(scores: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Keeps the k best (Fan et al. 2018) and the fewest that hold probability p (Holtzman et al. 2020)."""
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if top_p is not None:
        ordered, order = scores.sort(-1, descending=True)
        before = torch.softmax(ordered, -1).cumsum(-1) - torch.softmax(ordered, -1)  # mass of what is likelier
        dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= top_p)
        dropped.scatter_(-1, order[..., :1], False)  # the likeliest stays whatever p is
        scores = scores.masked_fill(dropped, float("-inf"))
    return scores


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
