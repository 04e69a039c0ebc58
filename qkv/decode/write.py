"""Writing token by token, greedily or by sampling, over the one interface `step(tokens, state) -> logits, state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    model: EncoderDecoder, source: Ragged, *, limit: int, choose: Callable[[Tensor], Tensor], rows: int = 1
) -> list[list[Hypothesis]]:
    """`rows` outputs a source; `choose` picks a token from each row's log-probabilities [R, vocabulary]."""
    memory = model.encode(source)
    count = len(source) * rows
    state = model.begin(memory, count, limit)
    token = torch.full((count,), model.spec.start, device=source.values.device)
    total = torch.zeros(count, device=token.device)
    done = torch.zeros(count, dtype=torch.bool, device=token.device)
    written = []
    for _ in range(limit):
        logits, state = model.step(token, state)
        log_probabilities = torch.log_softmax(logits.float(), -1)  # [R, vocabulary]
        token = choose(log_probabilities)  # [R]
        chosen = log_probabilities.gather(1, token[:, None]).squeeze(1)
        total += torch.where(done, 0.0, chosen)
        written.append(torch.where(done, model.spec.end, token))
        done = done | (token == model.spec.end)
        if done.all():
            break
    tokens, scores, ends = torch.stack(written, 1).tolist(), total.tolist(), done.tolist()
    hypotheses = [
        Hypothesis(_until(row, model.spec.end), score, finished)
        for row, score, finished in zip(tokens, scores, ends, strict=True)
    ]
    return [hypotheses[i : i + rows] for i in range(0, count, rows)]


def greedy(model: EncoderDecoder, source: Ragged, *, limit: int) -> list[list[Hypothesis]]:
    """The likeliest token at each step."""
    return write(model, source, limit=limit, choose=lambda log_probabilities: log_probabilities.argmax(-1))


def sample(
    model: EncoderDecoder,
    source: Ragged,
    *,
    limit: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    rows: int = 1,
) -> list[list[Hypothesis]]:
    """Tokens drawn from the model's distribution, sharpened and cut; the same for the same seed."""
    generator = torch.Generator(source.values.device).manual_seed(seed)

    def draw(log_probabilities: Tensor) -> Tensor:
        kept = cut(log_probabilities / temperature, top_k, top_p)
        return torch.multinomial(torch.softmax(kept, -1), 1, generator=generator).squeeze(1)

    return write(model, source, limit=limit, choose=draw, rows=rows)


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
