"""Model FLOPs utilization (MFU) and settings that make training fast.

MFU = tokens per second · FLOPs per token / peak FLOP/s (Chowdhery et al. 2022, appendix B). The peak is the
manufacturer's number for dense matrix products. There is none for a CPU, and a measured one is only right on a machine
that nobody else uses, so that MFU is left out for CPUs and unknown GPUs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from qkv import spec
from qkv.analysis.cost import cost
from qkv.analysis.flops import attended_memory
from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.nn.block import Block
from qkv.nn.model import Model

_MIN_SAMPLES = 8  # minimum number of timings; the fastest counts, because disturbances only slow down


# TFLOP/s of dense matrix products in bf16, TF32 and float32, by the manufacturer's data sheets; longer names first
_PEAK_TFLOPS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("H100 PCIe", (756.0, 378.0, 51.0)),
    ("H200", (989.0, 494.5, 67.0)),
    ("H100", (989.0, 494.5, 67.0)),
    ("A100", (312.0, 156.0, 19.5)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("A10G", (70.0, 35.0, 35.0)),
    ("A10", (125.0, 62.5, 31.2)),
    ("L4", (121.0, 60.0, 30.3)),
)


def peak_flops(device: torch.device, use_bf16: bool) -> float | None:
    """Return the peak FLOP/s of a GPU in the precision of a run; None for a CPU or a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    return named_peak_flops(torch.cuda.get_device_name(device), use_bf16, torch.get_float32_matmul_precision())


def named_peak_flops(name: str, use_bf16: bool, float32_precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU by its name, such as "NVIDIA H200"."""
    words = f" {name.replace('-', ' ')} "
    for gpu, (bf16, tf32, float32) in _PEAK_TFLOPS:
        if f" {gpu} " in words:
            return 1e12 * (bf16 if use_bf16 else float32 if float32_precision == "highest" else tf32)
    return None


def measure_matmul_peak(device: torch.device, use_bf16: bool, seconds: float = 0.15) -> float:
    """Measure the FLOP/s of a large matrix product for about `seconds`, for benchmarks; on a CPU in float32."""
    on_gpu = device.type == "cuda"
    n = (8192 if use_bf16 else 4096) if on_gpu else 1024
    dtype = torch.bfloat16 if use_bf16 and on_gpu else torch.float32
    # an own generator, so that measuring does not change the random numbers of a run
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    product()  # the first call loads libraries and allocates memory
    start_time, seconds_per_call = time.perf_counter(), max(time_call(product, 1, device), 1e-6)
    repeats, best = max(1, int(seconds / _MIN_SAMPLES / seconds_per_call)), seconds_per_call
    while time.perf_counter() - start_time < seconds:
        best = min(best, time_call(product, repeats, device))
    return 2.0 * n**3 / best


def tune_malloc() -> None:
    """Make glibc's malloc keep freed memory, if there is a glibc.

    Otherwise large blocks are returned to the system after each step on a CPU, and are zeroed page by page when they
    are allocated again.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, 2**31 - 1)


# glibc's malloc.h: maximum number of blocks with their own mapping, and bytes that are kept at the end of a heap
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1


def time_call(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds per call; a GPU runs asynchronously and is timed with its own events."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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
    model: spec.Model,
    *,
    source_length: float = 0,
    target_length: float = 0,
    memory_length: int = 0,
    logits_fraction: float = 1.0,
) -> float:
    """Return the training FLOPs per token: 6 per weight that multiplies it, and those of attention.

    Attention is counted without regard to a causal mask, as is usual.

    Args:
        model: the model.
        source_length: length of a source; sequences of lengths n cost as much as those of length sum(n²) / sum(n).
        target_length: length of a target.
        memory_length: tokens of preceding segments that self-attention reads as well.
        logits_fraction: fraction of tokens with logits, such as the 0.15 that are masked.
    """
    m, n = (max(1, round(length)) if length else 0 for length in (source_length, target_length))

    def training(variant: spec.Model) -> int:
        return cost(variant, source_length=m, target_length=n, memory_length=memory_length).training_flops

    flops = float(training(model))
    if logits_fraction != 1 and model.head is not None and model.head.is_token_level:
        without_aux_head = spec.replace(model, aux_head=None)
        head_flops = training(without_aux_head) - training(spec.replace(without_aux_head, head=None))
        flops -= (1 - logits_fraction) * head_flops
    tokens = (m if model.encoder is not None else 0) + (n if model.decoder is not None else 0)
    return flops / tokens


def flops_per_token_of_batch(model: spec.Model, inputs: Sequence[Any]) -> float:
    """Return the training FLOPs per token for the lengths and targets of a micro-batch."""
    lengths = [field.layout.lengths_list for field in inputs if isinstance(field, Ragged)]
    mean_lengths = [sum(n * n for n in side_lengths) / sum(side_lengths) for side_lengths in lengths]
    # for a task, both sides of an encoder-decoder read the same text, which the micro-batch contains once
    source = mean_lengths[0] if model.encoder is not None else 0.0
    target = mean_lengths[-1] if model.decoder is not None else 0.0
    logits_fraction = inputs.num_targets[0] / sum(lengths[-1]) if model.decoder is None else 1.0  # type: ignore[attr-defined]
    memory_length = 0 if getattr(inputs, "segments", None) is None else attended_memory(model)  # segments of streams
    flops = partial(
        flops_per_token,
        source_length=source,
        target_length=target,
        memory_length=memory_length,
        logits_fraction=min(logits_fraction, 1.0),
    )
    if getattr(inputs, "head_inputs", None) is None:
        return flops(model)
    return flops(model) - flops(spec.replace(model, head=None))  # the frozen backbone was run before


def trained_fraction(model: Model) -> float:
    """Return the fraction of training FLOPs, a third forward and two thirds backward, with a frozen backbone.

    Without LoRA there is no backward pass through it; LoRA needs gradients of activations, but not of weights.
    """
    return 1 / 3 if model.backbone_frozen else 1.0 if model.spec.lora is None else 2 / 3


def compile_blocks(model: torch.nn.Module, use_bf16: bool) -> None:
    """Compile the blocks: as a whole with bf16, where attention is one fused kernel, else their sublayers."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    if not blocks:
        raise InputError("train.compile: this model has no Transformer blocks to compile; leave it out")
    import torch._dynamo.config  # slow to import

    # training and evaluation, batches of equal and of varied lengths: each needs its own kernels
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    for block in blocks:
        # relative attention is no single kernel
        if use_bf16 and block.self_attention.spec.relative_positions is None:
            block.compile_forward()
        else:
            block.compile_sublayers()


_RECOMPILE_LIMIT = 32
