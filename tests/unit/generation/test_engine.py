"""The engine as a server uses it: tokens while they are made, stop strings, cancellation, bounds, reused sources."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from writers import sources, tiny

from qkv.errors import InputError
from qkv.generation import Engine, GenerationConfig, Request
from qkv.generation.engine import _Lane

GREEDY = GenerationConfig(max_new_tokens=12, suppress_tokens=(3,))  # no EOS: 12 tokens


def requests_of(count: int, config: GenerationConfig = GREEDY, **settings: Any) -> list[Request]:
    ids = sources(*[1 + i % 5 for i in range(count)]).sequences()
    return [Request(row, config, i, **settings) for i, row in enumerate(ids)]


def outputs(engine: Engine, requests: list[Request]) -> list[Any]:
    return [request.outputs for request in engine.run(requests)]


@pytest.mark.parametrize("use_graphs", [False, True])
def test_the_tokens_of_a_stream_grow_to_those_of_its_output(use_graphs: bool) -> None:
    engine = Engine(tiny("transformer"), use_graphs=use_graphs)
    [request] = requests_of(1, replace(GREEDY, dtype="float32"), streams=True)
    engine.submit(request)
    seen: list[list[int]] = []
    while not request.is_done:
        engine.step()
        seen.append(list(request.tokens))
    assert all(after[: len(before)] == before for before, after in pairwise(seen))
    assert len(seen) > 1
    assert request.outputs is not None
    assert seen[-1] == request.outputs[0].tokens


@pytest.mark.parametrize("config", [GREEDY, replace(GREEDY, do_sample=True, n_best=3)])
def test_an_output_ends_at_a_stop_string_between_captured_steps_as_between_plain_ones(config: GenerationConfig) -> None:
    def has_pair(sequences: list[list[int]]) -> list[bool]:
        return [any(a > 6 and b < 6 for a, b in pairwise(row)) for row in sequences]

    config, model = replace(config, dtype="float32"), tiny("transformer", seed=4)
    plain, captured = (
        outputs(Engine(model, use_graphs=use_graphs), requests_of(6, config, stop_check=has_pair))
        for use_graphs in (False, True)
    )
    assert [[h.tokens for h in row] for row in captured] == [[h.tokens for h in row] for row in plain]
    assert [[h.finished for h in row] for row in captured] == [[h.finished for h in row] for row in plain]
    lengths = {len(h.tokens) for row in plain for h in row}
    assert len(lengths) > 1
    assert all(not has_pair([h.tokens[:-1]])[0] for row in plain for h in row)


@pytest.mark.parametrize("use_graphs", [False, True])
def test_a_canceled_request_frees_its_row_and_leaves_the_others_alone(use_graphs: bool) -> None:
    config, model = replace(GREEDY, dtype="float32"), tiny("transformer")
    expected = outputs(Engine(model, use_graphs=False), requests_of(4, config))
    requests = requests_of(4, config)
    engine = Engine(model, use_graphs=use_graphs)
    for request in requests[:3]:
        engine.submit(request)
    engine.step()
    engine.cancel(requests[1])
    engine.submit(requests[3])
    engine.cancel(requests[3])  # while it waits
    while not engine.is_idle:
        engine.step()
    tokens = [request.outputs and request.outputs[0].tokens for request in requests]
    assert tokens == [expected[0][0].tokens, None, expected[2][0].tokens, None]
    assert all(request.is_done for request in requests)


def test_a_batch_is_bounded_and_requests_enter_when_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    place = _Lane._place

    def watch(lane: _Lane, admitted: list[Request]) -> None:
        place(lane, admitted)
        sizes.append(len(lane._slots))

    monkeypatch.setattr(_Lane, "_place", watch)
    config = replace(GREEDY, suppress_tokens=())
    requests = requests_of(40, config)
    engine = Engine(tiny("transformer", seed=3), max_tokens=80)
    assert [request.sample_id for request in engine.run(requests)] == list(range(40))  # in order
    assert max(sizes) == 5
    assert len(sizes) > 10


def test_a_stream_of_requests_is_read_in_windows_of_bounded_size() -> None:
    num_read = num_written = most = 0

    def read() -> Any:
        nonlocal num_read
        for request in requests_of(200, replace(GREEDY, max_new_tokens=2)):
            num_read += 1
            yield request

    for _ in Engine(tiny("transformer"), max_tokens=40).run(read(), windows=(4, 16)):
        num_written += 1
        most = max(most, num_read - num_written)
    assert num_written == 200
    assert most <= 3 * 16


@pytest.mark.parametrize("family", ["rnn", "transformer"])
def test_an_encoded_source_gives_the_outputs_of_its_text_for_every_search(family: str) -> None:
    model = tiny(family)
    engine, ids = Engine(model), sources(3, 5, 1).sequences()
    encoded = engine.encode(ids, GREEDY)
    calls: list[Any] = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    for config in (GREEDY, replace(GREEDY, num_beams=3, n_best=3), replace(GREEDY, do_sample=True, seed=2)):
        reused = outputs(Engine(model), [Request(source, config, i) for i, source in enumerate(encoded)])
        assert not calls
        again = outputs(Engine(model), [Request(row, config, i) for i, row in enumerate(ids)])
        assert [[h.tokens for h in row] for row in reused] == [[h.tokens for h in row] for row in again]
        assert calls
        calls.clear()


def test_bad_requests_are_refused_when_they_are_submitted() -> None:
    engine = Engine(tiny("transformer"))
    for request, message in (
        (Request(torch.tensor([], dtype=torch.long), GREEDY), "the source is empty"),
        (Request(torch.tensor([4]), replace(GREEDY, num_beams=2), streams=True), "one output that only grows"),
        (Request(torch.tensor([4]), replace(GREEDY, num_beams=0)), "num_beams must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            engine.submit(request)
    assert engine.is_idle


def test_settings_that_the_vocabulary_does_not_have_stop_only_their_own_requests() -> None:
    engine = Engine(tiny("transformer"))
    good, bad = requests_of(1)[0], requests_of(1, replace(GREEDY, suppress_tokens=(99,)))[0]
    engine.submit(good)
    engine.submit(bad)
    with pytest.raises(InputError, match="token 99 is not in the vocabulary"):
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert good.outputs is not None
    assert bad.is_canceled
