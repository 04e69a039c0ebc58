"""Writing token by token, greedily or by sampling, over the one interface `step(tokens, state) -> logits, state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qkv.nn import Decoder, EncoderDecoder, Ragged
from qkv.nn.model import State

Writer = EncoderDecoder | Decoder


@dataclass(frozen=True)
class Hypothesis:
    """What a model wrote, without the end token, and how likely it found that (sum of log-probabilities)."""

    tokens: list[int]
    score: float
    finished: bool = True  # False: the limit came before the end token


def opening(model: Writer, source: Ragged, rows: int, limit: int) -> tuple[Tensor, State]:
    """The first token's logits for `rows` outputs a source: a source is encoded, or is the prompt to go on from."""
    if isinstance(model, Decoder):
        return model.read(source, rows, limit)
    state = model.begin(model.encode(source), len(source) * rows, limit)
    start = torch.full((len(source) * rows,), model.spec.start, device=source.values.device)
    return model.step(start, state)


def log_chances(model: Writer, logits: Tensor) -> Tensor:
    """Log-probabilities of the next token among those that a model writes.  # [R, vocabulary]"""
    if model.spec.never:  # before the softmax: a Marian wants its padding's share to go to the others
        never = torch.tensor(model.spec.never, device=logits.device)
        logits = logits.index_fill(-1, never, float("-inf"))
    return torch.log_softmax(logits.float(), -1)


def write(
    model: Writer,
    source: Ragged,
    *,
    limits: Sequence[int],
    choose: Callable[[Tensor, int], Tensor],
    rows: int = 1,
) -> list[list[Hypothesis]]:
    """`rows` outputs a source, of at most its limit; `choose` picks from each row's log-probabilities at a step."""
    count, device = len(source) * rows, source.values.device
    logits, state = opening(model, source, rows, max(limits))
    total = torch.zeros(count, device=device)
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    room = torch.tensor(limits, device=device).repeat_interleave(rows)  # [R]
    written = []
    token: Tensor | None = None
    for step in range(max(limits)):
        if token is not None:
            logits, state = model.step(token, state)
        log_probabilities = log_chances(model, logits)  # [R, vocabulary]
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


def greedy(model: Writer, source: Ragged, *, limits: Sequence[int]) -> list[list[Hypothesis]]:
    """The likeliest token at each step."""
    return write(model, source, limits=limits, choose=lambda log_probabilities, _: log_probabilities.argmax(-1))


def sample(
    model: Writer,
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
