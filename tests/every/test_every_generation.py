"""Decoding by steps that can be captured as a CUDA graph, for every Transformer decoder: equal to the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import VOCABULARY, Case, with_decoder

from qkv.generation.beam_search import BeamLoop
from qkv.generation.config import GenerationConfig
from qkv.generation.cuda_graphs import run_with_graphs
from qkv.generation.decoding_model import decoding_model
from qkv.generation.sampling import TokenLoop
from qkv.generation.search import Hypothesis, Search, run
from qkv.nn import Ragged
from qkv.nn.stack import Stack

CASES = {
    name: case
    for name, case in with_decoder().items()
    if ("=" not in name or torch.cuda.is_available())  # variants on a GPU only: they share the code of their family
    and isinstance(getattr(case.model(), "decoder", None), Stack)
    and case.model().is_generative
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CONFIGS = {
    "greedy": GenerationConfig(max_new_tokens=9),
    "beams": GenerationConfig(max_new_tokens=9, num_beams=3, n_best=3),
    "early": GenerationConfig(max_new_tokens=9, num_beams=4, n_best=2, early_stopping=True, forced_eos_token_id=5),
    "diverse": GenerationConfig(
        max_new_tokens=7, num_beams=4, n_best=4, num_beam_groups=2, diversity_penalty=0.5, length_penalty=0.0
    ),
    "sampling": GenerationConfig(max_new_tokens=9, do_sample=True, n_best=2, top_k=5, top_p=0.9, seed=4),
}


def sources(lengths: list[int], device: str) -> Ragged:
    chance = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(4, VOCABULARY, (length,), generator=chance) for length in lengths]
    return Ragged.pack(rows).to(torch.device(device))


def plain(model: Any, source: Ragged, config: GenerationConfig) -> list[list[Hypothesis]]:
    search = Search(model, source, config, config.n_best if config.do_sample else config.num_beams)
    loop = BeamLoop(search) if config.num_beams > 1 else TokenLoop(search)
    loop.load(search, None)
    return run(search, loop)


def captured(model: Any, source: Ragged, config: GenerationConfig) -> list[list[Hypothesis]]:
    decoding = decoding_model(model, next(model.parameters()).dtype)
    rows_per_source = config.n_best if config.do_sample else config.num_beams
    return run_with_graphs(decoding, Search(decoding.model, source, config, rows_per_source), None)


def assert_equal(theirs: list[list[Hypothesis]], ours: list[list[Hypothesis]]) -> None:
    assert [[h.tokens for h in rows] for rows in ours] == [[h.tokens for h in rows] for rows in theirs]
    assert [[h.finished for h in rows] for rows in ours] == [[h.finished for h in rows] for rows in theirs]
    for expected, actual in zip(theirs, ours, strict=True):
        for one, other in zip(expected, actual, strict=True):
            assert other.token_log_probs == pytest.approx(one.token_log_probs, abs=1e-4)
            assert sum(other.token_log_probs) == pytest.approx(other.score, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@torch.inference_mode()
def test_captured_steps_equal_the_plain_loop(case: Case, config: GenerationConfig, device: str) -> None:
    model = case.model().float().to(device)  # type: ignore[union-attr]
    for lengths in ([4, 2, 5], [1], [3, 3, 1, 6, 2]):  # the second has fewer rows than its bucket of another call
        source = sources(lengths, device)
        assert_equal(plain(model, source, config), captured(model, source, config))


@torch.no_grad()
def test_a_decoding_copy_follows_the_weights_of_its_model() -> None:
    model, config = next(iter(CASES.values())).model().float(), CONFIGS["greedy"]
    source = sources([4, 2], "cpu")
    before = captured(model, source, config)
    for parameter in model.parameters():
        parameter.mul_(-1.5)
    assert_equal(plain(model, source, config), captured(model, source, config))
    assert captured(model, source, config) != before


@torch.no_grad()
def test_a_compiled_model_has_a_decoding_copy_of_its_own() -> None:
    """Compiled functions belong to the blocks of the model that they were made for."""
    model, config = CASES["gpt2"].model().float(), CONFIGS["greedy"]
    source = sources([4, 2], "cpu")
    expected = plain(model, source, config)
    for block in model.decoder.blocks:  # type: ignore[union-attr]
        block.project_qkv = lambda x: pytest.fail(f"the copy called a function of its model with {x.dtype}")
    assert_equal(expected, captured(model, source, config))
