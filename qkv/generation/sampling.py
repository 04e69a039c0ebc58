"""Greedy search and sampling over the interface `step(tokens, state) -> logits, state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qkv.nn import Ragged
from qkv.nn.shell import Model


@dataclass(frozen=True)
class Hypothesis:
    """One generated output."""

    tokens: list[int]  # without EOS
    score: float  # sum of log-probabilities, EOS included
    finished: bool = True  # False: the maximum length came before EOS


def next_token_log_probs(model: Model, logits: Tensor) -> Tensor:
    """Return the log-probabilities of the next token, without those that the model suppresses.  # [R, vocabulary]"""
    if model.spec.suppress_tokens:  # before the softmax, so that Marian's padding token gets no probability
        suppressed = torch.tensor(model.spec.suppress_tokens, device=logits.device)
        logits = logits.index_fill(-1, suppressed, float("-inf"))
    return torch.log_softmax(logits.float(), -1)


def generate_tokens(
    model: Model,
    source: Ragged,
    *,
    max_lengths: Sequence[int],
    select_token: Callable[[Tensor, int], Tensor],
    num_samples: int = 1,
) -> list[list[Hypothesis]]:
    """Generate `num_samples` outputs per source; `select_token(log_probs, step)` chooses the next token of each row."""
    num_rows, device = len(source) * num_samples, source.values.device
    logits, state = model.prefill(source, num_samples, max(max_lengths))
    total_scores = torch.zeros(num_rows, device=device)
    ended = torch.zeros(num_rows, dtype=torch.bool, device=device)
    length_limits = torch.tensor(max_lengths, device=device).repeat_interleave(num_samples)  # [R]
    generated = []
    token: Tensor | None = None
    for step in range(max(max_lengths)):
        if token is not None:
            logits, state = model.step(token, state)
        log_probs = next_token_log_probs(model, logits)  # [R, vocabulary]
        token = select_token(log_probs, step)  # [R]
        chosen_log_probs = log_probs.gather(1, token[:, None]).squeeze(1)
        done = ended | (length_limits <= step)
        total_scores += torch.where(done, 0.0, chosen_log_probs)
        generated.append(torch.where(done, model.spec.eos_id, token))
        ended = ended | (~done & (token == model.spec.eos_id))
        if (ended | (length_limits <= step + 1)).all():
            break
    tokens, scores, finished_flags = torch.stack(generated, 1).tolist(), total_scores.tolist(), ended.tolist()
    hypotheses = [
        Hypothesis(_strip_eos(row, model.spec.eos_id), score, finished)
        for row, score, finished in zip(tokens, scores, finished_flags, strict=True)
    ]
    return [hypotheses[i : i + num_samples] for i in range(0, num_rows, num_samples)]


def greedy(model: Model, source: Ragged, *, max_lengths: Sequence[int]) -> list[list[Hypothesis]]:
    """Generate the most probable token at each step."""
    return generate_tokens(
        model, source, max_lengths=max_lengths, select_token=lambda log_probs, _: log_probs.argmax(-1)
    )


def sample(
    model: Model,
    source: Ragged,
    *,
    max_lengths: Sequence[int],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    num_samples: int = 1,
    sample_ids: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Sample from the model's distribution, after temperature, top-k and top-p.

    The random numbers of a source depend on the seed and its `sample_ids` entry only, not on its batch or the device.
    """
    keys = [
        (sample_id, row)
        for sample_id in (sample_ids if sample_ids is not None else range(len(source)))
        for row in range(num_samples)
    ]
    uniform = [np.random.Generator(np.random.PCG64([seed, *key])).random(max(max_lengths)) for key in keys]
    draws = torch.tensor(np.stack(uniform), dtype=torch.float32, device=source.values.device)  # [R, max_length]

    def draw(log_probs: Tensor, step: int) -> Tensor:
        probs = torch.softmax(filter_top_k_top_p(log_probs / temperature, top_k, top_p), -1)  # [R, vocabulary]
        below_draw = probs.cumsum(-1) <= draws[:, step : step + 1] * probs.sum(-1, keepdim=True)
        last_possible = (
            probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
        )  # rounding must not select a token of probability 0
        return torch.minimum(below_draw.sum(-1), last_possible)

    return generate_tokens(model, source, max_lengths=max_lengths, select_token=draw, num_samples=num_samples)


def filter_top_k_top_p(scores: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Mask all but the k best (Fan et al. 2018) and the smallest set with probability p (Holtzman et al. 2020)."""
    if top_k is not None:
        min_score = scores.topk(min(top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < min_score, float("-inf"))
    if top_p is not None:
        ordered, order = scores.sort(-1, descending=True)
        mass_before = torch.softmax(ordered, -1).cumsum(-1) - torch.softmax(ordered, -1)  # probability of better tokens
        dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
        dropped.scatter_(-1, order[..., :1], False)  # the best token always stays
        scores = scores.masked_fill(dropped, float("-inf"))
    return scores


def _strip_eos(tokens: list[int], eos_id: int) -> list[int]:
    return tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens
