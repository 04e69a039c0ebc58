"""Decoding steps as CUDA graphs: the model's step and the choice of tokens, replayed without work on the host.

A step of a small model is a few hundred kernels, each shorter than its launch by the host. Graphs are captured for
buckets of rows and lengths, without a compiler, and reused by later searches of the same kind. Between two replays
finished sources are replaced in place, and a batch that grows or shrinks moves to the graph of another bucket.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from qkv.generation.batch import Arrivals
from qkv.generation.decoding_model import DecodingModel
from qkv.generation.request import Request
from qkv.generation.search import Loop, Search
from qkv.nn.attention import Attention
from qkv.nn.indexed_cache import HAS_KERNEL, CacheIndex, IndexedKVCache, bias_by_distance
from qkv.nn.kv_cache import KeyValues, KVCache, source_rows
from qkv.nn.shell import DecoderState, Model
from qkv.nn.stack import IndexedStackState, Stack, StackState

_LENGTH_BUCKET, _SOURCE_BUCKET = 128, 64
_MAX_SESSIONS = 8
_SHRINK = 4  # a batch moves to a smaller graph if at most this fraction of its sources is left
STEPS_PER_GRAPH = 8  # steps between two checks for the end
_MANY_ROWS = 256
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def supports_graphs(model: Model) -> bool:
    """Return whether steps are captured: on a GPU, if there is a kernel for them."""
    return model.device.type == "cuda" and HAS_KERNEL and can_capture(model)


def can_capture(model: Model) -> bool:
    """Return whether steps can be captured: of a Transformer decoder whose attention is not recorded."""
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, Stack):
        return False
    attentions = [module for module in decoder.modules() if isinstance(module, Attention)]
    return all(
        attention.hook is None
        and attention.score.is_dot
        and attention.spec.relative_positions is None
        and attention.spec.k_head_dim == attention.spec.effective_v_head_dim
        for attention in attentions
    )


@dataclass(frozen=True)
class Shape:
    """The sizes that a graph is captured for."""

    num_sources: int
    width: int  # tokens of a history
    cache_length: int  # slots of the KV cache
    cross_length: int  # tokens of an encoded source

    def covers(self, other: Shape) -> bool:
        """Return whether a batch of another shape fits."""
        return all(ours >= theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True))

    def round_up(self) -> Shape:
        """Return the bucket of this shape."""
        num_sources = next((n for n in _ROW_BUCKETS if n >= self.num_sources), self.num_sources)
        lengths = _round_up(self.width, _LENGTH_BUCKET), _round_up(self.cache_length, _LENGTH_BUCKET)
        return Shape(num_sources, *lengths, _round_up(self.cross_length, _SOURCE_BUCKET))


class GraphBatch:
    """Sources that are decoded by the graphs of a decoding model."""

    refill = 8  # rows without a source cost as much as others

    def __init__(self, decoding: DecodingModel, search: Search, settings: Hashable) -> None:
        """Make an empty batch; `settings` determines what is constant in a captured search."""
        self.decoding, self.search, self.settings = decoding, search, settings
        self.session: GraphSession | None = None

    @property
    def loop(self) -> Loop:
        assert self.session is not None
        return self.session.loop

    def advance(self) -> None:
        """Run the steps of a graph."""
        assert self.session is not None
        self.session.replay()

    def place(self, kept: Sequence[int], requests: Sequence[Request], arrivals: Arrivals | None) -> list[int]:
        """Keep the sources in the slots `kept` and add others; return the slots of `requests`, those of all sources."""
        session, shape = self.session, self._shape(requests)
        if session is not None and session.shape.covers(shape) and not _is_loose(session.shape, shape, arrivals):
            free = sorted(set(range(session.shape.num_sources)).difference(kept))[: len(requests) - len(kept)]
            if arrivals is not None:
                session.load(free, arrivals, kept)
            return [*kept, *free]
        if session is not None and kept:
            moved = session.export(kept)
            if arrivals is not None:
                moved.extend(arrivals, self.search.rows_per_source)
            arrivals = moved
        self.release()
        assert arrivals is not None
        self.session = self._take_session(shape.round_up(), arrivals)
        slots = list(range(len(requests)))
        self.session.load(slots, arrivals, kept=())
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Forget finished sources."""
        assert self.session is not None
        self.session.free(slots)

    def release(self) -> None:
        """Keep the session for later batches; only one batch uses it at a time."""
        sessions = self.decoding.sessions
        if self.session is not None:
            sessions[self.session.shape, self.settings] = self.session
            self.session = None
        if len(sessions) > _MAX_SESSIONS:
            del sessions[next(iter(sessions))]  # the one that was used least recently

    def _take_session(self, shape: Shape, arrivals: Arrivals) -> GraphSession:
        session: GraphSession | None = self.decoding.sessions.pop((shape, self.settings), None)
        if session is None:
            return GraphSession(self.search, arrivals, shape)
        session.search = self.search  # which a step without a graph uses; the loop keeps the one that was captured
        return session

    def _shape(self, requests: Sequence[Request]) -> Shape:
        search, continues_input = self.search, self.search.model.continues_input
        limits = [request.max_new_tokens for request in requests]
        histories = [search.width(request) for request in requests]
        prompts = [request.length if continues_input else 1 for request in requests]
        slots = [prompt + n + STEPS_PER_GRAPH for prompt, n in zip(prompts, limits, strict=True)]
        sources = [0 if continues_input else request.length for request in requests]
        return Shape(len(requests), max(histories), max(slots), max(sources))


