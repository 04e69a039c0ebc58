"""What the machine can do at best, and what training asks of it: the two sides of a share of the peak.

share = tokens a second x work a token / matrix peak. Chowdhery et al. 2022, appendix B, call it model FLOPs
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
from qkv.errors import InputError
from qkv.look.cost import cost
from qkv.nn import Ragged
from qkv.nn.block import Block
from qkv.nn.model import Model

_SAMPLES = 8  # at least; the best counts, for a disturbed sample says nothing of the machine


def matrix_peak(device: torch.device | str, half: bool) -> float:
    """FLOP/s of a large matrix product, in bfloat16 if `half`; measured once a process and device, then remembered."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _remembered(device, half, torch.get_float32_matmul_precision())


@cache
def _remembered(device: torch.device, half: bool, _: str) -> float:
    return measured_peak(device, half)


def measured_peak(device: torch.device, half: bool, seconds: float = 0.15) -> float:
    """The same, measured anew over about so many seconds. On a CPU always in float32, as we train there."""
    on_gpu = device.type == "cuda"
    n, kind = (8192 if half else 4096, torch.bfloat16 if half else torch.float32) if on_gpu else (1024, torch.float32)
    # a generator of its own: a run's random numbers must not depend on whether somebody measured
    chance = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=chance).to(kind) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    product()  # the first one loads libraries and takes memory
    began, sample = time.perf_counter(), max(timed(product, 1, device), 1e-6)
    repeats, best = max(1, int(seconds / _SAMPLES / sample)), sample
    while time.perf_counter() - began < seconds:
        best = min(best, timed(product, repeats, device))
    return 2.0 * n**3 / best


def keep_memory() -> None:
    """Lets the C library keep what is freed: otherwise large blocks go back to the system after each step on a CPU, and
    come again page by page, each zeroed on the way. Where there is no glibc nothing changes."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_LARGE_BLOCKS, 0)
        set_option(_KEPT, 2**31 - 1)


# of glibc's malloc.h: how many blocks may be mappings of their own, and the bytes that are kept at a heap's end
_LARGE_BLOCKS, _KEPT = -4, -1


def timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds a call. A GPU works behind the host's back, so its own clock is asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def work_per_token(
    model: spec.Model, *, source_length: float = 0, target_length: float = 0, judged: float = 1.0
) -> float:
    """FLOPs that training needs a token: 6 a weight that multiplies it, and attention's at these lengths.

    Tokens are all that are read, source and target. Sequences of many lengths n cost what those of sum(n²) / sum(n)
    tokens do. `judged`: the share of tokens whose logits are worked out, such as the 0.15 that are masked. Attention is
    counted whole, also where a causal mask hides half of it, as is the custom.
    """
    m, n = (max(1, round(length)) if length else 0 for length in (source_length, target_length))

    def training(part: spec.Model) -> int:
        return cost(part, source_length=m, target_length=n).training_pair

    work = float(training(model))
    if judged != 1 and model.head is not None and model.head.at_each_token:
        alone = spec.replace(model, beside=None)
        work -= (1 - judged) * (training(alone) - training(spec.replace(alone, head=None)))
    tokens = (m if model.encoder is not None else 0) + (n if model.decoder is not None else 0)
    return work / tokens


def work_on(model: spec.Model, part: Sequence[Any]) -> float:
    """The same at the lengths of a part of a batch, and for the logits that it asks for."""
    sizes = [field.layout.sizes for field in part if isinstance(field, Ragged)]
    means = [sum(n * n for n in side) / sum(side) for side in sizes]
    # a task's text is read by both sides of an encoder-decoder, and stands in the part once
    source = means[0] if model.encoder is not None else 0.0
    target = means[-1] if model.decoder is not None else 0.0
    asked = part.targets[0] / sum(sizes[-1]) if model.decoder is None else 1.0  # type: ignore[attr-defined]
    return work_per_token(model, source_length=source, target_length=target, judged=min(asked, 1.0))


def passes(model: Model) -> float:
    """The share of training's work, a pass forward and two back, that is done where the body stays as it is: nothing
    goes back through one without adapters, and those need the gradient of what went in, not of its weights."""
    return 1 / 3 if model.frozen else 1.0 if model.spec.adapters is None else 2 / 3


def compile_blocks(model: torch.nn.Module, half: bool) -> None:
    """Compiles blocks: whole where the looking is one fused kernel, as on a GPU in half precision, else in parts."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    if not blocks:
        raise InputError("train.compile: this model has no Transformer blocks to compile; leave it out")
    import torch._dynamo.config  # takes a while

    # training and scoring, batches of one length and of many: each gets kernels of its own
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _FORMS)
    for block in blocks:
        if half:
            block.compile_whole()
        else:
            block.compile_parts()


_FORMS = 32
