"""Activations that are worked out again instead of kept change no number, whatever the family (Chen et al. 2016)."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from tiny import CASES, Batch, Case, outputs, with_stack
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from qkv.errors import InputError
from qkv.nn import build
from qkv.nn.attention import Attention
from qkv.nn.block import Block
from qkv.nn.stack import Stack, enable_activation_checkpointing

BATCH = Batch.random([5, 1, 7, 3], [4, 6, 2, 1])
COMPILED = ["t5"]  # it has every part: both stacks, cross-attention, distances


def dropping(part: Any) -> Any:
    """The same with dropout wherever it can be."""
    if not is_dataclass(part):
        return part
    changed = {f.name: 0.3 if f.name == "dropout" else dropping(getattr(part, f.name)) for f in fields(part)}
    return replace(part, **changed)


def in_training(case: Case) -> Any:
    torch.manual_seed(1)
    return build(dropping(case.spec())).train()


def once(model: Any) -> tuple[list[Tensor], dict[str, Tensor | None], Tensor]:
    """Outputs, gradients, and where the random numbers stand afterwards."""
    torch.manual_seed(2)
    model.zero_grad()
    outs = outputs(model, BATCH)
    sum((out * (1 + out).cos()).sum() for out in outs).backward()
    return outs, {name: p.grad for name, p in model.named_parameters()}, torch.get_rng_state()


def assert_same(model: Any) -> None:
    outs, gradients, place = once(model)
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    enable_activation_checkpointing(model)
    again, others, there = once(model)
    assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True))
    wrong = [n for n, g in gradients.items() if (g is None) != (others[n] is None)]
    wrong += [n for n, g in gradients.items() if g is not None and not torch.equal(g, others[n])]
    assert not wrong
    assert torch.equal(place, there)


def law(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cases.items()])


@law(with_stack())
def test_outputs_and_gradients_are_equal_to_the_bit_with_dropout_on(case: Case) -> None:
    model = in_training(case)
    assert not torch.equal(outputs(model, BATCH)[0], outputs(model, BATCH)[0]), "nothing was dropped"
    assert_same(model)


@law({name: CASES[name] for name in COMPILED})
def test_the_same_holds_where_blocks_are_compiled_in_parts(case: Case) -> None:
    model = in_training(case)
    for block in model.modules():
        if isinstance(block, Block):
            block.compile_sublayers()
    assert_same(model)


def kept_bytes(model: Any) -> int:
    """What the backward pass waits for, each piece of memory once; parameters are there anyway."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        held = outputs(model, BATCH)  # memory that was given back could be counted twice
    assert held
    return sum(kept.values())


@law(with_stack())
def test_fewer_bytes_wait_for_the_backward_pass(case: Case) -> None:
    model = in_training(case)
    all_kept = kept_bytes(model)
    enable_activation_checkpointing(model)
    few_kept = kept_bytes(model)
    assert 0 < few_kept < 0.75 * all_kept
    enable_activation_checkpointing(model, enabled=False)
    assert kept_bytes(model) == all_kept


@law({name: case for name, case in CASES.items() if name not in with_stack()})
def test_a_model_without_blocks_is_refused(case: Case) -> None:
    with pytest.raises(InputError, match="no Transformer blocks"):
        enable_activation_checkpointing(in_training(case))


def test_who_watches_is_told_once() -> None:
    model, seen = in_training(CASES["bert"]), []
    enable_activation_checkpointing(model)
    for module in model.modules():
        if isinstance(module, Attention):
            module.hook = lambda weights, *_: seen.append(weights)
    once(model)
    assert len(seen) == sum(isinstance(m, Attention) for m in model.modules())


def test_nothing_is_worked_out_again_without_gradients_or_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_training(CASES["bert"])
    enable_activation_checkpointing(model)
    monkeypatch.setattr(Stack, "_checkpointed", lambda *_: pytest.fail("a block forgot"))
    with torch.no_grad():
        outputs(model, BATCH)
    outputs(model.eval(), BATCH)
    with pytest.raises(pytest.fail.Exception, match="a block forgot"):
        outputs(model.train(), BATCH)
