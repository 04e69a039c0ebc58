"""Attention maps for free: a sink on the watched layers while somebody looks, and nothing when nobody does.

Only a watched layer takes the explicit path (`qkv.nn.attend`); the others keep their fused kernels. `forward` returns
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

from qkv.errors import InputError, nearest
from qkv.nn.attend import Sink
from qkv.nn.attention import Attention

__all__ = ["Maps", "attentions", "capture"]

_ORDER = ("encoder", "decoder", "head")  # the parts of a model in the order in which a sentence passes them


class Maps(Mapping[str, list[Tensor]]):
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

    def clear(self, part: str | None = None) -> None:
        """Forgets what was seen: of the whole model, or of one part of it (`encoder`, `decoder`, `head`) only."""
        for name, seen in self._chunks.items():
            if part is None or name.split(".")[0] == part:
                seen.clear()

    def __getitem__(self, name: str) -> list[Tensor]:
        seen = self._chunks[name]
        for row, chunks in seen.items():
            if len(chunks) > 1:  # joined when somebody reads, not at every step
                seen[row] = [_joined(chunks)]
        return [seen[row][0] for row in sorted(seen)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __repr__(self) -> str:
        return f"Maps({', '.join(f'{name}: {len(seen)}' for name, seen in self._chunks.items())})"


@contextmanager
def capture(
    model: nn.Module, layers: str | Iterable[str] | None = None, heads: Iterable[int] | None = None
) -> Iterator[Maps]:
    """Watches attention inside the `with` block; what was there before is back after it, whatever happened.

        with capture(model, layers="decoder.*.cross") as maps:
            model(source, target)
        maps["decoder.0.cross"][3]  # the fourth sentence: [H, N, M]

    `layers`: names or globs out of `attentions(model)`; None is all. `heads`: the head numbers to keep, from 0; None is
    all. Another watcher that is there already goes on watching.
    """
    modules = _selected(attentions(model), layers)
    kept = None if heads is None else _checked(heads, modules)
    maps = Maps(modules)
    with ExitStack() as undo:
        for name, module in modules.items():
            undo.callback(setattr, module, "sink", module.sink)
            module.sink = _sink(maps, name, kept, module.sink)
        for part, clear in _beginnings(model, maps):
            undo.callback(part.register_forward_pre_hook(clear).remove)
        yield maps


def attentions(model: nn.Module) -> dict[str, Attention]:
    """Every attention by its name: `encoder.2.attention`, `decoder.0.cross`; a recurrent one's `decoder.attention`."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, Attention))
    return {".".join(part for part in name.split(".") if part != "blocks"): module for name, module in found}


def _selected(known: dict[str, Attention], layers: str | Iterable[str] | None) -> dict[str, Attention]:
    if layers is None:
        return known
    wanted: set[str] = set()
    for pattern in [layers] if isinstance(layers, str) else layers:
        matches = {name for name in known if fnmatchcase(name, pattern)}
        if not matches:
            hint = nearest(pattern, known) if known else "this model has no attention"
            raise InputError(f"layers: no attention is named '{pattern}'; {hint}")
        wanted |= matches
    return {name: module for name, module in known.items() if name in wanted}


def _checked(heads: Iterable[int], modules: dict[str, Attention]) -> list[int]:
    kept = list(heads)
    if not kept:
        raise InputError("heads: none is named; leave it out to keep all heads")
    for name, module in modules.items():
        wrong = [head for head in kept if not 0 <= head < module.heads]
        if wrong:
            raise InputError(f"heads: {name} has heads 0 to {module.heads - 1}, not {wrong[0]}")
    return kept


def _sink(maps: Maps, name: str, heads: list[int] | None, before: Sink | None) -> Sink:
    def sink(weights: Tensor, rows: Sequence[int], queries: Sequence[int], keys: Sequence[int]) -> None:
        if before is not None:
            before(weights, rows, queries, keys)
        seen = weights.detach() if heads is None else weights.detach()[:, heads]
        on_host = seen.to("cpu", torch.float32)  # [b, H, n, m], one transfer a call
        for row, padded, n, m in zip(rows, on_host, queries, keys, strict=True):
            maps.add(name, int(row), padded[:, :n, :m].clone())  # a view would keep the whole batch alive

    return sink


def _beginnings(model: nn.Module, maps: Maps) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
    """The modules whose forward starts maps afresh: a part makes its own, and those of the parts behind it, stale."""
    children = dict(model.named_children())
    yield model, lambda *_: maps.clear()
    for place, part in enumerate(_ORDER):
        if part in children:
            yield children[part], _clearing(maps, _ORDER[place:])


def _clearing(maps: Maps, parts: Sequence[str]) -> Callable[..., None]:
    def clear(*_: Any) -> None:
        for part in parts:
            maps.clear(part)

    return clear


def _joined(chunks: list[Tensor]) -> Tensor:
    """Chunks [H, n, m] one below the other. Keys that an early step could not see yet have no weight in it."""
    longest = max(chunk.shape[-1] for chunk in chunks)
    return torch.cat([F.pad(chunk, (0, longest - chunk.shape[-1])) for chunk in chunks], dim=1)  # [H, N, M]
