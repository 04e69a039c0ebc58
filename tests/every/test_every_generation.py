"""The engine, for every family that generates: in any company as alone, and captured steps as plain ones."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, Case, with_decoder

from qkv.generation import cuda_graphs, decoding_model
from qkv.generation.config import GenerationConfig
from qkv.generation.engine import Engine
from qkv.generation.request import Hypothesis, Request
from qkv.nn import Ragged
from qkv.nn.packed_linear import can_pack

CASES = {
    name: case
    for name, case in with_decoder().items()
    if ("=" not in name or torch.cuda.is_available())  # variants on a GPU only: they share the code of their family
    and case.model().is_generative
}
STACKS = {name: case for name, case in CASES.items() if cuda_graphs.can_capture(case.model())}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CONFIGS = {
    "greedy": GenerationConfig(max_new_tokens=9),
    "beams": GenerationConfig(max_new_tokens=9, num_beams=3, n_best=3),
    "early": GenerationConfig(max_new_tokens=9, num_beams=4, n_best=2, early_stopping=True, forced_eos_token_id=5),
    "diverse": GenerationConfig(
        max_new_tokens=7, num_beams=4, n_best=4, num_beam_groups=2, diversity_penalty=0.5, length_penalty=0.0
    ),
    "sampling": GenerationConfig(max_new_tokens=9, do_sample=True, n_best=2, top_k=5, top_p=0.9, seed=4),
    "rules": GenerationConfig(
        max_new_tokens=9, repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=4, bad_words_ids=((7,), (5, 6))
    ),
    "beams with rules": GenerationConfig(
        max_new_tokens=9, num_beams=3, n_best=2, repetition_penalty=1.3, no_repeat_ngram_size=2, min_length=6
    ),
}


def sources(lengths: list[int], device: str) -> Ragged:
    chance = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(4, VOCABULARY, (length,), generator=chance) for length in lengths]
    return Ragged.pack(rows).to(torch.device(device))


def requests_of(source: Ragged, config: GenerationConfig) -> list[Request]:
    return [Request(ids, config, i) for i, ids in enumerate(source.sequences())]


def outputs_of(engine: Engine, source: Ragged, config: GenerationConfig) -> list[list[Hypothesis]]:
    return [request.outputs or [] for request in engine.run(requests_of(source, config))]


def plain(model: Any, source: Ragged, config: GenerationConfig) -> list[list[Hypothesis]]:
    return outputs_of(Engine(model, use_graphs=False), source, config)


def captured(model: Any, source: Ragged, config: GenerationConfig) -> list[list[Hypothesis]]:
    return outputs_of(Engine(model, use_graphs=True), source, replace(config, dtype="float32"))


def assert_equal(theirs: list[list[Hypothesis]], ours: list[list[Hypothesis]]) -> None:
    assert [[h.tokens for h in rows] for rows in ours] == [[h.tokens for h in rows] for rows in theirs]
    assert [[h.finished for h in rows] for rows in ours] == [[h.finished for h in rows] for rows in theirs]
    for expected, actual in zip(theirs, ours, strict=True):
        for one, other in zip(expected, actual, strict=True):
            assert other.token_log_probs == pytest.approx(one.token_log_probs, abs=1e-4)
            assert sum(other.token_log_probs) == pytest.approx(other.score, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("case", STACKS.values(), ids=STACKS)
@torch.inference_mode()
def test_captured_steps_equal_the_plain_loop(case: Case, config: GenerationConfig, device: str) -> None:
    model = case.model().float().to(device)  # type: ignore[union-attr]
    for lengths in ([4, 2, 5], [1], [3, 3, 1, 6, 2]):  # the second has fewer rows than its bucket of another call
        source = sources(lengths, device)
        assert_equal(plain(model, source, config), captured(model, source, config))


@pytest.mark.skipif(not can_pack(), reason="this build of PyTorch has no oneDNN kernels")
@pytest.mark.parametrize("name", ["greedy", "beams with rules"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_copy_for_a_cpu_equals_the_model(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case.model().float()
    expected = [plain(model, sources(lengths, "cpu"), CONFIGS[name]) for lengths in ([4, 2, 5], [3])]
    for limit in ("_MIN_WEIGHTS", "_MIN_STEPS", "_MIN_LAYER_WEIGHTS"):
        monkeypatch.setattr(decoding_model, limit, 0)
    assert decoding_model.host_model(model, None, 1) is not model
    for lengths, outputs in zip(([4, 2, 5], [3]), expected, strict=True):
        assert_equal(outputs, plain(model, sources(lengths, "cpu"), CONFIGS[name]))


def alone(model: Any, requests: list[Request]) -> list[list[Hypothesis]]:
    """Generate for one request after the other."""
    copies = [Request(r.source, r.config, r.sample_id, stop_check=r.stop_check) for r in requests]
    return [next(Engine(model, use_graphs=False).run([copy])).outputs or [] for copy in copies]


def in_company(engine: Engine, requests: list[Request], seed: int) -> list[list[Hypothesis]]:
    """Submit the requests at random times between steps."""
    chance, waiting = random.Random(seed), list(requests)
    while waiting or not engine.is_idle:
        for _ in range(chance.choice([0, 0, 1, 2, 4])):
            if waiting:
                engine.submit(waiting.pop(0))
        engine.step()
    return [request.outputs or [] for request in requests]


def mixed_requests(device: str, count: int) -> list[Request]:
    """Requests of several searches, lengths and limits in random order."""
    chance = random.Random(count)
    source = sources([chance.randint(1, 6) for _ in range(count)], device)
    configs = [replace(CONFIGS[name], dtype="float32") for name in ("greedy", "beams with rules", "sampling")]
    return [
        Request(ids, replace(chance.choice(configs), max_new_tokens=chance.randint(1, 9), seed=i), i)
        for i, ids in enumerate(source.sequences())
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_do_not_depend_on_what_else_is_generated(case: Case, device: str) -> None:
    model = case.model().to(device)
    requests = mixed_requests(device, 18)
    expected = alone(model, requests)
    engine = Engine(model, max_tokens=128, use_graphs=False)  # small: requests wait, and rows are replaced
    assert_equal(expected, in_company(engine, requests, seed=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", STACKS.values(), ids=STACKS)
def test_captured_rows_are_replaced_without_an_effect_on_others(
    case: Case, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # small caches, so that slots are shifted and batches move to larger and smaller sessions
        monkeypatch.setattr(cuda_graphs, "_LENGTH_BUCKET", 16)
        monkeypatch.setattr(cuda_graphs, "_SHRINK", 2)
    model = case.model().float().to(device)
    requests = mixed_requests(device, 24)
    expected = alone(model, requests)
    engine = Engine(model, max_tokens=128, use_graphs=True)
    assert_equal(expected, in_company(engine, requests, seed=2))


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_slots_are_shifted_when_the_cache_is_full(name: str, num_beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_LENGTH_BUCKET", 20)
    monkeypatch.setattr(cuda_graphs, "STEPS_PER_GRAPH", 2)
    monkeypatch.setattr(cuda_graphs, "_ROW_BUCKETS", (8,))
    shifts: list[int] = []
    shift = cuda_graphs.GraphSession._shift
    monkeypatch.setattr(cuda_graphs.GraphSession, "_shift", lambda self, n: (shifts.append(n), shift(self, n)))
    model = STACKS[name].model().float()
    config = GenerationConfig(max_new_tokens=9, dtype="float32", num_beams=num_beams, suppress_tokens=(3,))
    requests = [Request(ids, config, i) for i, ids in enumerate(sources([1, 2, 6, 1, 5, 6, 2], "cpu").sequences())]
    expected = alone(model, requests)
    engine = Engine(model, use_graphs=True)
    for request in requests:  # one enters while the one before it is still there, so the slots are never reset
        engine.submit(request)
        engine.step()
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert_equal(expected, [request.outputs or [] for request in requests])
    assert shifts
    assert name == "t5" or min(shifts) < 0 < max(shifts)


@torch.no_grad()
def test_a_decoding_copy_follows_the_weights_of_its_model() -> None:
    model, config = next(iter(STACKS.values())).model().float(), CONFIGS["greedy"]
    source = sources([4, 2], "cpu")
    before = captured(model, source, config)
    for parameter in model.parameters():
        parameter.mul_(-1.5)
    assert_equal(plain(model, source, config), captured(model, source, config))
    assert captured(model, source, config) != before


@torch.no_grad()
def test_a_compiled_model_has_a_decoding_copy_of_its_own() -> None:
    """Compiled functions belong to the blocks of the model that they were made for."""
    model, config = STACKS["gpt2"].model().float(), CONFIGS["greedy"]
    source = sources([4, 2], "cpu")
    expected = plain(model, source, config)
    for block in model.decoder.blocks:  # type: ignore[union-attr]
        block.project_qkv = lambda x: pytest.fail(f"the copy called a function of its model with {x.dtype}")
    assert_equal(expected, captured(model, source, config))
