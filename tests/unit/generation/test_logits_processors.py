"""Logits processors: rows at different steps in one padded buffer, as continuous batching and CUDA graphs have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.generation import GenerationConfig
from qkv.generation.logits_processors import NEG_INF, PADDING, make_processors

VOCABULARY = 9
EOS_IDS = torch.tensor([2, 5])
RULES: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": ((3,), (4, 6), (1, 7, 8), (2,)),
    "min_length": 5,
    "min_new_tokens": 3,
    "suppress_tokens": (1, 4),
    "begin_suppress_tokens": (6,),
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5),
    names=st.sets(st.sampled_from(sorted(RULES)), min_size=1),
    first_tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
    unused_columns=st.integers(0, 7),
    seed=st.integers(0, 1000),
)
def test_rows_at_different_steps_get_the_scores_that_each_gets_alone(
    rows: list[tuple[int, int]], names: set[str], first_tokens: list[int], unused_columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = GenerationConfig(**{name: RULES[name] for name in names})
    processors = make_processors(config, eos_ids=EOS_IDS, first_tokens=first_tokens)
    histories = [torch.randint(0, VOCABULARY, (prompt + new,), generator=generator) for prompt, new in rows]
    num_tokens, num_generated = torch.tensor([len(h) for h in histories]), torch.tensor([new for _, new in rows])
    buffer = torch.full((len(rows), int(num_tokens.max()) + unused_columns), PADDING)
    for row, history in zip(buffer, histories, strict=True):
        row[: len(history)] = history
    scores = torch.randn(len(rows), VOCABULARY, generator=generator)
    together, alone = scores, list(scores.split(1))
    for processor in processors:
        together = processor(together, buffer, num_tokens, num_generated)
        for i, history in enumerate(histories):
            alone[i] = processor(alone[i], history[None], num_tokens[i : i + 1], num_generated[i : i + 1])
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(
    ("settings_", "history", "forbidden"),
    [
        ({"no_repeat_ngram_size": 2}, [3, 4, 3], {4}),
        ({"no_repeat_ngram_size": 3}, [1, 3, 4, 7, 1, 3], {4}),
        ({"no_repeat_ngram_size": 1}, [3, 4], {3, 4}),
        ({"no_repeat_ngram_size": 4}, [3, 3, 3], set()),
        ({"bad_words_ids": ((4, 6), (3, 4, 7), (8,))}, [3, 4], {6, 7, 8}),
        ({"bad_words_ids": ((3, 4, 7),)}, [4], set()),
        ({"min_new_tokens": 3}, [3, 4], {2, 5}),
        ({"min_length": 2}, [3, 4], set()),
    ],
)
def test_a_rule_forbids_exactly_its_tokens(settings_: dict[str, Any], history: list[int], forbidden: set[int]) -> None:
    (processor,) = make_processors(GenerationConfig(**settings_), eos_ids=EOS_IDS)
    buffer = torch.tensor([[*history, *[PADDING] * 3]])
    scores = processor(
        torch.zeros(1, VOCABULARY), buffer, torch.tensor([len(history)]), torch.tensor([len(history) - 1])
    )
    assert {token for token in range(VOCABULARY) if scores[0, token] == NEG_INF} == forbidden


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_the_rules_replay_in_a_cuda_graph_with_other_histories() -> None:
    config = GenerationConfig(**RULES)
    processors = make_processors(config, eos_ids=EOS_IDS.cuda(), first_tokens=[3])
    buffer = torch.full((2, 12), PADDING, device="cuda")
    buffer[:, 0] = 1
    counts, scores = torch.ones(2, dtype=torch.long, device="cuda"), torch.randn(2, VOCABULARY, device="cuda")

    def process() -> torch.Tensor:
        result = scores
        for processor in processors:
            result = processor(result, buffer, counts, counts - 1)
        return result

    process()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = process()
    buffer[:, :6] = torch.tensor([[1, 3, 4, 7, 3, 4], [1, 6, 6, 8, 1, 7]], device="cuda")
    counts.fill_(6)
    graph.replay()
    assert torch.equal(captured, process())
