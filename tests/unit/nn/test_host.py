"""Decoding on a CPU: packed and int8 linear layers, and choices among a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qkv.nn import host_ops, int8_linear
from qkv.nn.int8_linear import Int8Linear, QuantizedWeight, choose_kernels, quantize_weight
from qkv.nn.packed_linear import PackedLinear, can_pack

needs_packing = pytest.mark.skipif(not can_pack(), reason="this build of PyTorch has no oneDNN kernels")


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    choose_kernels.cache_clear()
    yield
    choose_kernels.cache_clear()


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 40])
@torch.inference_mode()
def test_a_packed_layer_computes_what_the_plain_one_computes(num_rows: int, bias: bool) -> None:
    linear = nn.Linear(70, 90, bias=bias)
    packed, x, residual = PackedLinear(linear), torch.randn(num_rows, 70), torch.randn(num_rows, 90)
    for _ in range(2):  # before and after the layout is chosen
        torch.testing.assert_close(packed(x), linear(x))
        torch.testing.assert_close(packed.forward_add(x, residual), linear(x) + residual)
        expected = F.gelu(linear(x), approximate="tanh")
        torch.testing.assert_close(packed.forward_activation(x, "gelu_tanh"), expected, atol=1e-5, rtol=1e-5)
        packed.pack()


@pytest.mark.parametrize("name", [*int8_linear.KERNELS, *int8_linear.ONE_ROW_KERNELS])
@torch.inference_mode()
def test_an_int8_kernel_is_close_to_float32_or_refused(name: str) -> None:
    choice = choose_kernels()
    if name in choice.errors:
        pytest.skip(f"this machine: {choice.errors[name]}")
    linear = nn.Linear(256, 96)
    num_rows = 5 if name in int8_linear.KERNELS else 1
    x = torch.randn(num_rows, 256)
    product = (int8_linear.KERNELS | int8_linear.ONE_ROW_KERNELS)[name](quantize_weight(linear.weight), linear.bias)
    error = (product(x) - linear(x)).abs().max() / linear(x).abs().max()
    assert error < 0.03


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others_in_int8() -> None:
    layer = Int8Linear(nn.Linear(64, 48), choose_kernels())
    x = torch.randn(4, 64)
    outlier = torch.cat([x[:3], 1000 * x[3:]])
    assert torch.equal(layer(x)[:3], layer(outlier)[:3])


@torch.inference_mode()
def test_a_row_of_zeros_gives_the_bias_in_int8() -> None:
    linear = nn.Linear(64, 48)
    layer = Int8Linear(linear, choose_kernels())
    for num_rows in (1, 3):
        torch.testing.assert_close(layer(torch.zeros(num_rows, 64)), linear.bias.expand(num_rows, -1))


def test_the_state_of_an_int8_layer_is_portable() -> None:
    linear = nn.Linear(32, 16)
    state = Int8Linear(linear, choose_kernels()).state_dict()
    assert {name: x.dtype for name, x in state.items()} == {"values": torch.int8, "scales": torch.float32}
    weight = QuantizedWeight(state["values"], state["scales"]).dequantize()
    assert float((weight - linear.weight).abs().max().detach()) <= float(state["scales"].max()) / 2 + 1e-7


def test_a_kernel_that_computes_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(weight: QuantizedWeight, bias: torch.Tensor | None) -> int8_linear.Product:
        return lambda x: (F.linear(x, weight.dequantize(), bias)).clamp(max=1000.0)

    def missing(*_: object) -> int8_linear.Product:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(int8_linear, "KERNELS", {"saturating": saturating, "missing": missing})
    choice = choose_kernels()
    assert choice.more_rows is None
    assert choice.errors["saturating"].startswith("wrong by")
    assert choice.errors["missing"] == "not available (no such operator)"


@pytest.mark.parametrize("num_columns", [7, 2048, 2049, 5000])
def test_choices_by_blocks_equal_those_of_pytorch(num_columns: int) -> None:
    x = torch.randn(6, num_columns)
    x[1, -1], x[2, 0], x[3] = 9.0, 9.0, float("-inf")
    x[3, 5] = 0.0
    x[4, 3] = x[4, num_columns - 1] = 8.0  # equal values: the first one counts
    assert torch.equal(host_ops.argmax(x), x.argmax(-1))
    values, indices = host_ops.top_values(x, 4)
    assert torch.equal(values, x.topk(4, -1).values)
    assert torch.equal(x.gather(1, indices), values)
