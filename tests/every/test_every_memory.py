"""One law, every model with memory: a text that is read in segments gives what it gives as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CASES, VOCABULARY, Case
from torch import Tensor

from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.nn.memory import Memory

LENGTHS = [7, 3, 5]
TEXTS = [torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
WITH_MEMORY = {
    name: case
    for name, case in CASES.items()
    if case.spec().has_memory and (case.spec().head is None or case.spec().head.is_token_level)
}
CAUSAL = {name: case for name, case in WITH_MEMORY.items() if case.spec().encoder is None}


def law(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cases.items()])


def read(model: Any, texts: list[Tensor], memory: Memory) -> tuple[list[Tensor], Memory]:
    source = Ragged.pack(texts)
    output, memory = model.forward_with_memory(source, memory)
    return source.with_values(output).sequences(), memory


def read_in_segments(model: Any, texts: list[Tensor], edges: list[int]) -> tuple[list[Tensor], Memory]:
    """Read each text in segments that end at the edges; texts that are over keep their memory."""
    memory, outputs = model.initial_memory(len(texts)), [[] for _ in texts]
    for begin, end in zip([0, *edges], [*edges, 99], strict=True):
        rows = [row for row, text in enumerate(texts) if len(text) > begin]
        if not rows or end <= begin:
            continue
        segments, after = read(model, [texts[row][begin:end] for row in rows], memory.select(torch.tensor(rows)))
        for row, segment in zip(rows, segments, strict=True):
            outputs[row].append(segment)
        all_rows = [rows.index(row) + len(texts) if row in rows else row for row in range(len(texts))]
        memory = Memory.concat([memory, after]).select(torch.tensor(all_rows))
    return [torch.cat(segments) for segments in outputs], memory


@law(CAUSAL)
@settings(max_examples=5, deadline=None)
@given(edges=st.lists(st.integers(1, 6), max_size=3, unique=True).map(sorted))
@torch.no_grad()
def test_segments_of_any_sizes_give_the_output_of_the_whole_text(case: Case, edges: list[int]) -> None:
    model = case.model()
    whole, _ = read(model, TEXTS, model.initial_memory(len(TEXTS)))
    torch.testing.assert_close(read_in_segments(model, TEXTS, edges)[0], whole)


@law(WITH_MEMORY)
@torch.no_grad()
def test_an_empty_memory_gives_the_output_of_the_forward_pass(case: Case) -> None:
    model = case.model()
    source = Ragged.pack(TEXTS)
    output, _ = model.forward_with_memory(source, model.initial_memory(len(TEXTS)))
    torch.testing.assert_close(output, model(source))


@law(WITH_MEMORY)
@torch.no_grad()
def test_a_memory_that_was_saved_continues_to_the_bit(case: Case, tmp_path: Path) -> None:
    model = case.model().float()
    _, memory = read(model, TEXTS, model.initial_memory(len(TEXTS)))
    save_tensors(tmp_path / "memory.safetensors", memory.to_state_dict())
    stored = load_tensors(tmp_path / "memory.safetensors")[0]
    loaded = Memory.from_state_dict(stored, model.initial_memory(len(TEXTS)))
    expected, after = read(model, TEXTS[::-1], memory)
    outputs, loaded_after = read(model, TEXTS[::-1], loaded)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert all(torch.equal(loaded_after[name], tensor) for name, tensor in after.tensors.items())


@law(WITH_MEMORY)
@torch.no_grad()
def test_a_text_whose_memory_was_reset_is_read_from_its_beginning(case: Case) -> None:
    model = case.model()
    _, memory = read(model, TEXTS, model.initial_memory(len(TEXTS)))
    fresh, _ = read(model, TEXTS, model.initial_memory(len(TEXTS)))
    continued, _ = read(model, TEXTS, memory)
    outputs, _ = read(model, TEXTS, memory.reset(torch.tensor([False, True, False])))
    torch.testing.assert_close(outputs, [continued[0], fresh[1], continued[2]])
    assert not torch.allclose(continued[1], fresh[1])


@law(WITH_MEMORY)
def test_no_gradient_flows_into_a_detached_memory(case: Case) -> None:
    model = case.model()
    _, memory = read(model, TEXTS, model.initial_memory(len(TEXTS)))
    assert any(tensor.requires_grad for tensor in memory.tensors.values())
    assert not any(tensor.requires_grad for tensor in memory.detach().tensors.values())


def test_models_without_memory_say_so() -> None:
    model = CASES["gpt2"].model()
    assert not model.has_memory
    with pytest.raises(InputError, match="no memory"):
        model.initial_memory(1)


@law(WITH_MEMORY)
@torch.no_grad()
def test_a_memory_of_other_streams_than_the_batch_has_is_refused_in_one_line(case: Case) -> None:
    model = case.model()
    with pytest.raises(InputError, match="the batch has 1 sequences, and the memory 2 streams"):
        model.forward_with_memory(Ragged.pack(TEXTS[:1]), model.initial_memory(2))
