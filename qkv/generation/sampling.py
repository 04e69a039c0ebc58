"""Greedy search and sampling: one token per row and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from qkv.generation.logits_processors import PADDING, filter_for_sampling
from qkv.generation.request import Hypothesis, Request
from qkv.generation.search import Loop, RowTable, Search

Item = TypeVar("Item")


@dataclass
class TokenRows(RowTable):
    """One output per row."""

    tokens: Tensor  # [R] the last token
    history: Tensor  # [R, W] the prompt, if a rule reads it, and the generated tokens
    log_probs: Tensor  # [R, W] of the generated tokens
    draws: Tensor  # [R, W] random numbers of sampling; [R, 0] in greedy search
    num_tokens: Tensor  # [R] tokens of the history, EOS included
    prompt_lengths: Tensor  # [R]
    limits: Tensor  # [R] maximum number of generated tokens
    ended: Tensor  # [R] whether the output has ended, rather than being cut at its maximum length
    alignments: Tensor  # [R, W] source token that each generated token attends to most; [R, 0] if not requested

    FILL: ClassVar[dict[str, int]] = {"history": PADDING, "log_probs": 0}

    @staticmethod
    def empty(num_rows: int, width: int, num_draws: int, num_aligned: int, device: torch.device) -> TokenRows:
        """Make rows that are complete from the beginning."""
        numbers = torch.zeros(4, num_rows, dtype=torch.long, device=device)
        history = torch.full((num_rows, width), PADDING, device=device)
        log_probs = torch.zeros(num_rows, width, device=device)
        draws = torch.zeros(num_rows, num_draws, device=device)
        tokens, num_tokens, prompt_lengths, limits = numbers
        alignments = torch.zeros(num_rows, num_aligned, dtype=torch.long, device=device)
        return TokenRows(tokens, history, log_probs, draws, num_tokens, prompt_lengths, limits, tokens > 0, alignments)

    def widen(self, width: int) -> TokenRows:
        table = super().widen(width)
        if table.draws.shape[1]:
            table.draws = torch.nn.functional.pad(table.draws, (0, width - table.draws.shape[1]))
        if table.alignments.shape[1]:
            table.alignments = torch.nn.functional.pad(table.alignments, (0, width - table.alignments.shape[1]))
        return table


class TokenLoop(Loop):
    """Outputs that grow by one token per step, greedily or by sampling."""

    TABLES = ("rows",)

    def __init__(self, search: Search, num_sources: int, width: int) -> None:
        super().__init__(search, num_sources, width)
        num_draws = width if search.config.do_sample else 0
        sizes = width, num_draws, width if search.config.return_alignments else 0
        self.rows = TokenRows.empty(num_sources * search.rows_per_source, *sizes, search.device)

    @property
    def tokens(self) -> Tensor:
        return self.rows.tokens

    def _load(self, requests: Sequence[Request]) -> None:
        search, rows = self.search, self.rows
        prompt_lengths = [search.prompt_length(request) for request in requests]
        numbers = torch.tensor([prompt_lengths, [request.max_new_tokens for request in requests]])
        lengths, limits = numbers.repeat_interleave(search.rows_per_source, 1).to(search.device)
        rows.history.copy_(search.prompts(requests, self.width))
        rows.prompt_lengths.copy_(lengths)
        rows.num_tokens.copy_(lengths)
        rows.limits.copy_(limits)
        if search.config.do_sample:
            pairs = zip(requests, prompt_lengths, strict=True)
            draws = [_uniform_draws(request, start, self.width) for request, start in pairs]
            rows.draws.copy_(torch.from_numpy(np.concatenate(draws)))

    def advance(self, logits: Tensor, attention: Tensor | None = None) -> None:
        """Choose the next token of each row."""
        search, rows = self.search, self.rows
        if attention is not None:
            rows.alignments.scatter_(1, rows.num_tokens[:, None], attention.argmax(-1, keepdim=True))
        has_rules = bool(search.processors) or search.forced_last is not None or search.config.do_sample
        if not has_rules and search.append_best_token(logits, rows):
            return
        num_generated = rows.num_tokens - rows.prompt_lengths  # [R]
        column = rows.num_tokens[:, None]  # [R, 1]
        if has_rules:
            log_probs = scores = search.log_probs(logits)  # [R, vocabulary]
            if search.processors:
                scores = search.process_logits(logits, rows.history, rows.num_tokens, num_generated)
            token = self._choose(search.force_last(scores, rows.limits == num_generated + 1), column)  # [R]
            chosen_log_probs = log_probs.gather(1, token[:, None]).squeeze(1)
        else:
            token, chosen_log_probs = search.best_token(logits)
        done = rows.ended | (num_generated >= rows.limits)
        # finished rows run along until they leave
        rows.log_probs.scatter_(1, column, chosen_log_probs.masked_fill(done, 0.0)[:, None])
        rows.history.scatter_(1, column, token.masked_fill(done, PADDING)[:, None])
        rows.num_tokens += ~done
        rows.ended |= ~done & search.is_eos(token)
        rows.tokens.copy_(token)

    def done(self) -> list[bool]:
        rows = self.rows
        done = rows.ended | (rows.num_tokens - rows.prompt_lengths >= rows.limits)
        flags: list[bool] = done.view(self.num_sources, -1).all(1).tolist()
        return flags

    def generated(self, sources: Sequence[int]) -> list[list[list[int]]]:
        """Return the tokens that the rows of some sources have generated so far, EOS included."""
        rows = self._take(sources)
        columns = rows.history.tolist(), rows.prompt_lengths.tolist(), rows.num_tokens.tolist()
        tokens = [history[start:end] for history, start, end in zip(*columns, strict=True)]
        return _per_source(tokens, self.search.rows_per_source)

    def cut(self, source: int, row: int, length: int) -> None:
        """End an output after `length` generated tokens: a stop string is in its text."""
        index = source * self.search.rows_per_source + row
        self.rows.num_tokens[index] = self.rows.prompt_lengths[index] + length
        self.rows.ended[index] = True

    def _choose(self, scores: Tensor, column: Tensor) -> Tensor:
        if not self.search.config.do_sample:
            return scores.argmax(-1)
        probs = torch.softmax(filter_for_sampling(scores, self.search.config), -1)  # [R, vocabulary]
        draw = self.rows.draws.gather(1, column)  # [R, 1]
        below_draw = probs.cumsum(-1) <= draw * probs.sum(-1, keepdim=True)
        last_possible = (
            probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
        )  # rounding must not select a token of probability 0
        return torch.minimum(below_draw.sum(-1), last_possible)

    def results(self, sources: Sequence[int]) -> list[list[Hypothesis]]:
        rows, strip_end = self._take(sources), self.search.strip_end
        columns = rows.history, rows.log_probs, rows.alignments, rows.prompt_lengths, rows.num_tokens, rows.ended
        hypotheses = [
            Hypothesis(
                strip_end(row[start:end]),
                sum(log_probs[start:end]),
                ended,
                tuple(log_probs[start:end]),
                tuple(alignment[start:end]),
            )
            for row, log_probs, alignment, start, end, ended in zip(*(c.tolist() for c in columns), strict=True)
        ]
        outputs = _per_source(hypotheses, self.search.rows_per_source)
        if self.search.config.do_sample:
            return [sorted(rows, key=lambda hypothesis: -hypothesis.score) for rows in outputs]
        return outputs

    def _take(self, sources: Sequence[int]) -> TokenRows:
        if list(sources) == list(range(self.num_sources)):
            return self.rows
        return self.rows.take(self._table_rows(self.rows, torch.tensor(sources, device=self.search.device)))


def _per_source(rows: list[Item], rows_per_source: int) -> list[list[Item]]:
    return [rows[i : i + rows_per_source] for i in range(0, len(rows), rows_per_source)]


def _uniform_draws(request: Request, start: int, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return a random number per row and token, from column `start` on.

    They depend on the seed and the number of the sample only, not on the batch or the device.  # [rows, width]
    """
    draws = np.zeros((request.rows_per_source, width), dtype=np.float32)
    for row in range(request.rows_per_source):
        generator = np.random.Generator(np.random.PCG64([request.config.seed, request.sample_id, row]))
        draws[row, start : start + request.max_new_tokens] = generator.random(request.max_new_tokens)
    return draws
