"""Attention maps for free: a hook on the watched layers while somebody looks, and nothing when nobody does.

Only a watched layer takes the explicit path (`qkv.nn.kernels`); the others keep their fused kernels. `forward` returns
what it always returns. The maps are the w_i(t) of "'Alignments' example: Bahdanau et al." (Sequence to Sequence models:
Attention Models).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.errors import InputError, did_you_mean
from qkv.nn.attention import Attention
from qkv.nn.kernels import AttentionHook

__all__ = ["AttentionMaps", "capture_attention", "named_attentions"]

_MODULE_ORDER = ("encoder", "decoder", "head")  # the parts of a model in the order in which a sentence passes them


class AttentionMaps(Mapping[str, list[Tensor]]):
    """Name of a watched attention -> one map [H, N_i, M_i] a sequence, in batch order; empty until it has attended.

    Each is float32 on the CPU, detached, cropped to the sequence's own lengths; its rows sum to one.

    - A whole forward gives whole maps. The next one starts afresh, so the maps are always those of the last batch:
      running the encoder drops all maps, running the decoder alone drops the decoder's.
    - Decoding by `model.step` adds queries to the maps, in order of the calls, until the next sentences are encoded.
      To decode the same memory again, or with a model that has no encoder, call `clear()` between the two.
    - With several beams a sentence, cross-attention sees the beams as queries side by side: beam b of step t is query
      t * beams + b of its sentence. Decoder self-attention sees each beam as a sequence of its own, and its rows are
      those that stood there at each step: a map does not follow a beam that changed places.
    """

    def __init__(self, names: Iterable[str]):
        self._chunks: dict[str, dict[int, list[Tensor]]] = {name: {} for name in names}

    def add(self, name: str, row: int, chunk: Tensor) -> None:
        """More queries of a sequence.  # [H, n, m]"""
        self._chunks[name].setdefault(row, []).append(chunk)

    def clear(self, module_name: str | None = None) -> None:
        """Forgets what was seen: of the whole model, or of one part of it (`encoder`, `decoder`, `head`) only."""
        for name, chunks_by_row in self._chunks.items():
            if module_name is None or name.split(".")[0] == module_name:
                chunks_by_row.clear()

    def __getitem__(self, name: str) -> list[Tensor]:
        chunks_by_row = self._chunks[name]
        for row, chunks in chunks_by_row.items():
            if len(chunks) > 1:  # joined when somebody reads, not at every step
                chunks_by_row[row] = [_concat_chunks(chunks)]
        return [chunks_by_row[row][0] for row in sorted(chunks_by_row)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __repr__(self) -> str:
        return f"AttentionMaps({', '.join(f'{name}: {len(chunks_by_row)}' for name, chunks_by_row in self._chunks.items())})"


@contextmanager
def capture_attention(
    model: nn.Module, layers: str | Iterable[str] | None = None, heads: Iterable[int] | None = None
) -> Iterator[AttentionMaps]:
    """Watches attention inside the `with` block; what was there before is back after it, whatever happened.

        with capture_attention(model, layers="decoder.*.cross_attention") as maps:
            model(source, target)
        maps["decoder.0.cross_attention"][3]  # the fourth sentence: [H, N, M]

    `layers`: names or globs out of `named_attentions(model)`; None is all. `heads`: the head numbers to keep, from 0; None is
    all. Another watcher that is there already goes on watching.
    """
    modules = _select_layers(named_attentions(model), layers)
    head_ids = None if heads is None else _check_heads(heads, modules)
    maps = AttentionMaps(modules)
    with ExitStack() as undo:
        for name, module in modules.items():
            undo.callback(setattr, module, "hook", module.hook)
            module.hook = _make_hook(maps, name, head_ids, module.hook)
        for submodule, reset_hook in _reset_hooks(model, maps):
            undo.callback(submodule.register_forward_pre_hook(reset_hook).remove)
        yield maps


def named_attentions(model: nn.Module) -> dict[str, Attention]:
    """Every attention by its name: `encoder.2.self_attention`, `decoder.0.cross_attention`; a recurrent one's `decoder.attention`."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, Attention))
    return {".".join(component for component in name.split(".") if component != "blocks"): module for name, module in modules}


def _select_layers(available: dict[str, Attention], layers: str | Iterable[str] | None) -> dict[str, Attention]:
    if layers is None:
        return available
    selected_names: set[str] = set()
    for pattern in [layers] if isinstance(layers, str) else layers:
        matches = {name for name in available if fnmatchcase(name, pattern)}
        if not matches:
            hint = did_you_mean(pattern, available) if available else "this model has no attention"
            raise InputError(f"layers: no attention is named '{pattern}'; {hint}")
        selected_names |= matches
    return {name: module for name, module in available.items() if name in selected_names}


def _check_heads(heads: Iterable[int], modules: dict[str, Attention]) -> list[int]:
    head_ids = list(heads)
    if not head_ids:
        raise InputError("heads: none is named; leave it out to keep all heads")
    for name, module in modules.items():
        invalid = [head for head in head_ids if not 0 <= head < module.heads]
        if invalid:
            raise InputError(f"heads: {name} has heads 0 to {module.heads - 1}, not {invalid[0]}")
    return head_ids


def _make_hook(maps: AttentionMaps, name: str, heads: list[int] | None, previous: AttentionHook | None) -> AttentionHook:
    def hook(weights: Tensor, rows: Sequence[int], queries: Sequence[int], keys: Sequence[int]) -> None:
        if previous is not None:
            previous(weights, rows, queries, keys)
        selected = weights.detach() if heads is None else weights.detach()[:, heads]
        on_host = selected.to("cpu", torch.float32)  # [b, H, n, m], one transfer a call
        for row, padded, n, m in zip(rows, on_host, queries, keys, strict=True):
            maps.add(name, int(row), padded[:, :n, :m].clone())  # a view would keep the whole batch alive

    return hook


def _reset_hooks(model: nn.Module, maps: AttentionMaps) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
    """The modules whose forward starts maps afresh: a part makes its own, and those of the parts behind it, stale."""
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
    """Chunks [H, n, m] one below the other. Keys that an early step could not see yet have no weight in it."""
    max_keys = max(chunk.shape[-1] for chunk in chunks)
    return torch.cat([F.pad(chunk, (0, max_keys - chunk.shape[-1])) for chunk in chunks], dim=1)  # [H, N, M]
