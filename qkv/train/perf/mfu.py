"""What the machine can do at best, and what training asks of it: the two sides of a share of the peak.

mfu = tokens a second x work a token / matrix peak. Chowdhery et al. 2022, appendix B, call it model FLOPs
utilisation; their peak is the maker's figure, ours is measured.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from qkv import spec
from qkv.analysis.cost import cost
from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.nn.block import Block
from qkv.nn.model import Model

_MIN_SAMPLES = 8  # at least; the best counts, for a disturbed sample says nothing of the machine


def matmul_peak_flops(device: torch.device | str, use_bf16: bool) -> float:
    """FLOP/s of a large matrix product, in bfloat16 if `use_bf16`; measured once a process and device, then remembered."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _cached_matmul_peak(device, use_bf16, torch.get_float32_matmul_precision())


@cache
def _cached_matmul_peak(device: torch.device, use_bf16: bool, _: str) -> float:
    return measure_matmul_peak(device, use_bf16)


def measure_matmul_peak(device: torch.device, use_bf16: bool, seconds: float = 0.15) -> float:
    """The same, measured anew over about so many seconds. On a CPU always in float32, as we train there."""
    on_gpu = device.type == "cuda"
    n, dtype = (8192 if use_bf16 else 4096, torch.bfloat16 if use_bf16 else torch.float32) if on_gpu else (1024, torch.float32)
    # a generator of its own: a run's random numbers must not depend on whether somebody measured
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    product()  # the first one loads libraries and takes memory
    start_time, seconds_per_call = time.perf_counter(), max(time_call(product, 1, device), 1e-6)
    repeats, best = max(1, int(seconds / _MIN_SAMPLES / seconds_per_call)), seconds_per_call
    while time.perf_counter() - start_time < seconds:
        best = min(best, time_call(product, repeats, device))
    return 2.0 * n**3 / best


def tune_malloc() -> None:
    """Lets the C library keep what is freed: otherwise large blocks go back to the system after each step on a CPU, and
    come again page by page, each zeroed on the way. Where there is no glibc nothing changes."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, 2**31 - 1)


# of glibc's malloc.h: how many blocks may be mappings of their own, and the bytes that are kept at a heap's end
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1


def time_call(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds a call. A GPU works behind the host's back, so its own clock is asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3 / repeats
    start_time = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start_time) / repeats


def flops_per_token(
    model: spec.Model, *, source_length: float = 0, target_length: float = 0, logits_fraction: float = 1.0
) -> float:
    """FLOPs that training needs a token: 6 a weight that multiplies it, and attention's at these lengths.

    Tokens are all that are read, source and target. Sequences of many lengths n cost what those of sum(n²) / sum(n)
    tokens do. `logits_fraction`: the share of tokens whose logits are worked out, such as the 0.15 that are masked. Attention is
    counted whole, also where a causal mask hides half of it, as is the custom.
    """
    m, n = (max(1, round(length)) if length else 0 for length in (source_length, target_length))

    def training(variant: spec.Model) -> int:
        return cost(variant, source_length=m, target_length=n).training_flops

    flops = float(training(model))
    if logits_fraction != 1 and model.head is not None and model.head.is_token_level:
        without_aux_head = spec.replace(model, aux_head=None)
        flops -= (1 - logits_fraction) * (training(without_aux_head) - training(spec.replace(without_aux_head, head=None)))
    tokens = (m if model.encoder is not None else 0) + (n if model.decoder is not None else 0)
    return flops / tokens


def flops_per_token_of_batch(model: spec.Model, inputs: Sequence[Any]) -> float:
    """The same at the lengths of a part of a batch, and for the logits that it asks for."""
    lengths = [field.layout.lengths_list for field in inputs if isinstance(field, Ragged)]
    mean_lengths = [sum(n * n for n in side_lengths) / sum(side_lengths) for side_lengths in lengths]
    # a task's text is read by both sides of an encoder-decoder, and stands in the part once
    source = mean_lengths[0] if model.encoder is not None else 0.0
    target = mean_lengths[-1] if model.decoder is not None else 0.0
    logits_fraction = inputs.num_targets[0] / sum(lengths[-1]) if model.decoder is None else 1.0  # type: ignore[attr-defined]
    return flops_per_token(model, source_length=source, target_length=target, logits_fraction=min(logits_fraction, 1.0))


def trained_fraction(model: Model) -> float:
    """The share of training's work, a pass forward and two back, that is done where the body stays as it is: nothing
    goes back through one without adapters, and those need the gradient of what went in, not of its weights."""
    return 1 / 3 if model.backbone_frozen else 1.0 if model.spec.lora is None else 2 / 3


def compile_blocks(model: torch.nn.Module, use_bf16: bool) -> None:
    """Compiles blocks: whole where the looking is one fused kernel, as on a GPU in half precision, else in parts."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    if not blocks:
        raise InputError("train.compile: this model has no Transformer blocks to compile; leave it out")
    import torch._dynamo.config  # takes a while

    # training and scoring, batches of one length and of many: each gets kernels of its own
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    for block in blocks:
        if use_bf16:
            block.compile_forward()
        else:
            block.compile_sublayers()


_RECOMPILE_LIMIT = 32
