"""Record attention weights through hooks on attention layers, at no cost for layers that are not recorded.

Only a recorded layer takes the eager path (`qkv.nn.kernels`); the others keep their fused kernels, and the output of
`forward` does not change. The maps are the w_i(t) of "'Alignments' example: Bahdanau et al." (Sequence to Sequence
models: Attention Models).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.errors import InputError, check_names, check_number, check_type, describe_value, did_you_mean, quote
from qkv.nn.attention import Attention
from qkv.nn.kernels import AttentionHook

__all__ = ["AttentionMaps", "capture_attention", "collect_batches", "named_attentions"]

_SEVERAL_SEQUENCES = (
    "an input is several sequences (windows, choices or beams), which have no map in common; run the model on one batch"
)
_MODULE_ORDER = ("encoder", "decoder", "head")  # submodules of a model in the order in which they run


class AttentionMaps(Mapping[str, list[Tensor]]):
    """Attention weights by layer name: one map [H, N_i, M_i] per sequence, in batch order.

    A layer's list is empty until it has run. Each map is float32 on the CPU, detached and cropped to the lengths of its
    sequence; its rows sum to one.

    - A forward pass replaces the maps of the previous one: running the encoder clears all maps, running only the
      decoder clears those of the decoder.
    - A function that takes many inputs and divides them into batches (`qkv.embed`, `qkv.predict`, calling a bundle)
      gives one map per input, in input order. See `collect_batches`.
    - `model.step` appends queries to the maps, in the order of the calls, until the next input is encoded. Call
      `clear()` before decoding again from the same encoder output, or with a model that has no encoder.
    - With several beams per input, cross-attention has the beams as adjacent queries: beam b of step t is query
      t * beams + b. In decoder self-attention each beam is a sequence of its own, and its map holds the rows that were
      at this position at each step: it does not follow a beam that was reordered.
    """

    def __init__(self, names: Iterable[str]):
        self._chunks: dict[str, dict[int, list[Tensor]]] = {name: {} for name in names}
        self._batch_inputs: Sequence[int] | None = None  # the number of each row's input; None: rows are not renumbered

    def add(self, name: str, row: int, chunk: Tensor) -> None:
        """Append queries to the map of a sequence.  # [H, n, m]"""
        if self._batch_inputs is not None:
            if row >= len(self._batch_inputs):
                raise InputError(f"capture_attention: {_SEVERAL_SEQUENCES}")
            row = self._batch_inputs[row]
        self._chunks[name].setdefault(row, []).append(chunk)

    def clear(self, module_name: str | None = None) -> None:
        """Delete the maps of all layers, or only those of one submodule (`encoder`, `decoder` or `head`).

        Between the batches of one call, only the maps of the current batch are deleted.
        """
        for name, chunks_by_row in self._chunks.items():
            if module_name is not None and name.split(".")[0] != module_name:
                continue
            for row in list(chunks_by_row) if self._batch_inputs is None else self._batch_inputs:
                chunks_by_row.pop(row, None)

    def begin_batch(self, inputs: Sequence[int] | None) -> None:
        """Record the rows of the next batch as those of inputs with these numbers; None: rows have no other number."""
        self._batch_inputs = inputs

    def __getitem__(self, name: str) -> list[Tensor]:
        chunks_by_row = self._chunks[name]
        for row, chunks in chunks_by_row.items():
            if len(chunks) > 1:  # concatenated when read, not at every step
                chunks_by_row[row] = [_concat_chunks(chunks)]
        return [chunks_by_row[row][0] for row in sorted(chunks_by_row)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}: {len(chunks_by_row)}" for name, chunks_by_row in self._chunks.items())
        return f"AttentionMaps({counts})"


@contextmanager
def capture_attention(
    model: Any, layers: str | Iterable[str] | None = None, heads: Iterable[int] | None = None
) -> Iterator[AttentionMaps]:
    """Record attention weights inside a `with` block; the model's hooks are restored on exit, also after an error.

        with capture_attention(model, layers="decoder.*.cross_attention") as maps:
            model(source, target)
        maps["decoder.0.cross_attention"][3]  # the fourth sequence: [H, N, M]

    Args:
        model: any module that contains attention layers, or a bundle of `qkv.load`.
        layers: names of `named_attentions(model)`, or glob patterns of them; None: all.
        heads: numbers of the heads to record, from 0; None: all.

    An enclosing `capture_attention` of the same layers keeps recording.
    """
    model = _as_module(model)
    modules = _select_layers(named_attentions(model), layers)
    head_ids = None if heads is None else _check_heads(heads, modules)
    maps = AttentionMaps(modules)
    with ExitStack() as undo:
        for name, module in modules.items():
            undo.callback(setattr, module, "hook", module.hook)
            module.hook = _Recorder(maps, name, head_ids, module.hook)
        for submodule, reset_hook in _reset_hooks(model, maps):
            undo.callback(submodule.register_forward_pre_hook(reset_hook).remove)
        yield maps


