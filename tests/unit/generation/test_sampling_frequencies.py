"""Frequencies of samples against the exact distribution of a tiny model, by a chi-square test.

The seed is fixed, so the outcome never changes. On a GPU the steps are replayed as a CUDA graph.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from writers import sources, tiny

from qkv.generation import GenerationConfig
from qkv.generation.engine import Engine
from qkv.generation.request import Request
from qkv.nn import Ragged

NUM_SAMPLES, PER_REQUEST = 20_000, 500
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all": {"temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
}


def filtered(logits: list[float], settings: dict[str, Any]) -> list[float]:
    """Return the distribution that is sampled from, by the definitions: temperature, top-k, top-p, min-p."""
    weights = [math.exp(logit / settings.get("temperature", 1.0)) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: settings.get("top_k", len(weights))]
    total, mass, nucleus = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if mass < settings.get("top_p", 1.0):
            nucleus.append(token)
        mass += weights[token] / total
    likely = [token for token in nucleus if weights[token] >= settings.get("min_p", 0.0) * weights[order[0]]]
    total = sum(weights[token] for token in likely)
    return [weights[token] / total if token in likely else 0.0 for token in range(len(weights))]


@torch.no_grad()
def exact_pairs(model: Any, source: Ragged, settings: dict[str, Any]) -> dict[tuple[int, int | None], float]:
    """Return the probability of each pair of first tokens; an output that ends after the first has no second."""
    spec, pairs = model.spec, {}

    def next_probs(tokens: list[int]) -> list[float]:
        return filtered(model(source, Ragged.pack([torch.tensor([spec.bos_id, *tokens])]))[-1].tolist(), settings)

    for first, first_prob in enumerate(next_probs([])):
        if first == spec.eos_id:
            pairs[first, None] = first_prob
        elif first_prob:
            pairs |= {(first, second): first_prob * prob for second, prob in enumerate(next_probs([first]))}
    return pairs


def chi_square_p_value(counts: Counter[Any], probs: dict[Any, float]) -> float:
    """Return how probable a deviation at least as large is; cells with few expected counts are merged."""
    total = sum(counts.values())
    cells = [(counts[key], prob * total) for key, prob in probs.items() if prob * total >= 5]
    rest = total - sum(count for count, _ in cells), total - sum(expected for _, expected in cells)
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(statistic / 2)))


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
CASES = [
    *(pytest.param(name, False, "cpu", id=f"{name}, plain loop") for name in FILTERS),
    pytest.param("all", True, "cpu", id="all, static tensors"),
    *(pytest.param(name, True, "cuda", id=f"{name}, CUDA graph", marks=NO_GPU) for name in FILTERS),
]


@pytest.mark.parametrize(("name", "use_graphs", "device"), CASES)
def test_sampled_pairs_of_tokens_have_the_models_probabilities(name: str, use_graphs: bool, device: str) -> None:
    model, source = tiny("transformer", seed=3, vocabulary=9), sources(4)
    probs = exact_pairs(model, source, FILTERS[name])
    config = GenerationConfig(
        do_sample=True, n_best=PER_REQUEST, max_new_tokens=2, seed=7, dtype="float32", **FILTERS[name]
    )
    engine = Engine(model.to(device), use_graphs=use_graphs)
    requests = [Request(source.values, config, number) for number in range(NUM_SAMPLES // PER_REQUEST)]
    counts: Counter[Any] = Counter()
    for request in engine.run(requests):
        for hypothesis in request.outputs or []:
            tokens = [*hypothesis.tokens, *([model.spec.eos_id] if hypothesis.finished else [])]
            counts[tokens[0], tokens[1] if len(tokens) > 1 else None] += 1
    assert sum(counts.values()) == NUM_SAMPLES
    assert all(probs[pair] > 0 for pair in counts)
    assert chi_square_p_value(counts, probs) > 0.001
    shifted = dict(zip(probs, [*list(probs.values())[1:], 0.0], strict=True))
    assert chi_square_p_value(counts, shifted) < 1e-6  # the test tells distributions apart
