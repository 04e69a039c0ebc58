"""The forward and backward pass of a batch as one CUDA graph, once batches of the same shape come again.

A step of a small model is a thousand kernels, each shorter than the time in which the host launches it. Packed batches
of language models all have one shape: their launches are recorded once and then replayed by one call. Batches of varied
lengths hardly ever repeat, and go on as they came, unless they were put in a frame (`qkv.train.perf.static_batch`).
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
from qkv.train.perf.static_batch import StaticShapePadder, can_pad

LossTotals = tuple[Tensor, ...]
InputsT = TypeVar("InputsT", bound=tuple[Any, ...])

_EAGER_RUNS = 2  # times that a shape runs before it is recorded: what is compiled or planned is then there
_MAX_GRAPHS = 4
_MAX_KEYS = 64  # that are remembered: among varied lengths nearly every batch has its own


class CudaGraphRunner:
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
        backward: Callable[[Any], LossTotals],
        parameters: Iterable[Tensor] = (),
        padder: StaticShapePadder | None = None,
        capture_all: bool = True,
    ):
        """With `padder`, batches of varied lengths may be put into one shape; not `capture_all`: only such are recorded."""
        self.backward = backward
        self.parameters = list(parameters)
        self.padder, self.capture_all = padder, capture_all
        self.call_counts: OrderedDict[Hashable, int] = OrderedDict()
        self.static_inputs: dict[Hashable, Any] = {}  # parts whose tensors a recording reads
        self.graphs: dict[Hashable, _CapturedGraph] = {}
        self.stream: torch.cuda.Stream | None = None
        self.enabled = True

    def pad(self, inputs: InputsT) -> InputsT:
        """The part as it is to be called with."""
        return inputs if self.padder is None or not self.enabled else self.padder(inputs)

    def __call__(self, inputs: InputsT) -> LossTotals:
        should_capture = self.capture_all or (self.padder is not None and can_pad(inputs))
        if not (self.enabled and should_capture) or _device(inputs).type != "cuda":
            return self.backward(inputs)
        key = capture_key(inputs), *(None if p.grad is None else p.grad.data_ptr() for p in self.parameters)
        if key in self.graphs:
            return self._replay(key, inputs)
        num_calls = self.call_counts.pop(key, 0) + 1
        self.call_counts[key] = num_calls
        if len(self.call_counts) > _MAX_KEYS:
            self.static_inputs.pop(self.call_counts.popitem(last=False)[0], None)
        if num_calls < _EAGER_RUNS or len(self.graphs) == _MAX_GRAPHS:
            return self._run_on_side_stream(inputs)
        if key not in self.static_inputs:
            self.static_inputs[key] = _clone_inputs(inputs)  # what the layers plan about its layouts is planned before the recording
            return self._run_on_side_stream(self.static_inputs[key])
        if not _can_copy_static(self.static_inputs[key]):  # lengths went into more than the tensors that are refilled
            self.padder = None
            return self._run_on_side_stream(inputs)
        return self._replay(key, inputs) if self._capture(key) else self.backward(inputs)

    def _run_on_side_stream(self, inputs: Any) -> LossTotals:
        """On the stream of the recording: gradients are added where their parameters were first used."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        current_stream = torch.cuda.current_stream()
        self.stream.wait_stream(current_stream)
        with torch.cuda.stream(self.stream):
            totals = self.backward(inputs)
        current_stream.wait_stream(self.stream)
        for total in totals:
            total.record_stream(current_stream)
        return totals

    def _capture(self, key: Hashable) -> bool:
        graph = torch.cuda.CUDAGraph()
        # one pool serves all: no two graphs run at the same time, and totals are copied out at once
        pool = next(iter(self.graphs.values())).graph.pool() if self.graphs else None
        previous_gradients = [p.grad for p in self.parameters]
        try:
            # other threads, a loader's say, may use the device meanwhile
            with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
                totals = self.backward(self.static_inputs[key])
        except RuntimeError as error:
            self._disable(previous_gradients)
            warnings.warn(f"this step cannot be a CUDA graph and runs without: {_first_line(error)}", stacklevel=4)
            return False
        self.graphs[key] = _CapturedGraph(graph, totals, [p.grad for p in self.parameters])
        del self.call_counts[key]  # what the graph reads is never forgotten
        return True

    def _disable(self, gradients: list[Tensor | None]) -> None:
        self.enabled = False
        self.static_inputs.clear()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for generator in torch.cuda.default_generators:  # a recording that broke off leaves them in its hands
            generator.graphsafe_set_state(generator.clone_state())

    def _replay(self, key: Hashable, inputs: Any) -> LossTotals:
        captured = self.graphs[key]
        _copy_into_static(self.static_inputs[key], inputs)
        captured.graph.replay()
        for parameter, gradient in zip(self.parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        return tuple(total.clone() for total in captured.totals)


@dataclass
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    totals: LossTotals
    gradients: list[Tensor | None]


def capture_key(inputs: tuple[Any, ...]) -> Hashable:
    """All that a recording depends on but the numbers in the tensors."""
    return type(inputs), *(_field_key(field) for field in inputs)


def _field_key(field: Any) -> Hashable:
    if isinstance(field, Ragged):
        layout = field.layout
        layout_key: Hashable = (len(layout), layout.kernel_max_length) if layout.is_static else layout.lengths_list
        return layout_key, _field_key(field.values)
    return (field.shape, field.dtype) if isinstance(field, Tensor) else field


def _device(inputs: tuple[Any, ...]) -> torch.device:
    tensors = (field.values if isinstance(field, Ragged) else field for field in inputs)
    return next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))


def _can_copy_static(inputs: tuple[Any, ...]) -> bool:
    static_layouts = (field.layout for field in inputs if isinstance(field, Ragged) and field.layout.is_static)
    return all(layout.can_copy_from for layout in static_layouts)


def _clone_inputs(inputs: InputsT) -> InputsT:
    return type(inputs)(*(_clone_field(field) for field in inputs))


def _clone_field(field: Any) -> Any:
    if isinstance(field, Ragged):
        return field.with_values(field.values.clone())
    return field.clone() if isinstance(field, Tensor) else field


def _copy_into_static(static_inputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
    for old, new in zip(static_inputs, inputs, strict=True):
        if isinstance(old, Ragged):
            old.values.copy_(new.values)
            if old.layout.is_static:
                old.layout.copy_from(new.layout)
        elif isinstance(old, Tensor):
            old.copy_(new)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
