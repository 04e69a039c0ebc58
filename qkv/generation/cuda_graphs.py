"""Decoding steps as CUDA graphs: the model's step and the choice of tokens, replayed without work on the host.

A step of a small model is a few hundred kernels, each shorter than its launch by the host. Graphs are captured for
buckets of rows and lengths, without a compiler, and reused by later searches of the same kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv.generation.beam_search import BeamLoop
from qkv.generation.decoding_model import DecodingModel
from qkv.generation.sampling import TokenLoop
from qkv.generation.search import Hypothesis, Search
from qkv.nn.attention import Attention
from qkv.nn.indexed_cache import HAS_KERNEL, CacheIndex, IndexedKVCache, bias_by_distance
from qkv.nn.kv_cache import KeyValues
from qkv.nn.shell import DecoderState
from qkv.nn.stack import IndexedStackState, Stack, StackState

_LENGTH_BUCKET, _SOURCE_BUCKET = 128, 64
_MAX_SESSIONS = 8
_STEPS_PER_GRAPH = 8  # steps between two checks for the end
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def supports_graphs(search: Search) -> bool:
    """Return whether a search can be captured: on a GPU, with a Transformer decoder and no rules for single steps."""
    decoder = getattr(search.model, "decoder", None)
    if search.device.type != "cuda" or not HAS_KERNEL or not isinstance(decoder, Stack):
        return False
    if search.processors or search.stop_check is not None:
        return False
    attentions = [module for module in decoder.modules() if isinstance(module, Attention)]
    return all(
        attention.hook is None
        and attention.score.is_dot
        and attention.spec.k_head_dim == attention.spec.effective_v_head_dim
        for attention in attentions
    )


def run_with_graphs(
    decoding: DecodingModel, search: Search, sample_ids: Sequence[int] | None
) -> list[list[Hypothesis]]:
    """Generate with captured steps; the same tokens as `qkv.generation.search.run` but for rounding."""
    logits, state = search.prefill()
    session = _get_session(decoding, search, state)
    loop = session.loop
    loop.load(search, sample_ids)
    loop.advance(session.pad_rows(logits), _NoState())
    session.load(state)
    steps_left = search.max_length - 1
    while steps_left > 0 and not loop.is_done():
        session.replay()
        steps_left -= _STEPS_PER_GRAPH
    results: list[list[Hypothesis]] = loop.results()
    return results


class _NoState(DecoderState):
    """State of the first choice: the rows of a source are still equal, so their order does not matter."""

    def __init__(self) -> None:
        super().__init__(StackState([], []), 0)

    def reorder(self, indices: Tensor) -> None:
        """Do nothing."""


def _get_session(decoding: DecodingModel, search: Search, state: DecoderState) -> GraphSession:
    stack_state = state.layer_states
    assert isinstance(stack_state, StackState)
    num_sources = next((n for n in _ROW_BUCKETS if n >= len(search.source)), len(search.source))
    cross_kv = stack_state.cross_kv[0]
    cross_length = 0 if cross_kv is None else _round_up(cross_kv.keys.shape[2], _SOURCE_BUCKET)
    max_new_tokens = _round_up(search.max_length, _LENGTH_BUCKET)
    cache_length = stack_state.caches[0].length + search.max_length + _STEPS_PER_GRAPH
    shape = num_sources, max_new_tokens, _round_up(cache_length, _LENGTH_BUCKET), cross_length
    key: Hashable = (*shape, search.rows_per_source, _capture_settings(search))
    sessions = decoding.sessions
    if key not in sessions:
        if len(sessions) >= _MAX_SESSIONS:
            del sessions[next(iter(sessions))]  # the one that was used least recently
        sessions[key] = GraphSession(search, stack_state, *shape)
    else:
        sessions[key] = sessions.pop(key)
    session: GraphSession = sessions[key]
    return session


def _capture_settings(search: Search) -> Hashable:
    """Return the settings that are constants of a captured search."""
    config = search.config
    sampling = config.do_sample, config.temperature, config.top_k, config.top_p, config.min_p, config.typical_p
    beams = config.num_beams, config.num_beam_groups, config.diversity_penalty, config.length_penalty
    ends = config.early_stopping, config.unfinished_beams, config.stop_token_ids, config.forced_eos_token_id
    return *sampling, *beams, *ends


class GraphSession:
    """The tensors of decoding steps of one shape, and their graph."""

    def __init__(
        self,
        search: Search,
        stack_state: StackState,
        num_sources: int,
        max_new_tokens: int,
        cache_length: int,
        cross_length: int,
    ) -> None:
        """Allocate the tensors and capture the steps."""
        self.model, self.num_rows = search.model, num_sources * search.rows_per_source
        self.capture_search = search  # its tensors are part of the graph
        decoder = search.model.decoder
        assert isinstance(decoder, Stack)
        self.index = CacheIndex(self.num_rows, cache_length, search.device)
        bias = bias_by_distance(decoder.relative_position_bias, cache_length)
        caches = [IndexedKVCache(cache, self.index, bias) for cache in stack_state.caches]
        cross_kv = [_static_key_values(kv, num_sources, cross_length) for kv in stack_state.cross_kv]
        self.position = torch.zeros(self.num_rows, dtype=torch.long, device=search.device)
        self.state = DecoderState(IndexedStackState([*caches], cross_kv, self.index), self.position)
        loop_class = BeamLoop if search.config.num_beams > 1 else TokenLoop
        self.loop: Any = loop_class(search, self.num_rows, max_new_tokens + _STEPS_PER_GRAPH)
        # without a GPU the steps run eagerly, so that tests can compare them with the plain loop
        self.graph = self._capture() if search.device.type == "cuda" else None

    def load(self, state: DecoderState) -> None:
        """Copy the state after the prefill into the tensors that the graph reads."""
        source = state.layer_states
        assert isinstance(source, StackState)
        static = self.state.layer_states
        assert isinstance(static, StackState)
        first = source.caches[0]
        self.index.reset(first.length, first.left_padding)
        for cache, other in zip(static.caches, source.caches, strict=True):
            assert isinstance(cache, IndexedKVCache)
            cache.load(other)
        for kv, other_kv in zip(static.cross_kv, source.cross_kv, strict=True):
            if kv is not None and other_kv is not None:
                _copy_key_values(kv, other_kv)
        position = state.position
        self.position.zero_()
        if isinstance(position, Tensor):
            self.position[: len(position)] = position
        else:
            self.position.fill_(position)

    def replay(self) -> None:
        """Run the captured steps."""
        if self.graph is not None:
            self.graph.replay()
            return
        for _ in range(_STEPS_PER_GRAPH):
            self._step()

    def pad_rows(self, logits: Tensor) -> Tensor:
        """Append rows of zeros to logits, up to the rows of the graph."""
        return torch.nn.functional.pad(logits, (0, 0, 0, self.num_rows - len(logits)))

    def _step(self) -> None:
        logits, _ = self.model.step(self.loop.tokens, self.state)
        self.index.slot += 1
        self.position += 1
        self.loop.advance(logits, self.state)

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()  # kernels are compiled and plans are made outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_STEPS_PER_GRAPH):
                self._step()
        return graph


def _static_key_values(kv: KeyValues | None, num_sources: int, length: int) -> KeyValues | None:
    """Allocate keys and values of the encoder output for a bucket of sources and lengths."""
    if kv is None:
        return None
    _, heads, _, size = kv.keys.shape
    keys = kv.keys.new_zeros(num_sources, heads, length, size)
    values = kv.values.new_zeros(num_sources, heads, length, kv.values.shape[3])
    return KeyValues(keys, values, kv.keys.new_zeros(num_sources, 1, 1, length), [length] * num_sources)


def _copy_key_values(static: KeyValues, kv: KeyValues) -> None:
    num_sources, _, length, _ = kv.keys.shape
    static.keys[:num_sources, :, :length].copy_(kv.keys)
    static.values[:num_sources, :, :length].copy_(kv.values)
    assert static.mask is not None
    static.mask.zero_()
    static.mask[:num_sources, ..., length:] = float("-inf")
    if kv.mask is not None:
        static.mask[:num_sources, ..., :length].masked_fill_(~kv.mask, float("-inf"))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