def named_attentions(model: nn.Module) -> dict[str, Attention]:
    """Return all attention layers by name: `encoder.2.self_attention`, or a recurrent decoder's `decoder.attention`."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, Attention))
    return {
        ".".join(component for component in name.split(".") if component != "blocks"): module
        for name, module in modules
    }


def _select_layers(available: dict[str, Attention], layers: str | Iterable[str] | None) -> dict[str, Attention]:
    if layers is None:
        return available
    selected_names: set[str] = set()
    for pattern in check_names(layers, "layers", "names of attention layers"):
        matches = {name for name in available if fnmatchcase(name, pattern)}
        if not matches:
            hint = did_you_mean(pattern, available) if available else "this model has no attention"
            raise InputError(f"layers: no attention is named {quote(pattern)}; {hint}")
        selected_names |= matches
    return {name: module for name, module in available.items() if name in selected_names}


def _check_heads(heads: Iterable[int], modules: dict[str, Attention]) -> list[int]:
    if not isinstance(heads, list | tuple | range | set):
        raise InputError(f"heads: expected a list of numbers, not {describe_value(heads)}")
    head_ids = [check_number(head, "heads", 0) for head in heads]
    if not head_ids:
        raise InputError("heads: none is named; leave it out to keep all heads")
    for name, module in modules.items():
        invalid = [head for head in head_ids if not 0 <= head < module.heads]
        if invalid:
            raise InputError(f"heads: {name} has heads 0 to {module.heads - 1}, not {invalid[0]}")
    return head_ids


@dataclass(frozen=True)
class _Recorder:
    """The hook of a recorded attention layer."""

    maps: AttentionMaps
    layer: str
    heads: list[int] | None
    previous: AttentionHook | None  # the hook of an enclosing capture

    def __call__(self, weights: Tensor, rows: Sequence[int], queries: Sequence[int], keys: Sequence[int]) -> None:
        if self.previous is not None:
            self.previous(weights, rows, queries, keys)
        selected = weights.detach() if self.heads is None else weights.detach()[:, self.heads]
        on_host = selected.to("cpu", torch.float32)  # [b, H, n, m], one transfer per call
        for row, padded, n, m in zip(rows, on_host, queries, keys, strict=True):
            self.maps.add(self.layer, int(row), padded[:, :n, :m].clone())  # a view would keep the whole batch alive


@contextmanager
def collect_batches(model: nn.Module) -> Iterator[Callable[[Iterable[int]], None]]:
    """Let active captures collect all batches of one call, in input order.

    The function that is yielded is called before each batch with the numbers of its inputs.
    """
    captures = list({id(maps): maps for maps in _active_captures(model)}.values())
    for maps in captures:
        maps.clear()

    seen: set[int] = set()

    def begin_batch(inputs: Iterable[int]) -> None:
        if not captures:
            return
        numbers = [int(number) for number in inputs]
        if len(seen | set(numbers)) < len(seen) + len(numbers):
            raise InputError(f"capture_attention: {_SEVERAL_SEQUENCES}")
        seen.update(numbers)
        for maps in captures:
            maps.begin_batch(numbers)

    try:
        yield begin_batch
    finally:
        for maps in captures:
            maps.begin_batch(None)


def _active_captures(model: nn.Module) -> Iterator[AttentionMaps]:
    for module in model.modules():
        hook = module.hook if isinstance(module, Attention) else None
        while isinstance(hook, _Recorder):
            yield hook.maps
            hook = hook.previous


def _as_module(model: Any) -> nn.Module:
    """Return a module, or the module of a bundle."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    check_type(module if isinstance(module, nn.Module) else model, nn.Module, "model", "a bundle or a torch module")
    assert isinstance(module, nn.Module)
    return module


def _reset_hooks(model: nn.Module, maps: AttentionMaps) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
    """Yield the modules whose forward clears maps: their own and those of the submodules that run after them."""
    children = dict(model.named_children())
    yield model, lambda *_: maps.clear()
    for index, module_name in enumerate(_MODULE_ORDER):
        if module_name in children:
            yield children[module_name], _make_reset_hook(maps, _MODULE_ORDER[index:])


def _make_reset_hook(maps: AttentionMaps, module_names: Sequence[str]) -> Callable[..., None]:
    def clear(*_: Any) -> None:
        for module_name in module_names:
            maps.clear(module_name)

    return clear


def _concat_chunks(chunks: list[Tensor]) -> Tensor:
    """Concatenate chunks [H, n, m] along the queries; keys that did not exist at an early step get weight zero."""
    max_keys = max(chunk.shape[-1] for chunk in chunks)
    return torch.cat([F.pad(chunk, (0, max_keys - chunk.shape[-1])) for chunk in chunks], dim=1)  # [H, N, M]
