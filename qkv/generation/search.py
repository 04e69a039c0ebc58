"""A batch of sources to generate for: limits, rules for the next token, and ends, which all searches share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
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
from qkv.nn import Ragged
from qkv.nn.decode_ops import best_token
from qkv.nn.shell import DecoderState, Model

# whether the text of each sequence of generated tokens contains a stop string
StopCheck = Callable[[list[list[int]]], list[bool]]


@dataclass(frozen=True)
class Hypothesis:
    """One generated output."""

    tokens: list[int]  # without EOS
    score: float  # sum of log-probabilities, EOS included
    finished: bool = True  # False: the maximum length came before EOS
    token_log_probs: tuple[float, ...] = ()  # of the tokens, and of EOS if it was generated


class Loop(Protocol):
    """The outputs of a search, which grow by one token per step."""

    tokens: Tensor  # the last token of each row [R]

    def load(self, search: Search, sample_ids: Sequence[int] | None = None) -> None:
        """Start anew for a search."""

    def advance(self, logits: Tensor, state: DecoderState) -> None:
        """Add one token to each row."""

    def is_done(self) -> bool:
        """Return whether all outputs are complete."""
        ...

    def results(self) -> list[list[Hypothesis]]:
        """Return the outputs of each source, best first."""
        ...


class Search:
    """A batch of sources with `rows_per_source` adjacent rows each."""

    def __init__(
        self,
        model: Model,
        source: Ragged,
        config: GenerationConfig,
        rows_per_source: int,
        prefix_ids: Sequence[int] = (),
        stop_check: StopCheck | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            model: a model in eval mode that generates.
            source: token ids of the sources, or of the prompts that a decoder continues.
            config: how to search.
            rows_per_source: beams or samples per source.
            prefix_ids: tokens that every output begins with.
            stop_check: finds stop strings in the text of generated tokens.
        """
        self.model, self.source, self.config, self.rows_per_source = model, source, config, rows_per_source
        self.device = source.values.device
        self.max_lengths = max_new_tokens(model, source.layout.lengths_list, config)
        self.eos_tokens = dict.fromkeys([model.spec.eos_id, *config.stop_token_ids])  # tokens that end an output
        self.eos_ids = torch.tensor(list(self.eos_tokens), device=self.device)  # [E] the same on the device
        last_token = config.forced_eos_token_id
        self.forced_last = None if last_token is None else torch.tensor([last_token], device=self.device)
        self.suppressed = torch.tensor(model.spec.suppress_tokens, dtype=torch.long, device=self.device)
        self.stop_check = stop_check
        self.num_generated = 0  # tokens of each row so far; `run` counts them
        limits = torch.tensor(self.max_lengths, device=self.device)
        self.row_limits = limits.repeat_interleave(rows_per_source)  # [R]
        self.processors = self._make_processors(prefix_ids)
        self.prompts = self._prompts() if self.processors else None  # [R, P]

    @property
    def num_rows(self) -> int:
        """Number of rows of all sources."""
        return len(self.source) * self.rows_per_source

    @property
    def max_length(self) -> int:
        """Maximum number of new tokens of any row."""
        return max(self.max_lengths)

    def prefill(self) -> tuple[Tensor, DecoderState]:
        """Read the sources and return the logits of the first token of each row.  # [R, vocabulary]"""
        logits, state = self.model.prefill(self.source, self.rows_per_source, self.max_length)
        check_token_ids(self.config, logits.shape[-1])
        return logits, state

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the model's log-probabilities of the next token.  # [R, vocabulary]"""
        return next_token_log_probs(logits, self.suppressed)

    def best_token(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's most probable token of each row and its log-probability.  # [R], [R]"""
        return best_token(_mask_tokens(logits, self.suppressed))

    def process_logits(self, logits: Tensor, generated: Tensor) -> Tensor:
        """Apply the logits processors to logits, as greedy search and sampling do."""
        return self.process(_mask_tokens(logits, self.suppressed).float(), generated)

    def process(self, scores: Tensor, generated: Tensor) -> Tensor:
        """Apply the logits processors to scores [R, vocabulary]; `generated` [R, N] has the tokens so far."""
        if self.prompts is not None:
            history = torch.cat([self.prompts, generated[:, : self.num_generated]], 1)  # [R, P + n]
            for processor in self.processors:
                scores = processor(scores, history, self.num_generated)
        # without processors they are normalized already
        return torch.log_softmax(scores, -1) if self.config.renormalize_logits and self.processors else scores

    def force_last(self, scores: Tensor, is_last: Tensor) -> Tensor:
        """Allow only the forced last token in rows that reach their maximum length, `is_last` [R, 1]."""
        return (
            scores if self.forced_last is None else torch.where(is_last, allow_only(scores, self.forced_last), scores)
        )

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Return which tokens end an output."""
        return (tokens[..., None] == self.eos_ids).any(-1)

    def ends(self, tokens: Tensor, generated: Tensor) -> Tensor:
        """Return which rows end with their new token [...]: EOS, or a stop string in their text.

        `generated` [..., N] has the tokens so far, the new one included.
        """
        is_end = self.is_eos(tokens)
        if self.stop_check is None:
            return is_end
        length = self.num_generated + 1
        sequences = generated[..., :length].reshape(-1, length).tolist()
        return is_end | torch.tensor(self.stop_check(sequences), device=tokens.device).view(tokens.shape)

    def strip_end(self, tokens: list[int]) -> list[int]:
        """Return tokens up to the first EOS."""
        return tokens[: next((i for i, token in enumerate(tokens) if token in self.eos_tokens), len(tokens))]

    def _make_processors(self, prefix_ids: Sequence[int]) -> list[LogitsProcessor]:
        layout, continues_input = self.source.layout, self.model.continues_input
        prompt_lengths = layout.lengths if continues_input else torch.ones_like(layout.lengths)
        forced_bos = self.config.forced_bos_token_id
        return make_processors(
            self.config,
            eos_ids=self.eos_ids,
            prompt_lengths=prompt_lengths.repeat_interleave(self.rows_per_source),
            first_tokens=[*([] if forced_bos is None or continues_input else [forced_bos]), *prefix_ids],
        )

    def _prompts(self) -> Tensor:
        """Return the tokens of each row before the first new one: its prompt, or the start token.  # [R, P]"""
        layout = self.source.layout
        if not self.model.continues_input:
            return torch.full((self.num_rows, 1), self.model.spec.bos_id, device=self.device)
        columns = torch.arange(layout.max_length, device=self.device)
        is_real = columns >= layout.max_length - layout.lengths[:, None]  # [B, P]
        prompts = torch.full(is_real.shape, PADDING, device=self.device)
        prompts[is_real] = self.source.values
        return prompts.repeat_interleave(self.rows_per_source, 0)


def run(search: Search, loop: Loop) -> list[list[Hypothesis]]:
    """Generate step by step, and return the outputs of each source."""
    logits, state = search.prefill()
    for step in range(search.max_length):
        search.num_generated = step
        if step:
            logits, state = search.model.step(loop.tokens, state)
        loop.advance(logits, state)
        if loop.is_done():
            break
    return loop.results()


def next_token_log_probs(logits: Tensor, suppressed: Tensor) -> Tensor:
    """Return the log-probabilities of the next token, without suppressed ones [S].  # [R, vocabulary]"""
    return torch.log_softmax(_mask_tokens(logits, suppressed).float(), -1)


def _mask_tokens(logits: Tensor, suppressed: Tensor) -> Tensor:
    """Mask suppressed tokens: before the softmax, so that Marian's padding token gets no probability."""
    return logits.index_fill(-1, suppressed, NEG_INF) if len(suppressed) else logits


def max_new_tokens(model: Any, source_lengths: Sequence[int], config: GenerationConfig) -> list[int]:
    """Return the maximum number of new tokens for each source."""
    if config.max_new_tokens is not None or config.max_length is None:
        limits: list[int] = model.max_new_tokens(source_lengths, config.max_new_tokens)
        return limits
    num_before = source_lengths if model.continues_input else [1] * len(source_lengths)
    if max(num_before) >= config.max_length:
        raise InputError(
            f"max_length={config.max_length} leaves no room after {max(num_before)} tokens; set max_new_tokens instead"
        )
    available = model.max_new_tokens(source_lengths, config.max_length)
    return [min(room, config.max_length - n) for room, n in zip(available, num_before, strict=True)]