def _is_loose(session: Shape, shape: Shape, arrivals: Arrivals | None) -> bool:
    """Return whether so few sources are left that a smaller graph pays off."""
    return arrivals is None and shape.round_up().num_sources * _SHRINK <= session.num_sources


class GraphSession:
    """The tensors of decoding steps of one shape, and their graph."""

    def __init__(self, search: Search, arrivals: Arrivals, shape: Shape) -> None:
        """Allocate tensors of a shape with the sizes and dtypes of `arrivals`, and capture the steps."""
        self.search, self.shape = search, shape
        self.num_rows = shape.num_sources * search.rows_per_source
        # steps of many rows are long: the host may look after fewer of them whether some rows have ended
        self.num_steps = STEPS_PER_GRAPH if self.num_rows < _MANY_ROWS else STEPS_PER_GRAPH // 2
        decoder, stack_state = search.model.decoder, arrivals.state.layer_states
        assert isinstance(decoder, Stack)
        assert isinstance(stack_state, StackState)
        self.index = CacheIndex(self.num_rows, shape.cache_length, search.device)
        bias = bias_by_distance(decoder.relative_position_bias, shape.cache_length)
        self.caches = [IndexedKVCache(cache, self.index, bias) for cache in stack_state.caches]
        self.cross_kv = _static_key_values(stack_state.cross_kv, shape)
        self.position = torch.zeros(self.num_rows, dtype=torch.long, device=search.device)
        self.state = DecoderState(IndexedStackState([*self.caches], self.cross_kv, self.index), self.position)
        self.loop = type(arrivals.loop)(search, shape.num_sources, shape.width)
        self.slot = 0  # the device's `index.slot`, which the host knows without reading it
        self.starts: dict[int, int] = {}  # first slot of the sources that are being decoded
        # without a GPU the steps run eagerly, so that tests can compare them with the plain loop
        self.graph = self._capture() if search.device.type == "cuda" else None

    def load(self, slots: Sequence[int], arrivals: Arrivals, kept: Sequence[int]) -> None:
        """Put sources into slots, right-aligned to those that go on in the slots `kept`."""
        stack_state, rows_per_source = arrivals.state.layer_states, self.search.rows_per_source
        assert isinstance(stack_state, StackState)
        first = stack_state.caches[0]
        num_tokens = first.length - first.first
        self.starts = {slot: self.starts[slot] for slot in kept}
        if not kept:
            self.slot = num_tokens
            self.index.reset(num_tokens)
        elif num_tokens > self.slot:
            self._shift(self.slot - num_tokens)
        starts = [self.slot - first.length + padding for padding in first.left_padding]
        self.starts |= dict(zip(slots, starts[::rows_per_source], strict=True))
        sources = torch.tensor(slots, device=self.search.device)
        rows = source_rows(sources, rows_per_source)
        self.index.load(rows, starts)
        for cache, other in zip(self.caches, stack_state.caches, strict=True):
            cache.load(rows, other, self.slot)
        _load_key_values(self.cross_kv, stack_state.cross_kv, slots)
        self.position.index_copy_(0, rows, arrivals.state.position)
        self.loop.put(sources, arrivals.loop)

    def export(self, slots: Sequence[int]) -> Arrivals:
        """Return the sources in some slots as they would be after a prefill."""
        rows_per_source, first = self.search.rows_per_source, min(self.starts[slot] for slot in slots)
        sources = torch.tensor(slots, device=self.search.device)
        rows = source_rows(sources, rows_per_source)
        left_padding = [self.starts[slot] - first for slot in slots for _ in range(rows_per_source)]
        caches: list[KVCache] = [cache.export(rows, first, self.slot, left_padding) for cache in self.caches]
        cross_kv = [None if kv is None else kv.merge(sources, None) for kv in self.cross_kv]
        return Arrivals(self.loop.take(sources), DecoderState(StackState(caches, cross_kv), self.position[rows]))

    def free(self, slots: Sequence[int]) -> None:
        """Forget finished sources: their rows run along, but read nothing."""
        for slot in slots:
            del self.starts[slot]
        rows = source_rows(torch.tensor(slots, device=self.search.device), self.search.rows_per_source)
        self.index.starts.index_fill_(0, rows, self.slot)

    def replay(self) -> None:
        """Run the captured steps."""
        if self.slot + STEPS_PER_GRAPH > self.shape.cache_length:
            self._shift(min(self.starts.values(), default=self.slot))
        self.slot += self.num_steps
        if self.graph is not None:
            self.graph.replay()
            return
        for _ in range(self.num_steps):
            self._step()

    def _shift(self, offset: int) -> None:
        """Move the filled slots of all rows to the left, or with a negative offset to the right."""
        for cache in self.caches:
            cache.shift(offset)
        self.index.shift(offset)
        self.slot -= offset
        self.starts = {slot: start - offset for slot, start in self.starts.items()}

    def _step(self) -> None:
        logits, _ = self.search.model.step(self.loop.tokens, self.state)
        self.index.slot += 1
        self.position += 1
        attention = self.state.attention_weights() if self.search.watches_attention else None
        rows = self.loop.advance(logits, attention)
        if rows is not None:
            self.state.reorder(rows)

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()  # kernels are compiled and plans are made outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(self.num_steps):
                self._step()
        return graph


