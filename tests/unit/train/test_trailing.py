"""The moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from qkv import spec
from qkv.checkpoints.state import unique_state_dict
from qkv.errors import InputError
from qkv.families import get_family
from qkv.nn import Ragged, build
from qkv.train.ema import EMA

TOKENS = Ragged.from_lengths(torch.arange(7), [3, 4])


def tiny(**fields: Any) -> Any:
    module = get_family("gpt2")
    return build(
        module.make_spec(module.Config(d_model=8, heads=2, layers=1, max_length=16, **fields), target_vocab_size=11)
    ).eval()


def move(model: torch.nn.Module) -> None:
    """A step of training, as far as the average sees one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_the_average_is_that_of_its_formula() -> None:
    model = tiny()
    trailing, expected = EMA(model, 0.9), {name: t.detach().double() for name, t in unique_state_dict(model).items()}
    for _ in range(5):
        move(model)
        trailing.update(model)
        expected = {
            name: 0.9 * expected[name] + 0.1 * t.detach().double() for name, t in unique_state_dict(model).items()
        }
    found = {name: tensor.double() for name, tensor in trailing.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_without_decay_it_is_the_weights_themselves() -> None:
    model = tiny()
    trailing = EMA(model, 0.0)
    move(model)
    trailing.update(model)
    assert all(torch.equal(tensor, unique_state_dict(model)[name]) for name, tensor in trailing.state_dict().items())


def test_tied_weights_are_averaged_once_under_the_name_that_checkpoints_hold() -> None:
    model = tiny()
    assert model.head.linear.weight is model.target_embedding.tokens.weight
    assert EMA(model, 0.9).state_dict().keys() == unique_state_dict(model).keys()
    assert "head.linear.weight" not in unique_state_dict(model)


def test_training_does_not_move_the_average() -> None:
    model = tiny()
    before = {name: tensor.detach().clone() for name, tensor in unique_state_dict(model).items()}
    trailing = EMA(model, 0.9)
    move(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trailing.state_dict().items())


def test_averaged_weights_stand_in_for_a_while_and_the_trained_ones_come_back_to_the_bit() -> None:
    model = tiny()
    trailing, begun = EMA(model, 0.9), model(TOKENS)
    move(model)
    parameters, trained, said = (
        list(model.parameters()),
        [p.detach().clone() for p in model.parameters()],
        model(TOKENS),
    )
    with trailing.applied_to(model):
        assert torch.equal(model(TOKENS), begun)
        assert model.head.linear.weight is model.target_embedding.tokens.weight
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))  # an optimiser holds them
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained, strict=True))
    assert torch.equal(model(TOKENS), said)


def test_the_trained_weights_come_back_after_a_failure_too() -> None:
    model = tiny()
    trailing = EMA(model, 0.9)
    move(model)
    trained = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt), trailing.applied_to(model):
        raise KeyboardInterrupt
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained, strict=True))


def test_gradients_outlive_a_validation() -> None:
    model = tiny()
    model(TOKENS).sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    with EMA(model, 0.5).applied_to(model), torch.no_grad():
        model(TOKENS)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


def test_a_model_in_half_precision_is_averaged_in_float32() -> None:
    """In bfloat16 a thousandth of a change of this size would be rounded away."""
    model = tiny().bfloat16()
    with torch.no_grad():
        model.decoder.norm.weight.fill_(1.0)
    trailing = EMA(model, 0.999)
    with torch.no_grad():
        model.decoder.norm.weight.fill_(1.5)
    trailing.update(model)
    found = trailing.state_dict()["decoder.norm.weight"]
    torch.testing.assert_close(found, torch.full((8,), 1.0005))
    with trailing.applied_to(model):
        assert model.decoder.norm.weight.dtype == torch.bfloat16


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_sharded_model_computes_with_what_stands_in_and_then_with_its_own_again() -> None:
    """A sharded model keeps what it gathered for a forward pass, and must not go on with that."""
    plain, sharded = tiny(), tiny()
    sharded.load_state_dict(plain.state_dict())
    for part in (*sharded.decoder.blocks, sharded):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    averages = EMA(plain, 0.5), EMA(sharded, 0.5)
    for model, trailing in zip((plain, sharded), averages, strict=True):
        model(TOKENS)  # gathered
        for tensor in unique_state_dict(model).values():
            tensor.detach().mul_(1.5)
        trailing.update(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(sharded(TOKENS), plain(TOKENS))
            with averages[0].applied_to(plain), averages[1].applied_to(sharded):
                assert torch.equal(sharded(TOKENS), plain(TOKENS))


def test_what_was_saved_goes_on_to_the_bit() -> None:
    model = tiny()
    trailing = EMA(model, 0.9)
    move(model)
    trailing.update(model)
    again = EMA(model, 0.9)
    again.load_state_dict({name: tensor.clone() for name, tensor in trailing.state_dict().items()})
    move(model)
    trailing.update(model)
    again.update(model)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in trailing.state_dict().items())


def test_another_models_averages_are_refused_and_nothing_is_taken_from_them() -> None:
    trailing, other = EMA(tiny(), 0.9), EMA(tiny(), 0.9).state_dict()
    before = {name: tensor.clone() for name, tensor in trailing.state_dict().items()}
    with pytest.raises(InputError, match=r"'decoder\.blocks\.1\..* is not in both models"):
        trailing.load_state_dict(EMA(build(deeper(tiny().spec)), 0.9).state_dict())
    with pytest.raises(InputError, match=r"'decoder.norm.bias' is \[9\], and the model's is \[8\]"):
        trailing.load_state_dict(other | {"decoder.norm.bias": torch.zeros(9)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in trailing.state_dict().items())


def deeper(s: spec.Model) -> spec.Model:
    return spec.replace(s, decoder=spec.replace(s.decoder, num_layers=2))


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, float("nan")])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(InputError, match="at least 0 and below 1"):
        EMA(tiny(), decay)


def test_random_weights_are_soon_forgotten():
    model = torch.nn.Linear(3, 3)
    trailing = EMA(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for step in range(1, 101):
        trailing.update(model, step)
    assert (trailing.state_dict()["weight"] - 1.0).abs().max() < 1e-4
