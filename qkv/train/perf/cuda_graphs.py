"""Capture the forward and backward pass as a CUDA graph when batches of the same shape repeat.

A step of a small model is a thousand kernels, each shorter than its launch by the host. Packed batches of language
models all have the same shape: their launches are captured once and then replayed by one call. Batches of varied
lengths hardly ever repeat and run eagerly, unless they are padded to static shapes (`qkv.train.perf.static_batch`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkv.nn import BatchLayout, Ragged
from qkv.train.perf.static_batch import StaticShapes

LossTotals = tuple[Tensor, ...]
InputsT = TypeVar("InputsT", bound=tuple[Any, ...])

_EAGER_RUNS = 2  # eager runs of a shape before it is captured, in which kernels are compiled and plans are made
_MAX_GRAPHS = 8
_MAX_KEYS = 64  # shapes that are counted: with varied lengths nearly every batch has its own


class CudaGraphRunner:
    """Calls `backward` eagerly, or replays its captured graph.

    `backward` adds the gradient of a micro-batch to the parameters' `.grad` and returns its losses, detached.

    A graph holds the addresses that it used. The addresses of the gradients of `parameters` are part of the key of a
    graph: gradients that are None before a micro-batch are created by the graph, which saves an addition. Without
    `parameters`, gradients must be zeroed in place and never be released. Autocast must be entered inside `backward`,
    because its copies of the weights are made in each pass; all other tensors that it reads must be updated in place.

    Code that waits for the device or copies to it cannot be captured; then there is a warning, and all batches run
    eagerly. Dropout in a replay follows the current random state, as in any other call.
    """

    def __init__(
        self,
        backward: Callable[[Any], LossTotals],
        parameters: Iterable[Tensor] = (),
        capture_all: bool = True,
    ) -> None:
        """Make a runner.

        Args:
            backward: the function to run.
            parameters: the parameters whose gradients it computes.
            capture_all: whether other batches than those of a static shape are captured too.
        """
        self.backward = backward
        self.parameters = list(parameters)
        self.capture_all = capture_all
        self.static_shapes: StaticShapes | None = None  # to which batches of varied lengths are padded
        self.call_counts: OrderedDict[Hashable, int] = OrderedDict()
        self.static_inputs: dict[Hashable, Any] = {}  # inputs whose tensors a graph reads
        self.graphs: dict[Hashable, _CapturedGraph] = {}
        self.stream: torch.cuda.Stream | None = None
        self.enabled = True

    def pad(self, inputs: InputsT) -> InputsT:
        """Return the inputs to call this with: padded if possible; several threads may call this."""
        static_shapes = self.static_shapes if self.enabled else None
        return inputs if static_shapes is None else static_shapes.pad(inputs)

    def __call__(self, inputs: InputsT) -> LossTotals:
        """Run `backward` on the inputs of a micro-batch and return its loss sums."""
        is_static = any(layout.is_static for layout in _layouts(inputs))
        should_capture = self.static_shapes is not None if is_static else self.capture_all
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
            # layers make plans for the layouts of the clone before it is captured
            self.static_inputs[key] = _clone_inputs(inputs)
            return self._run_on_side_stream(self.static_inputs[key])
        if is_static and not all(layout.can_copy_from for layout in _layouts(self.static_inputs[key])):
            self.static_shapes = None  # some layer needs the lengths on the host
            return self._run_on_side_stream(inputs)
        return self._replay(key, inputs) if self._capture(key) else self.backward(inputs)

    def _run_on_side_stream(self, inputs: Any) -> LossTotals:
        """Run eagerly on the stream of the capture, because gradients are accumulated on the stream of first use."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
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
        # one memory pool for all: no two graphs run at the same time, and totals are copied at once
        pool = next(iter(self.graphs.values())).graph.pool() if self.graphs else None
        previous_gradients = [p.grad for p in self.parameters]
        for layout in _layouts(self.static_inputs[key]):
            if layout.is_static:
                layout.plan_cache.clear()  # plans are computed in the graph, for the lengths of each replay
        try:
            # other threads, such as a loader's, may use the device meanwhile
            with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
                totals = self.backward(self.static_inputs[key])
        except RuntimeError as error:
            self._disable(previous_gradients)
            warnings.warn(
                f"this step cannot be captured as a CUDA graph and runs eagerly: {_first_line(error)}", stacklevel=4
            )
            return False
        self.graphs[key] = _CapturedGraph(graph, totals, [p.grad for p in self.parameters])
        del self.call_counts[key]  # static inputs of a graph are never dropped
        return True

    def _disable(self, gradients: list[Tensor | None]) -> None:
        self.enabled = False
        self.static_inputs.clear()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for generator in torch.cuda.default_generators:  # a failed capture leaves generators in capture state
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
    """Return everything that a graph depends on, except the values of the tensors."""
    return type(inputs), *(_field_key(field) for field in inputs)


def _field_key(field: Any) -> Hashable:
    if isinstance(field, Ragged):
        return _field_key(field.layout), _field_key(field.values)
    if isinstance(field, BatchLayout):
        return (len(field), field.num_tokens, field.padded_length) if field.is_static else field.lengths_list
    return (field.shape, field.dtype) if isinstance(field, Tensor) else field


def _device(inputs: tuple[Any, ...]) -> torch.device:
    tensors = (field.values if isinstance(field, Ragged) else field for field in inputs)
    return next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))


def _layouts(inputs: tuple[Any, ...]) -> Iterator[BatchLayout]:
    for field in inputs:
        if isinstance(field, Ragged | BatchLayout):
            yield field.layout if isinstance(field, Ragged) else field


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
        elif isinstance(old, Tensor):
            old.copy_(new)
    for old_layout, new_layout in zip(_layouts(static_inputs), _layouts(inputs), strict=True):
        if old_layout.is_static:
            old_layout.copy_from(new_layout)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
