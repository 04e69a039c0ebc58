"""The engine that generates all text: requests go in, tokens come out as they are made.

Requests wait until there is room in a batch, are read together with others, and leave the batch as soon as they are
finished, while others go on (continuous batching). The outputs of a request depend on the request only, not on what
else is in the batch.

    engine = Engine(model)
    requests = [engine.submit(Request(torch.tensor(ids), config)) for ids in sources]
    while not all(request.is_done for request in requests):
        engine.step()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.data.batching import evaluation_batches
from qkv.errors import InputError
from qkv.generation.batch import Arrivals, Batch, PlainBatch
from qkv.generation.config import GenerationConfig, validate_search
from qkv.generation.cuda_graphs import GraphBatch, supports_graphs
from qkv.generation.decoding_model import DecodingModel, check_dtype, decoding_model, host_model
from qkv.generation.ensemble import Ensemble
from qkv.generation.request import Request
from qkv.generation.sampling import TokenLoop
from qkv.generation.search import Search, max_new_tokens
from qkv.nn.block import Block
from qkv.nn.model import EncoderDecoder
from qkv.nn.ragged import Ragged
from qkv.nn.shell import Model
from qkv.nn.stack import EncoderOutput, Stack

_TOKENS_PER_ROW = 16  # a batch of so many tokens may have one row
_HOST_CACHE_BYTES = 1 << 30
_DEVICE_CACHE_FRACTION = 0.25  # of the memory of a GPU
_SPARSE = 8  # finished sources are dropped when they are at least this fraction of a batch
_WINDOW_SIZES = (64, 512, 4096)  # requests that are sorted by length together; the first ones are small: output soon


class Engine:
    """Generates for requests of one model. One thread at a time may use it."""

    def __init__(
        self,
        model: Model,
        *,
        max_tokens: int = 8192,
        use_graphs: bool | None = None,
        begin_batch: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Make an engine.

        Args:
            model: a model in eval mode that generates.
            max_tokens: source tokens that are read together, times the rows of each source; the number of rows that are
                decoded together is a 16th of it.
            use_graphs: decode with the static tensors of CUDA graphs; None: where they are supported.
            begin_batch: called with the sample ids of a batch before it is read; batches are then decoded one after
                the other, as recorded attention needs it.
        """
        self.model, self.max_tokens, self.use_graphs, self.begin_batch = model, max_tokens, use_graphs, begin_batch
        self._lanes: dict[Hashable, _Lane] = {}
        # most requests have the settings of the one before, which need not be checked again
        self._last_settings: tuple[GenerationConfig | None, Sequence[int]] = (None, ())
        self._last_key: Hashable = None

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not been read yet."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    @property
    def is_idle(self) -> bool:
        """Whether all requests are done."""
        return not self._lanes

    def submit(self, request: Request) -> Request:
        """Let a request wait for room in a batch, and return it; a bad request raises `InputError`."""
        settings = request.config, request.prefix_ids
        if not all(map(is_, settings, self._last_settings)):
            validate_search(request.config)
            self._last_settings, self._last_key = settings, _lane_key(request)
        if request.is_image:
            request.length = self.model.max_input_length
        if not request.length:
            raise InputError("the source is empty; give at least one token")
        request.max_new_tokens = max_new_tokens(self.model, request.length, request.config)
        if request.streams and request.rows_per_source > 1:
            raise InputError("streaming needs one output that only grows: greedy search, or sampling with n_best=1")
        key = self._last_key
        if key not in self._lanes:
            self._lanes[key] = _Lane(self, request, key)
        self._lanes[key].waiting.append(request)
        return request

    @torch.inference_mode()
    def encode(self, sources: Sequence[Tensor], config: GenerationConfig) -> list[EncoderOutput]:
        """Encode sources once, for requests of an encoder-decoder with settings of the same `dtype`."""
        model, _ = _decoding_model(self, config, num_steps=0)
        if not isinstance(model, EncoderDecoder):
            raise InputError(f"{model.spec.family}: only the source of an encoder-decoder can be encoded for later use")
        lengths = np.array([len(source) for source in sources], dtype=np.int64)
        encoded: dict[int, EncoderOutput] = {}
        for rows in evaluation_batches(lengths, self.max_tokens):
            output = model.encode(Ragged.pack([sources[i] for i in rows]).to(model.device))
            states = output.final_state
            for row, (i, hidden) in enumerate(zip(rows, output.hidden.sequences(), strict=True)):
                state = None if states is None else states[row : row + 1]
                encoded[int(i)] = EncoderOutput(Ragged.pack([hidden]), state)
        return [encoded[i] for i in range(len(sources))]

    def cancel(self, request: Request) -> None:
        """Generate nothing more for a request; its rows are free at the next step."""
        request.is_canceled = not request.is_done
        for lane in self._lanes.values():
            lane.has_canceled = True

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Read waiting requests or generate tokens, and return the requests that are finished."""
        finished = []
        for key, lane in list(self._lanes.items()):
            finished += lane.step()
            if lane.is_idle:
                lane.release()
                del self._lanes[key]
        return finished

    def run(
        self, requests: Iterable[Request], windows: Sequence[int] = _WINDOW_SIZES, *, keep_errors: bool = False
    ) -> Iterator[Request]:
        """Yield requests in their order when they are finished.

        They are taken from `requests` in windows of bounded size while others are being decoded. A window is sorted by
        length, every other one from short to long, so that neighbors in a batch have similar lengths.

        Args:
            requests: requests that were not submitted; finished ones pass through.
            windows: number of requests in the first windows, and in all others.
            keep_errors: yield a bad request with its `error` instead of raising it.
        """
        source, pending = iter(requests), deque[Request]()
        sizes = chain(windows, repeat(windows[-1]))
        is_exhausted, long_first = False, True
        while True:
            if not self.num_waiting and not is_exhausted and len(pending) <= windows[-1]:
                window = list(islice(source, next(sizes)))
                is_exhausted = not window
                pending.extend(window)
                self._submit_all(sorted(window, key=lambda request: request.length, reverse=long_first), keep_errors)
                long_first = not long_first
            while pending and pending[0].is_done:
                yield pending.popleft()
            if not pending and is_exhausted:
                return
            self.step()

    def _submit_all(self, requests: Sequence[Request], keep_errors: bool) -> None:
        for request in requests:
            try:
                if not request.is_done:
                    self.submit(request)
            except InputError as error:
                if not keep_errors:
                    raise
                request.error = error

    def close(self) -> None:
        """Forget all requests."""
        for lane in self._lanes.values():
            lane.release()
        self._lanes.clear()


class _Lane:
    """Requests that can be decoded in one batch."""

    def __init__(self, engine: Engine, request: Request, key: Hashable) -> None:
        self.waiting: deque[Request] = deque()
        self._slots: dict[int, Request] = {}  # the sources of the batch that are not finished
        self._begin_batch = engine.begin_batch
        self._search, self._batch = _make_batch(engine, request, key)
        self._max_tokens = engine.max_tokens
        self._max_cache_tokens = _max_cache_tokens(self._search.model)
        self._used = 0.0  # fraction of a batch that the sources of the batch take
        self._has_free_slots = False
        self.has_canceled = False

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self._slots

    def step(self) -> list[Request]:
        """Admit requests or generate tokens, and return the requests that are finished."""
        if self.has_canceled:
            self._drop_canceled()
        admitted = self._next_requests()
        if admitted:
            self._place(admitted)
        elif not self._slots:
            return []
        else:
            is_sparse = len(self._slots) * _SPARSE <= self._batch.loop.num_sources * (_SPARSE - 1)
            if self._has_free_slots and is_sparse and self._begin_batch is None:
                self._place([])
            self._batch.advance()
        return self._harvest()

    def release(self) -> None:
        """Give back what other batches can use."""
        self._batch.release()

    def _drop_canceled(self) -> None:
        self.has_canceled = False
        self.waiting = deque(request for request in self.waiting if not request.is_canceled)
        self._free([slot for slot, request in self._slots.items() if request.is_canceled])

    def _free(self, slots: Sequence[int]) -> None:
        self._used -= sum(self._share(self._slots.pop(slot)) for slot in slots)
        if slots:
            self._batch.free(slots)
            self._has_free_slots = True

    def _next_requests(self) -> list[Request]:
        """Take the waiting requests that there is room for, unless more room would be worth waiting for."""
        if not self.waiting or (self._begin_batch is not None and self._slots):
            return []
        is_encoded = isinstance(self.waiting[0].source, EncoderOutput)
        count, added, num_tokens = 0, 0.0, 0
        for request in self.waiting:
            share, cost = self._share(request), request.length * request.rows_per_source
            is_full = self._used + added + share > 1 or num_tokens + cost > self._max_tokens
            is_first = not count and not self._slots  # a request that is larger than a batch has one of its own
            if (is_full and not is_first) or isinstance(request.source, EncoderOutput) != is_encoded:
                break
            count, added, num_tokens = count + 1, added + share, num_tokens + cost
        is_worth = added * self._batch.refill >= 1 or num_tokens * 2 >= self._max_tokens
        if self._slots and count < len(self.waiting) and not is_worth:
            return []
        return [self.waiting.popleft() for _ in range(count)]

    def _share(self, request: Request) -> float:
        """Return the fraction of a batch that a request takes."""
        cache_tokens = request.length + request.max_new_tokens
        return request.rows_per_source * max(_TOKENS_PER_ROW / self._max_tokens, cache_tokens / self._max_cache_tokens)

    def _place(self, admitted: Sequence[Request]) -> None:
        """Read new requests, and let them enter the batch in place of finished ones."""
        kept = sorted(self._slots)
        requests = [*(self._slots[slot] for slot in kept), *admitted]
        if admitted and self._begin_batch is not None:
            self._begin_batch([request.sample_id for request in admitted])
        try:
            arrivals = Arrivals.read(self._search, admitted) if admitted else None
        except InputError:  # of a setting that all of them have
            for request in admitted:
                request.is_canceled = True
            raise
        slots = self._batch.place(kept, requests, arrivals)
        self._slots, self._has_free_slots = dict(zip(slots, requests, strict=True)), False
        self._used = sum(map(self._share, requests))

    def _harvest(self) -> list[Request]:
        """Read what the host needs to know of the batch, and free the slots of finished requests."""
        loop = self._batch.loop
        if isinstance(loop, TokenLoop):
            self._read_tokens(loop)
        done = loop.done()
        slots = [slot for slot in sorted(self._slots) if done[slot]]
        finished = [self._slots[slot] for slot in slots]
        for request, outputs in zip(finished, loop.results(slots) if slots else (), strict=True):
            request.outputs = outputs
        self._free(slots)
        return finished

    def _read_tokens(self, loop: TokenLoop) -> None:
        """Read the tokens of streams, and end outputs whose text contains a stop string."""
        slots = [slot for slot, request in self._slots.items() if request.streams or request.stop_check is not None]
        for slot, rows in zip(slots, loop.generated(slots) if slots else (), strict=True):
            request = self._slots[slot]
            for row, tokens in enumerate(rows):
                length = request.stop_length(row, tokens)
                if length is not None:
                    loop.cut(slot, row, length)
                    rows[row] = tokens[:length]
            request.tokens = rows[0]


def _make_batch(engine: Engine, request: Request, key: Hashable) -> tuple[Search, Batch]:
    """Return the rules of requests like this one, and an empty batch for them."""
    config = request.config
    stop_check = request.stop_check if config.num_beams > 1 else None  # else `_Lane` finds stop strings between steps
    num_steps = request.max_new_tokens
    model, decoding = _decoding_model(engine, config, num_steps, has_stop_check=stop_check is not None)
    search = Search(model, config, request.prefix_ids, stop_check)
    if decoding is None:
        return search, PlainBatch(search)
    return search, GraphBatch(decoding, search, (key, model.spec.eos_id, model.spec.suppress_tokens))


def _decoding_model(
    engine: Engine, config: GenerationConfig, num_steps: int, *, has_stop_check: bool = False
) -> tuple[Model, DecodingModel | None]:
    """Return the model that decodes for a config: itself or a copy, with what is captured of the copy."""
    model = engine.model
    if isinstance(model, Ensemble):
        model = model.with_mean(config.ensemble)
    check_dtype(model, config.dtype)
    use_graphs = engine.use_graphs
    if use_graphs is None:
        use_graphs = not has_stop_check and supports_graphs(model)
    if not use_graphs:
        return host_model(model, config.dtype, num_steps), None
    decoding = decoding_model(model, torch.float32 if config.dtype == "float32" else torch.bfloat16)
    return decoding.model, decoding


# settings that may differ between the requests of a batch -> value that stands for all
_PER_REQUEST: Mapping[str, Any] = {
    "seed": 0,
    "max_new_tokens": None,
    "max_length": None,
    "forced_prefix": "",
    "batch_tokens": 1,
    "on_too_long": "refuse",
    "on_unknown": "refuse",
    "parse_special_tokens": False,
}


def _lane_key(request: Request) -> Hashable:
    """Return what must be equal in a batch."""
    per_request = dict(_PER_REQUEST)
    if request.config.num_beams == 1:
        per_request["stop_strings"] = ()
    return replace(request.config, **per_request), tuple(request.prefix_ids)


def _max_cache_tokens(model: Model) -> int:
    """Return how many tokens the KV caches of a batch may hold."""
    if isinstance(model, Ensemble):
        return max(1, min(map(_max_cache_tokens, model.models)) // len(model.models))
    budget, device = _HOST_CACHE_BYTES, model.device
    if device.type == "cuda":
        budget = int(torch.cuda.get_device_properties(device).total_memory * _DEVICE_CACHE_FRACTION)
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, Stack):
        return budget
    attentions = [block.self_attention for block in decoder.blocks if isinstance(block, Block)]
    numbers = sum(a.heads * (a.score.precomputed_dim + a.spec.effective_v_head_dim) for a in attentions)
    return max(1, budget // (4 * numbers))
