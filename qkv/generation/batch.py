"""Batches of sources that are decoded together step by step, which sources enter and leave between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qkv.generation.beam_search import BeamLoop
from qkv.generation.request import Request
from qkv.generation.sampling import TokenLoop
from qkv.generation.search import Loop, Search
from qkv.nn.ragged import BatchLayout, Ragged
from qkv.nn.shell import DecoderState
from qkv.nn.stack import EncoderOutput


@dataclass
class Arrivals:
    """Sources that have been read, with the first token of each of their rows."""

    loop: Loop
    state: DecoderState

    @staticmethod
    def read(search: Search, requests: Sequence[Request]) -> Arrivals:
        """Read the sources of requests, and choose the first tokens."""
        max_new_tokens = max(request.max_new_tokens for request in requests)
        source = _pack(search, requests)
        watch = {"watch_attention": True} if search.watches_attention else {}
        logits, state = search.model.prefill(source, search.rows_per_source, max_new_tokens, **watch)
        search.check_vocabulary(logits)
        loop_class = BeamLoop if search.config.num_beams > 1 else TokenLoop
        loop = loop_class.start(search, requests)
        attention = state.attention_weights() if search.watches_attention else None
        loop.advance(logits, attention)  # the rows of a source are still equal, so their order does not matter
        return Arrivals(loop, state)

    def extend(self, other: Arrivals, rows_per_source: int) -> None:
        """Append other sources."""
        kept = torch.arange(self.loop.num_sources, device=self.loop.tokens.device)
        self.state.merge(kept, other.state, rows_per_source)
        self.loop.extend(other.loop)


class Batch(Protocol):
    """Sources in numbered slots."""

    refill: int  # requests are read when they fill at least this fraction of a batch, or when nothing else waits

    @property
    def loop(self) -> Loop:
        """The outputs of the sources, by slot."""
        ...

    def advance(self) -> None:
        """Generate one or more tokens per row."""

    def place(self, kept: Sequence[int], requests: Sequence[Request], arrivals: Arrivals | None) -> list[int]:
        """Keep the sources in the slots `kept` and add others; return the slots of `requests`, those of all sources."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forget finished sources."""

    def release(self) -> None:
        """Give back what later batches can use."""


class PlainBatch:
    """Sources that are decoded by calls of the model; finished ones are dropped, so that they cost nothing."""

    refill = 2  # new sources make a copy of the caches, and a batch with few rows costs less

    def __init__(self, search: Search) -> None:
        self.search = search
        self._sources: Arrivals | None = None

    @property
    def loop(self) -> Loop:
        assert self._sources is not None
        return self._sources.loop

    def advance(self) -> None:
        sources = self._sources
        assert sources is not None
        logits, sources.state = self.search.model.step(sources.loop.tokens, sources.state)
        attention = sources.state.attention_weights() if self.search.watches_attention else None
        rows = sources.loop.advance(logits, attention)
        if rows is not None:
            sources.state.reorder(rows)

    def place(self, kept: Sequence[int], requests: Sequence[Request], arrivals: Arrivals | None) -> list[int]:
        sources = self._sources
        slots = list(range(len(requests)))
        if sources is None or not kept:
            self._sources = arrivals
        else:
            if arrivals is None:  # the last sources move into the places of finished ones, and the others stay
                free = sorted(set(slots).difference(kept))
                slots = [*kept[: len(kept) - len(free)], *free]
            order = dict(zip(slots, kept, strict=False))
            index = torch.tensor([order[slot] for slot in range(len(kept))], device=self.search.device)
            sources.loop = sources.loop.take(index)
            sources.state.merge(index, None if arrivals is None else arrivals.state, self.search.rows_per_source)
            if arrivals is not None:
                sources.loop.extend(arrivals.loop)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Do nothing: `place` drops them."""

    def release(self) -> None:
        self._sources = None


def _pack(search: Search, requests: Sequence[Request]) -> Ragged | EncoderOutput:
    """Return the sources as one batch on the model's device."""
    encoded = [request.source for request in requests if isinstance(request.source, EncoderOutput)]
    if not encoded:
        tensors = [request.source for request in requests if isinstance(request.source, Tensor)]
        if not requests[0].is_image:
            return Ragged.pack(tensors).to(search.device)
        layout = BatchLayout([request.length for request in requests])
        return Ragged(torch.stack(tensors), layout).to(search.device)
    hidden = Ragged.pack([source.hidden.values for source in encoded])
    final_states = [source.final_state for source in encoded if source.final_state is not None]
    return EncoderOutput(hidden, torch.cat(final_states) if final_states else None)
