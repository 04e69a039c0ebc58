"""The forward and backward pass of a batch as one CUDA graph, once batches of the same shape come again.

A step of a small model is a thousand kernels, each shorter than the time in which the host launches it. Packed batches
of language models all have one shape: their launches are recorded once and then replayed by one call. Batches of varied
lengths hardly ever repeat, and go on as they came, unless they were put in a frame (`qkv.train.frame`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkv.nn import Ragged
from qkv.train.frame import Framing, framable

Totals = tuple[Tensor, ...]
AnyPart = TypeVar("AnyPart", bound=tuple[Any, ...])

_PLAINLY = 2  # times that a shape runs before it is recorded: what is compiled or planned is then there
_GRAPHS = 4
_SHAPES = 64  # that are remembered: among varied lengths nearly every batch has its own


class Graphed:
    """Calls `backward`, which adds a part's gradient to the parameters' `.grad` and returns its losses, detached.

    A recording holds the addresses that it used. Of the `parameters` it is known where their gradients lie: those that
    are None before a part are made by the recording, in place of the last ones, and cost no addition. Who names no
    parameters must zero gradients in place and never let go of them. Autocast is to be entered inside `backward`, for
    its copies of the weights are made anew in every pass, and whatever else it reads must change in place.

    What asks the host for something (a number, a copy to the device) cannot be recorded; then a warning says so and
    everything runs plainly. Dropout in a replay follows the random state of the moment, as in any other call.
    """

    def __init__(
        self,
        backward: Callable[[Any], Totals],
        parameters: Iterable[Tensor] = (),
        frame: Framing | None = None,
        every: bool = True,
    ):
        """With `frame`, batches of varied lengths may be put into one; not `every`: only such are recorded."""
        self.backward = backward
        self.parameters = list(parameters)
        self.frame, self.every = frame, every
        self.seen: OrderedDict[Hashable, int] = OrderedDict()
        self.kept: dict[Hashable, Any] = {}  # parts whose tensors a recording reads
        self.graphs: dict[Hashable, _Recorded] = {}
        self.stream: torch.cuda.Stream | None = None
        self.on = True

    def framed(self, part: AnyPart) -> AnyPart:
        """The part as it is to be called with."""
        return part if self.frame is None or not self.on else self.frame(part)

    def __call__(self, part: AnyPart) -> Totals:
        wanted = self.every or (self.frame is not None and framable(part))
        if not (self.on and wanted) or _device(part).type != "cuda":
            return self.backward(part)
        key = shape_of(part), *(None if p.grad is None else p.grad.data_ptr() for p in self.parameters)
        if key in self.graphs:
            return self._replayed(key, part)
        times = self.seen.pop(key, 0) + 1
        self.seen[key] = times
        if len(self.seen) > _SHAPES:
            self.kept.pop(self.seen.popitem(last=False)[0], None)
        if times < _PLAINLY or len(self.graphs) == _GRAPHS:
            return self._beside(part)
        if key not in self.kept:
            self.kept[key] = _copy(part)  # what the layers plan about its layouts is planned before the recording
            return self._beside(self.kept[key])
        if not _refillable(self.kept[key]):  # lengths went into more than the tensors that are refilled
            self.frame = None
            return self._beside(part)
        return self._replayed(key, part) if self._record(key) else self.backward(part)

    def _beside(self, part: Any) -> Totals:
        """On the stream of the recording: gradients are added where their parameters were first used."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            totals = self.backward(part)
        now.wait_stream(self.stream)
        for total in totals:
            total.record_stream(now)
        return totals

    def _record(self, key: Hashable) -> bool:
        graph = torch.cuda.CUDAGraph()
        # one pool serves all: no two graphs run at the same time, and totals are copied out at once
        pool = next(iter(self.graphs.values())).graph.pool() if self.graphs else None
        before = [p.grad for p in self.parameters]
        try:
            # other threads, a loader's say, may use the device meanwhile
            with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
                totals = self.backward(self.kept[key])
        except RuntimeError as error:
            self._give_up(before)
            warnings.warn(f"this step cannot be a CUDA graph and runs without: {_first_line(error)}", stacklevel=4)
            return False
        self.graphs[key] = _Recorded(graph, totals, [p.grad for p in self.parameters])
        del self.seen[key]  # what the graph reads is never forgotten
        return True

    def _give_up(self, gradients: list[Tensor | None]) -> None:
        self.on = False
        self.kept.clear()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for generator in torch.cuda.default_generators:  # a recording that broke off leaves them in its hands
            generator.graphsafe_set_state(generator.clone_state())

    def _replayed(self, key: Hashable, part: Any) -> Totals:
        recorded = self.graphs[key]
        _fill(self.kept[key], part)
        recorded.graph.replay()
        for parameter, gradient in zip(self.parameters, recorded.gradients, strict=True):
            parameter.grad = gradient
        return tuple(total.clone() for total in recorded.totals)


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    totals: Totals
    gradients: list[Tensor | None]


def shape_of(part: tuple[Any, ...]) -> Hashable:
    """All that a recording depends on but the numbers in the tensors."""
    return type(part), *(_shape(field) for field in part)


def _shape(field: Any) -> Hashable:
    if isinstance(field, Ragged):
        layout = field.layout
        sizes: Hashable = (len(layout), layout.reach) if layout.framed else layout.sizes
        return sizes, _shape(field.values)
    return (field.shape, field.dtype) if isinstance(field, Tensor) else field


def _device(part: tuple[Any, ...]) -> torch.device:
    tensors = (field.values if isinstance(field, Ragged) else field for field in part)
    return next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))


def _refillable(part: tuple[Any, ...]) -> bool:
    framed = (field.layout for field in part if isinstance(field, Ragged) and field.layout.framed)
    return all(layout.refillable for layout in framed)


def _copy(part: AnyPart) -> AnyPart:
    return type(part)(*(_copied(field) for field in part))


def _copied(field: Any) -> Any:
    if isinstance(field, Ragged):
        return field.like(field.values.clone())
    return field.clone() if isinstance(field, Tensor) else field


def _fill(kept: tuple[Any, ...], part: tuple[Any, ...]) -> None:
    for old, new in zip(kept, part, strict=True):
        if isinstance(old, Ragged):
            old.values.copy_(new.values)
            if old.layout.framed:
                old.layout.refill(new.layout)
        elif isinstance(old, Tensor):
            old.copy_(new)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
