"""What all searches share: the rules for the next token, and the outputs of many sources, which come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.errors import InputError
from qkv.generation.config import GenerationConfig
from qkv.generation.logits_processors import (
    NEG_INF,
    PADDING,
    LogitsProcessor,
    allow_only,
    check_token_ids,
    make_processors,
)
from qkv.generation.request import Hypothesis, Request, StopCheck
from qkv.nn.decode_ops import RowTensors, append_best_token, best_token, top_tokens
from qkv.nn.kv_cache import source_rows
from qkv.nn.shell import Model


class Search:
    """The rules of a search, which are the same for all sources of a batch."""

    def __init__(
        self,
        model: Model,
        config: GenerationConfig,
        prefix_ids: Sequence[int] = (),
        stop_check: StopCheck | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            model: a model in eval mode that generates.
            config: how to search.
            prefix_ids: tokens that every output begins with.
            stop_check: finds stop strings in the text of the candidates of a beam search.
        """
        if config.coverage_penalty and model.continues_input:
            raise InputError(
                f"coverage_penalty: this {model.spec.family} continues its input and attends to no source; leave it out"
            )
        self.model, self.config, self.device = model, config, model.device
        self.rows_per_source = config.n_best if config.do_sample else config.num_beams
        self.eos_tokens = dict.fromkeys([model.spec.eos_id, *config.stop_token_ids])  # tokens that end an output
        self.eos_ids = torch.tensor(list(self.eos_tokens), device=self.device)  # [E] the same on the device
        last_token = config.forced_eos_token_id
        self.forced_last = None if last_token is None else torch.tensor([last_token], device=self.device)
        self.suppressed = torch.tensor(model.spec.suppress_tokens, dtype=torch.long, device=self.device)
        self.stop_check = stop_check
        self.watches_attention = config.return_alignments or config.coverage_penalty > 0
        self.processors = self._make_processors(prefix_ids)

    def prompt_length(self, request: Request) -> int:
        """Return how many tokens precede the first new one in a history; 0: no rule reads it."""
        if not self.processors:
            return 0
        return request.length if self.model.continues_input else 1

    def width(self, request: Request) -> int:
        """Return how many entries a row of a request has: its tokens, or those of its source if its coverage counts."""
        num_tokens = self.prompt_length(request) + request.max_new_tokens + 1
        return max(num_tokens, request.length) if self.config.coverage_penalty else num_tokens

    def check_vocabulary(self, logits: Tensor) -> None:
        """Refuse token ids that are not in the vocabulary."""
        check_token_ids(self.config, logits.shape[-1])

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the model's log-probabilities of the next token.  # [R, vocabulary]"""
        return next_token_log_probs(logits, self.suppressed)

    def append_best_token(self, logits: Tensor, rows: RowTensors) -> bool:
        """Append the model's most probable token to each row by one kernel, on a GPU; return whether it did."""
        return append_best_token(_mask_tokens(logits, self.suppressed), rows, self.eos_ids)

    def best_token(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's most probable token of each row and its log-probability.  # [R], [R]"""
        return best_token(_mask_tokens(logits, self.suppressed))

    def top_tokens(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the model's k most probable tokens of each row: log-probabilities and tokens.  # [R, k], [R, k]"""
        return top_tokens(_mask_tokens(logits, self.suppressed), k)

    def process_logits(self, logits: Tensor, history: Tensor, num_tokens: Tensor, num_generated: Tensor) -> Tensor:
        """Apply the logits processors to logits, as greedy search and sampling do."""
        return self.process(_mask_tokens(logits, self.suppressed).float(), history, num_tokens, num_generated)

    def process(self, scores: Tensor, history: Tensor, num_tokens: Tensor, num_generated: Tensor) -> Tensor:
        """Apply the logits processors to scores [R, vocabulary]; see `LogitsProcessor`."""
        for processor in self.processors:
            scores = processor(scores, history, num_tokens, num_generated)
        # without processors they are normalized already
        return torch.log_softmax(scores, -1) if self.config.renormalize_logits and self.processors else scores

    def force_last(self, scores: Tensor, is_last: Tensor) -> Tensor:
        """Allow only the forced last token in rows that reach their maximum length, `is_last` [R]."""
        return scores if self.forced_last is None else allow_only(scores, self.forced_last, is_last)

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Return which tokens end an output."""
        return (tokens[..., None] == self.eos_ids).any(-1)

    def strip_end(self, tokens: list[int]) -> list[int]:
        """Return tokens up to the first EOS."""
        return tokens[: next((i for i, token in enumerate(tokens) if token in self.eos_tokens), len(tokens))]

    def prompts(self, requests: Sequence[Request], width: int) -> Tensor:
        """Return the tokens before the first new one in each row, then padding.  # [R, width]"""
        history = torch.full((len(requests), width), PADDING, device=self.device)
        if self.processors and not self.model.continues_input:
            history[:, 0] = self.model.spec.bos_id
        elif self.processors:
            for row, request in enumerate(requests):
                assert isinstance(request.source, Tensor)  # a decoder-only model encodes no source
                history[row, : request.length] = request.source
        return history.repeat_interleave(self.rows_per_source, 0)

    def _make_processors(self, prefix_ids: Sequence[int]) -> list[LogitsProcessor]:
        forced_bos = self.config.forced_bos_token_id
        first_tokens = [*([] if forced_bos is None or self.model.continues_input else [forced_bos]), *prefix_ids]
        known = [token for token in self.eos_tokens if token >= 0]  # GPT has no EOS: its id is -1
        eos_ids = torch.tensor(known, dtype=torch.long, device=self.device)
        return make_processors(self.config, eos_ids=eos_ids, first_tokens=first_tokens)


@dataclass
class RowTable:
    """Tensors with the same first axis, whose rows enter, leave and are replaced together."""

    FILL: ClassVar[dict[str, int]] = {}  # columns with one entry per token on their last axis: value of empty entries

    def columns(self) -> list[Tensor]:
        """Return all fields."""
        return [getattr(self, field.name) for field in fields(self)]

    def take(self, rows: Tensor) -> Self:
        """Return a table of some rows."""
        return type(self)(*(column.index_select(0, rows) for column in self.columns()))

    def extend(self, other: Self) -> Self:
        """Return a table of these rows and those of another one."""
        return type(self)(*(torch.cat(pair) for pair in zip(self.columns(), other.columns(), strict=True)))

    def put(self, rows: Tensor, other: Self) -> None:
        """Replace rows in place."""
        for column, new in zip(self.columns(), other.columns(), strict=True):
            column.index_copy_(0, rows, new)

    def widen(self, width: int) -> Self:
        """Return a table with space for `width` tokens."""

        def resize(name: str, column: Tensor) -> Tensor:
            missing = width - column.shape[-1] if name in self.FILL else 0
            return F.pad(column, (0, missing), value=self.FILL[name]) if missing > 0 else column

        return type(self)(*(resize(field.name, getattr(self, field.name)) for field in fields(self)))


class Loop(ABC):
    """The outputs of sources, which grow by one token per step, each row at a step of its own.

    `advance` updates tensors in place and reads nothing on the host, so that it can be captured as part of a CUDA
    graph. Between two steps sources leave and enter.
    """

    TABLES: ClassVar[tuple[str, ...]] = ()  # attributes of type `RowTable`

    def __init__(self, search: Search, num_sources: int, width: int) -> None:
        """Make a loop of `num_sources` empty sources, with space for `width` tokens in each row."""
        self.search, self.num_sources, self.width = search, num_sources, width

    @classmethod
    def start(cls, search: Search, requests: Sequence[Request], width: int = 0) -> Self:
        """Make a loop of requests, with space for at least `width` tokens in each row."""
        # one column more, into which finished rows write
        needed = max(search.width(request) for request in requests)
        loop = cls(search, len(requests), max(width, needed))
        loop._load(requests)
        return loop

    @property
    @abstractmethod
    def tokens(self) -> Tensor:
        """The last token of each row.  # [R]"""

    @abstractmethod
    def _load(self, requests: Sequence[Request]) -> None:
        """Start anew with one request per source."""

    @abstractmethod
    def advance(self, logits: Tensor, attention: Tensor | None = None) -> Tensor | None:
        """Add one token to each row; return the row that each row continues, or None if each continues itself.

        Args:
            logits: those of the next token.  # [R, vocabulary]
            attention: weights of the source tokens in this step, if they are watched.  # [R, M]
        """

    @abstractmethod
    def done(self) -> list[bool]:
        """Return whether all outputs of each source are complete."""

    @abstractmethod
    def results(self, sources: Sequence[int]) -> list[list[Hypothesis]]:
        """Return the outputs of some sources, best first."""

    def take(self, sources: Tensor) -> Self:
        """Return a loop of some sources."""
        selected = copy(self)
        selected.num_sources = len(sources)
        for name in self.TABLES:
            table = getattr(self, name)
            setattr(selected, name, table.take(self._table_rows(table, sources)))
        return selected

    def extend(self, other: Loop) -> None:
        """Append the sources of another loop."""
        self.num_sources += other.num_sources
        self.width = max(self.width, other.width)
        for name in self.TABLES:
            table, new_table = getattr(self, name).widen(self.width), getattr(other, name).widen(self.width)
            setattr(self, name, table.extend(new_table))

    def put(self, sources: Tensor, other: Loop) -> None:
        """Replace sources in place by those of another loop."""
        for name in self.TABLES:
            table = getattr(self, name)
            table.put(self._table_rows(table, sources), getattr(other, name).widen(self.width))

    def _table_rows(self, table: RowTable, sources: Tensor) -> Tensor:
        return source_rows(sources, len(table.columns()[0]) // max(1, self.num_sources))


def next_token_log_probs(logits: Tensor, suppressed: Tensor) -> Tensor:
    """Return the log-probabilities of the next token, without suppressed ones [S].  # [R, vocabulary]"""
    return torch.log_softmax(_mask_tokens(logits, suppressed).float(), -1)


def _mask_tokens(logits: Tensor, suppressed: Tensor) -> Tensor:
    """Mask suppressed tokens: before the softmax, so that Marian's padding token gets no probability."""
    return logits.index_fill(-1, suppressed, NEG_INF) if len(suppressed) else logits


def max_new_tokens(model: Any, source_length: int, config: GenerationConfig) -> int:
    """Return the maximum number of new tokens for a source."""
    if config.max_new_tokens is not None or config.max_length is None:
        limits: list[int] = model.max_new_tokens([source_length], config.max_new_tokens)
        return limits[0]
    num_before = source_length if model.continues_input else 1
    if num_before >= config.max_length:
        raise InputError(
            f"max_length={config.max_length} leaves no room after {num_before} tokens; set max_new_tokens instead"
        )
    available: list[int] = model.max_new_tokens([source_length], config.max_length)
    return min(available[0], config.max_length - num_before)