def _static_key_values(cross_kv: Sequence[KeyValues | None], shape: Shape) -> list[KeyValues | None]:
    """Allocate keys and values of the encoder output for a shape; all layers share the mask and the lengths."""
    num_sources, length = shape.num_sources, shape.cross_length
    mask: Tensor | None = None
    lengths = [length] * num_sources
    static: list[KeyValues | None] = []
    for kv in cross_kv:
        if kv is None:
            static.append(None)
            continue
        mask = kv.keys.new_zeros(num_sources, 1, 1, length) if mask is None else mask
        keys, values = (x.new_zeros(num_sources, x.shape[1], length, x.shape[3]) for x in (kv.keys, kv.values))
        static.append(KeyValues(keys, values, mask, lengths, watched=kv.watched))
    return static


def _load_key_values(
    static_kv: Sequence[KeyValues | None], cross_kv: Sequence[KeyValues | None], slots: Sequence[int]
) -> None:
    """Put the encoder output of sources into slots."""
    for layer, (static, kv) in enumerate(zip(static_kv, cross_kv, strict=True)):
        if static is None or kv is None:
            continue
        length, device = kv.keys.shape[2], kv.keys.device
        sources = torch.tensor(slots, device=device)
        static.keys[:, :, :length].index_copy_(0, sources, kv.keys)
        static.values[:, :, :length].index_copy_(0, sources, kv.values)
        if layer:
            continue
        assert static.mask is not None
        assert isinstance(static.lengths, list)
        for slot, source_length in zip(slots, kv.lengths, strict=True):
            static.lengths[slot] = source_length
        lengths = torch.tensor(kv.lengths, device=device)[:, None]  # [n, 1]
        is_padding = torch.arange(static.mask.shape[3], device=device) >= lengths
        rows = torch.zeros_like(static.mask[: len(slots)]).masked_fill(is_padding[:, None, None], float("-inf"))
        static.mask.index_copy_(0, sources, rows)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
