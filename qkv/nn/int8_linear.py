"""Linear layers with int8 weights for decoding on a CPU.

A weight is quantized per output channel, symmetrically; the inputs of a product per row while it is computed, so that
no row depends on the others of its batch. Which kernel is used is decided once per process: all that this machine has
are timed, and one that does not compute what float32 arithmetic computes from the same numbers is refused, such as
8-bit kernels that saturate on processors without VNNI instructions.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

_LARGEST = 127  # symmetric: -128 is not used
_TINY = 1e-30  # largest value of a row of zeros
_MAX_ERROR = 0.04  # of a product relative to its largest value; saturated sums are wrong by a half
_FEWER_BITS = " 7 bits"
_PROBE_ROWS = 16  # rows of a batch


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as int8 values and one scale per output channel, the form that is portable between kernels."""

    values: Tensor  # [out, in] int8
    scales: Tensor  # [out] float32

    def dequantize(self) -> Tensor:
        """Return the weight in float32.  # [out, in]"""
        return self.values.float() * self.scales[:, None]

    @cached_property
    def packed_for_fbgemm(self) -> Any:
        """The form of FBGEMM's kernels."""
        zero_points = torch.zeros(len(self.scales), dtype=torch.long)
        engine, torch.backends.quantized.engine = torch.backends.quantized.engine, "fbgemm"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecated; the other kernels take over when it is removed
                quantized = torch._make_per_channel_quantized_tensor(
                    self.values, self.scales.double(), zero_points, axis=0
                )
            return torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = engine


Product = Callable[[Tensor], Tensor]  # [R, in] -> [R, out]
Prepare = Callable[[QuantizedWeight, "Tensor | None"], Product]  # from a weight and a bias [out]


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Quantize each output channel by its largest absolute value.  # [out, in]"""
    scales = weight.abs().amax(1).clamp_(min=_TINY).div_(_LARGEST)  # [out]
    return QuantizedWeight((weight / scales[:, None]).round_().to(torch.int8), scales)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _fbgemm(bits: int) -> Prepare:
    """Return FBGEMM's kernel with inputs of 8 bits, or of 7 for processors whose 16-bit sums saturate otherwise."""
    levels = 2 ** (bits - 1)
    input_scale, zero_point = 1 / (levels - 1), levels

    def prepare(weight: QuantizedWeight, bias: Tensor | None) -> Product:
        packed = weight.packed_for_fbgemm
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

        def product(x: Tensor) -> Tensor:
            row_scales = x.abs().amax(-1, keepdim=True).clamp_(min=_TINY)  # [R, 1]
            out: Tensor = multiply(x / row_scales, input_scale, zero_point, packed)
            return out.mul_(row_scales) if bias is None else torch.addcmul(bias, out, row_scales, out=out)

        return product

    return prepare


def _fbgemm_dynamic(bits: int) -> Prepare:
    """Return FBGEMM's kernel that quantizes all rows alike, in one call: for a single row."""

    def prepare(weight: QuantizedWeight, bias: Tensor | None) -> Product:
        packed, multiply = weight.packed_for_fbgemm, torch.ops.quantized.linear_dynamic

        def product(x: Tensor) -> Tensor:
            out: Tensor = multiply(x, packed, bits < 8)
            return out if bias is None else out.add_(bias)

        return product

    return prepare


def _integer_product(weight: QuantizedWeight, bias: Tensor | None) -> Product:
    """Return oneDNN's product of int8 matrices, which needs VNNI."""
    transposed, scales = weight.values.t(), weight.scales

    def product(x: Tensor) -> Tensor:
        row_scales = x.abs().amax(-1, keepdim=True).clamp_(min=_TINY).div_(_LARGEST)  # [R, 1]
        out = torch._int_mm((x / row_scales).round_().to(torch.int8), transposed) * scales
        return out.mul_(row_scales) if bias is None else torch.addcmul(bias, out, row_scales, out=out)

    return product


def _weight_only(weight: QuantizedWeight, bias: Tensor | None) -> Product:
    """Return the product of float32 inputs and int8 weights, which reads a quarter of the bytes of float32 weights."""

    def product(x: Tensor) -> Tensor:
        out = torch._weight_int8pack_mm(x.contiguous(), weight.values, weight.scales)
        return out if bias is None else out.add_(bias)

    return product


KERNELS: dict[str, Prepare] = {
    "fbgemm": _fbgemm(8),
    f"fbgemm{_FEWER_BITS}": _fbgemm(7),
    "int_mm": _integer_product,
    "weight_int8pack_mm": _weight_only,
}
ONE_ROW_KERNELS: dict[str, Prepare] = {
    "fbgemm dynamic": _fbgemm_dynamic(8),
    f"fbgemm dynamic{_FEWER_BITS}": _fbgemm_dynamic(7),
}


# ---- choice of the kernel --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of this machine for one row and for more; None if all are missing or wrong, with the reasons."""

    one_row: str | None
    more_rows: str | None
    errors: dict[str, str]


@cache
def choose_kernels() -> KernelChoice:
    """Time all kernels on this machine and return the fastest correct ones."""
    errors: dict[str, str] = {}
    more_rows = _fastest_kernel(KERNELS, _PROBE_ROWS, errors)
    one_row = None if more_rows is None else _fastest_kernel(KERNELS | ONE_ROW_KERNELS, 1, errors)
    return KernelChoice(one_row, more_rows, errors)


def _fastest_kernel(kernels: dict[str, Prepare], num_rows: int, errors: dict[str, str]) -> str | None:
    """Return the fastest kernel that is correct; add to `errors` why others are not used."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = quantize_weight(torch.randn(768, 1024, generator=generator)), torch.randn(768, generator=generator)
    x = torch.randn(num_rows, 1024, generator=generator)
    # extreme values, whose sums of pairs do not fit into 16 bits
    extreme = QuantizedWeight(torch.full((768, 1024), _LARGEST, dtype=torch.int8), torch.ones(768))
    seconds: dict[str, float] = {}
    for name, prepare in kernels.items():
        if name.removesuffix(_FEWER_BITS) in seconds:  # less exact, and not faster
            continue
        try:
            product = prepare(weight, bias)
            pairs = [(product(x), x @ weight.dequantize().t() + bias)]
            pairs += [(prepare(extreme, None)(y), y @ extreme.dequantize().t()) for y in (torch.ones_like(x), x.abs())]
            error = max(float((out - ref).abs().max() / ref.abs().max()) for out, ref in pairs)
            if error < _MAX_ERROR:  # NaN is wrong too
                seconds[name] = min(_timed(product, x) for _ in range(3))
            else:
                errors[name] = f"wrong by {error:.0%}"
        except Exception as failure:  # a kernel that this build lacks fails in its own way
            errors[name] = f"not available ({str(failure).splitlines()[0][:60]})"
    return min(seconds, key=lambda name: seconds[name], default=None)


def _timed(product: Product, x: Tensor) -> float:
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight, for inference only.

    Its state is the portable form, int8 values and float32 scales; the kernels' own form is made from it.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, choice: KernelChoice) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = quantize_weight(linear.weight.detach().float())
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales)
        bias = None if linear.bias is None else linear.bias.detach().float()
        assert choice.one_row is not None
        assert choice.more_rows is not None
        self.more_rows = KERNELS[choice.more_rows](weight, bias)
        is_same = choice.one_row == choice.more_rows
        self.one_row = self.more_rows if is_same else (KERNELS | ONE_ROW_KERNELS)[choice.one_row](weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out]"""
        return self.one_row(x) if len(x) == 1 else self.more_rows(x)
