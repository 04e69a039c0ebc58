"""Batched beam search: the beams of one source are adjacent rows and share its encoder output.

In diverse beam search the beams of a source form groups; each group is searched like a source of its own, but tokens
that earlier groups chose in the same step cost a penalty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.generation.config import GenerationConfig
from qkv.generation.logits_processors import NEG_INF, PADDING
from qkv.generation.request import Hypothesis, Request
from qkv.generation.search import Loop, RowTable, Search

_MIN_COVERAGE = 1e-10  # attention that a source token gets at least, so that its logarithm is a number


@dataclass
class Beams(RowTable):
    """Outputs of each group, finished or not."""

    ranks: Tensor  # [G, C] score / length ** penalty, by which they are ranked; NEG_INF marks an empty slot
    scores: Tensor  # [G, C] sum of log-probabilities, less the diversity penalties
    tokens: Tensor  # [G, C, W] the prompt, if a rule reads it, and the generated tokens
    log_probs: Tensor  # [G, C, W] of the generated tokens
    lengths: Tensor  # [G, C] generated tokens, EOS included
    ended: Tensor  # [G, C] whether the output ended, rather than being cut at the maximum length
    alignments: Tensor  # [G, C, W] source token that each token attends to most; [G, C, 0] if not requested
    coverage: Tensor  # [G, C, W] total attention to each source token, 1 after the last; [G, C, 0] without penalty

    FILL: ClassVar[dict[str, int]] = {"tokens": PADDING, "log_probs": 0}

    @staticmethod
    def empty(num_groups: int, num_beams: int, width: int, config: GenerationConfig, device: torch.device) -> Beams:
        """Make empty slots."""
        scores = torch.full((num_groups, num_beams), NEG_INF, device=device)
        tokens = torch.full((num_groups, num_beams, width), PADDING, device=device)
        lengths = torch.zeros(num_groups, num_beams, dtype=torch.long, device=device)
        log_probs = torch.zeros_like(tokens, dtype=scores.dtype)
        alignments = torch.zeros_like(tokens if config.return_alignments else tokens[..., :0])
        coverage = torch.ones_like(log_probs if config.coverage_penalty else log_probs[..., :0])
        return Beams(scores, scores.clone(), tokens, log_probs, lengths, lengths > 0, alignments, coverage)

    def widen(self, width: int) -> Beams:
        table = super().widen(width)
        if table.alignments.shape[2]:
            table.alignments = F.pad(table.alignments, (0, width - table.alignments.shape[2]))
        if table.coverage.shape[2]:
            table.coverage = F.pad(table.coverage, (0, width - table.coverage.shape[2]), value=1.0)
        return table

    def select(self, index: Tensor) -> Beams:
        """Return the outputs at `index` [G, K]."""

        def rows(column: Tensor) -> Tensor:
            return index if column.dim() == 2 else index[..., None].expand(-1, -1, column.shape[2])

        return Beams(*(column.gather(1, rows(column)) for column in self.columns()))

    def append(self, other: Beams) -> Beams:
        """Return these outputs followed by others."""
        pairs = zip(self.columns(), other.columns(), strict=True)
        return Beams(*(torch.cat(pair, 1) for pair in pairs))

    def copy_(self, other: Beams, where: Tensor | None = None) -> None:
        """Replace the outputs in place; with `where` [G, 1], those of some groups."""
        for column, new in zip(self.columns(), other.columns(), strict=True):
            if where is not None:
                new = torch.where(where if column.dim() == 2 else where[..., None], new, column)
            column.copy_(new)


@dataclass
class Groups(RowTable):
    """What the beams of a group have in common."""

    steps: Tensor  # [G, 1] tokens generated so far
    limits: Tensor  # [G, 1] maximum number of generated tokens
    prompt_lengths: Tensor  # [G, 1]
    done: Tensor  # [G, 1] whether the result is final
    tokens: Tensor  # [G, K] last tokens of the live beams


class BeamLoop(Loop):
    """A beam search over all groups of all sources, [G = sources * groups, K = beams per group]."""

    TABLES = ("groups", "live", "finished", "cut")

    def __init__(self, search: Search, num_sources: int, width: int) -> None:
        super().__init__(search, num_sources, width)
        config, device = search.config, search.device
        self.num_beams = config.num_beams // config.num_beam_groups
        num_groups = num_sources * config.num_beam_groups
        steps, limits, prompt_lengths = torch.zeros(3, num_groups, 1, dtype=torch.long, device=device)
        tokens = torch.zeros(num_groups, self.num_beams, dtype=torch.long, device=device)
        self.groups = Groups(steps, limits, prompt_lengths, limits == 0, tokens)
        self.live, self.finished, self.cut = (
            Beams.empty(num_groups, self.num_beams, width, config, device) for _ in range(3)
        )  # `cut`: the live beams of a group when it reached its maximum length
        unfinished_beams, continues_input = config.unfinished_beams, search.model.continues_input
        self.rank_unfinished = continues_input if unfinished_beams is None else unfinished_beams == "ranked"

    @property
    def tokens(self) -> Tensor:
        return self.groups.tokens.view(-1)

    def _load(self, requests: Sequence[Request]) -> None:
        search, groups = self.search, self.groups
        numbers = [[request.max_new_tokens, search.prompt_length(request)] for request in requests]
        columns = torch.tensor(numbers, device=search.device).repeat_interleave(search.config.num_beam_groups, 0)
        groups.limits.copy_(columns[:, :1])
        groups.prompt_lengths.copy_(columns[:, 1:])
        groups.done.zero_()
        self.live.tokens.copy_(search.prompts(requests, self.width).view_as(self.live.tokens))
        if search.config.coverage_penalty:
            lengths = torch.tensor([request.length for request in requests], device=search.device)
            columns = torch.arange(self.width, device=search.device)
            self.live.coverage.masked_fill_(columns < lengths[:, None, None], 0.0)
        self.live.scores[:, 0] = 0.0  # the beams of a group are equal at first, so only one of them is live

    def advance(self, logits: Tensor, attention: Tensor | None = None) -> Tensor:
        """Add one token to each beam, and return the rows that the live beams continue."""
        search, groups = self.search, self.groups
        if attention is not None:
            self._attend(attention.view(*self.live.scores.shape, -1))
        needs_all = search.processors or search.forced_last is not None or search.config.num_beam_groups > 1
        candidates, parents, new_tokens = self._expand(*(self._best_of_all if needs_all else self._best_of_top)(logits))
        candidates.ended = self._ends(new_tokens, candidates)
        self._finish(candidates)
        selected = candidates.scores.masked_fill(candidates.ended, NEG_INF).topk(self.num_beams, 1)
        live = candidates.select(selected.indices)
        live.scores = selected.values
        self.live.copy_(live)
        groups.tokens.copy_(new_tokens.gather(1, selected.indices))
        groups.steps += ~groups.done
        self._update_done()
        first_rows = torch.arange(len(parents), device=parents.device)[:, None] * self.num_beams
        return (first_rows + parents.gather(1, selected.indices)).flatten()

    def done(self) -> list[bool]:
        flags: list[bool] = self.groups.done.view(self.num_sources, -1).all(1).tolist()
        return flags

    def _ends(self, new_tokens: Tensor, candidates: Beams) -> Tensor:
        """Return which candidates end with their new token: EOS, or a stop string in their text.  # [G, C]"""
        is_end = self.search.is_eos(new_tokens)
        if self.search.stop_check is None:
            return is_end
        starts, steps = self.groups.prompt_lengths, self.groups.steps
        columns = candidates.tokens.tolist(), starts.flatten().tolist(), (starts + steps + 1).flatten().tolist()
        sequences = [tokens[start:end] for group, start, end in zip(*columns, strict=True) for tokens in group]
        return is_end | torch.tensor(self.search.stop_check(sequences), device=is_end.device).view(is_end.shape)

    def _attend(self, weights: Tensor) -> None:
        """Add the attention of this step [G, K, M] to the live beams."""
        if self.search.config.return_alignments:
            column = (self.groups.prompt_lengths + self.groups.steps)[..., None].expand(-1, self.num_beams, 1)
            self.live.alignments.scatter_(2, column, weights.argmax(-1, keepdim=True))
        if self.search.config.coverage_penalty:
            self.live.coverage[..., : weights.shape[2]] += weights

    def _best_of_all(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the best continuations of each group, by the rules for all tokens.

        They are given by their scores, their scores without the penalty of this step, their beams and their tokens.
        """
        search, groups = self.search, self.groups
        log_probs = search.log_probs(logits)  # [R, vocabulary]
        steps = groups.steps.expand(-1, self.num_beams).flatten()  # [R]
        if search.processors:
            prompt_lengths = groups.prompt_lengths.expand(-1, self.num_beams).flatten()
            log_probs = search.process(log_probs, self.live.tokens.flatten(0, 1), prompt_lengths + steps, steps)
        is_last = (groups.limits == groups.steps + 1).expand(-1, self.num_beams).flatten()
        log_probs = search.force_last(log_probs, is_last)
        vocab_size, num_groups = log_probs.shape[-1], search.config.num_beam_groups
        totals = (self.live.scores[..., None] + log_probs.view(*self.live.scores.shape, -1)).flatten(1)  # [G, K * V]
        if num_groups == 1:
            scores, flat_index = totals.topk(self._num_candidates(vocab_size), 1)
            unpenalized = scores
        else:
            by_source = totals.view(-1, num_groups, totals.shape[1])
            scores, flat_index = self._diverse_top(by_source, self._num_candidates(vocab_size))
            unpenalized = totals.gather(1, flat_index)
        return scores, unpenalized, flat_index // vocab_size, flat_index % vocab_size  # [G, C] each

    def _best_of_top(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same without rules, when the best continuations are among the best tokens of each beam."""
        num_candidates = self._num_candidates(logits.shape[-1])
        num_per_beam = min(num_candidates, logits.shape[-1])
        log_probs, tokens = self.search.top_tokens(logits, num_per_beam)  # [R, P] each
        totals = (self.live.scores[..., None] + log_probs.view(*self.live.scores.shape, -1)).flatten(1)  # [G, K * P]
        scores, flat_index = totals.topk(num_candidates, 1)
        return scores, scores, flat_index // num_per_beam, tokens.view_as(totals).gather(1, flat_index)

    def _num_candidates(self, vocab_size: int) -> int:
        """Return how many continuations of a group are needed, so that all beams go on if the others end."""
        return min(max(2, 1 + len(self.search.eos_ids)) * self.num_beams, self.num_beams * vocab_size)

    def _expand(
        self, scores: Tensor, unpenalized: Tensor, parents: Tensor, tokens: Tensor
    ) -> tuple[Beams, Tensor, Tensor]:
        """Return the continuations [G, C] of each group, the beams that they continue and their tokens."""
        candidates = self.live.select(parents)
        steps = self.groups.steps
        column = (self.groups.prompt_lengths + steps)[..., None].expand(-1, tokens.shape[1], 1)  # [G, C, 1]
        candidates.tokens.scatter_(2, column, tokens[..., None])
        candidates.log_probs.scatter_(2, column, (unpenalized - candidates.scores)[..., None])
        candidates.scores = scores
        candidates.lengths += 1
        candidates.ranks = scores / (steps + 1) ** self.search.config.length_penalty
        if self.search.config.coverage_penalty:
            covered = candidates.coverage.clamp(min=_MIN_COVERAGE, max=1.0).log().sum(-1)  # [G, C]
            candidates.ranks = candidates.ranks + self.search.config.coverage_penalty * covered
        return candidates, parents, tokens

    def _diverse_top(self, totals: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
        """Return the best continuations, group after group, with the penalty for tokens of earlier groups."""
        num_sources, num_groups, _ = totals.shape
        vocab_size = totals.shape[2] // self.num_beams
        counts = totals.new_zeros(num_sources, vocab_size)  # how many beams of earlier groups chose a token
        tops = []
        for group in range(num_groups):
            penalty = self.search.config.diversity_penalty * counts
            top = (totals[:, group] - penalty.repeat(1, self.num_beams)).topk(num_candidates, 1)  # [B, C]
            tops.append(top)
            tokens = top.indices % vocab_size
            ends = self.search.is_eos(tokens)
            first_live = top.values.masked_fill(ends, NEG_INF).topk(self.num_beams, 1).indices
            live_tokens = tokens.gather(1, first_live)
            counts = counts.scatter_add(1, live_tokens, torch.ones_like(live_tokens, dtype=counts.dtype))
        scores, indices = (torch.stack(column, 1).flatten(0, 1) for column in zip(*tops, strict=True))
        return scores, indices  # [G, C] each

    def _finish(self, candidates: Beams) -> None:
        """Add the candidates that end to the finished ones, and keep the best."""
        at_limit = self.groups.limits == self.groups.steps + 1  # [G, 1]
        can_finish = candidates.ended | at_limit if self.rank_unfinished else candidates.ended
        is_best = torch.arange(can_finish.shape[1], device=can_finish.device) < self.num_beams
        ranks = candidates.ranks.masked_fill(~(can_finish & is_best) | self.groups.done, NEG_INF)
        merged = self.finished.append(Beams(ranks, *candidates.columns()[1:]))
        self.finished.copy_(merged.select(merged.ranks.topk(self.num_beams, 1).indices))

    def _update_done(self) -> None:
        """Mark the groups whose finished outputs no live beam can improve."""
        config, limits, steps, done = self.search.config, self.groups.limits, self.groups.steps, self.groups.done
        never = config.early_stopping == "never" and config.length_penalty > 0
        best_rank = self.live.scores[:, :1] / (limits if never else steps) ** config.length_penalty
        cannot_improve = best_rank <= self.finished.ranks[:, -1:]
        if config.early_stopping is True:
            cannot_improve = cannot_improve | (self.finished.ranks > NEG_INF).all(1, keepdim=True)
        if not self.rank_unfinished:
            self.cut.copy_(self.live, where=(limits == steps) & ~done & ~cannot_improve)
        done |= cannot_improve | (limits <= steps)

    def results(self, sources: Sequence[int]) -> list[list[Hypothesis]]:
        config = self.search.config
        rows = self._table_rows(self.groups, torch.tensor(sources, device=self.search.device))
        starts = self.groups.prompt_lengths[rows].flatten().tolist()
        finished, cut = self.finished.take(rows), self.cut.take(rows)
        complete = self._hypotheses(finished, finished.ranks, starts)
        unfinished = self._hypotheses(cut, cut.scores, starts)
        outputs = []
        for first in range(0, len(starts), config.num_beam_groups):
            groups = range(first, first + config.num_beam_groups)
            merged = sorted((pair for group in groups for pair in complete[group]), key=itemgetter(0), reverse=True)
            merged += [pair for group in groups for pair in unfinished[group]]
            outputs.append([hypothesis for _, hypothesis in merged[: config.n_best]])
        return outputs

    def _hypotheses(self, beams: Beams, ranks: Tensor, starts: Sequence[int]) -> list[list[tuple[float, Hypothesis]]]:
        """Return the outputs of each group, whose tokens begin at `starts`, with their ranks.

        A rank of NEG_INF marks an empty slot. The penalties of a diverse search are part of ranks, not of scores.
        """
        columns = ranks, beams.scores, beams.tokens, beams.log_probs, beams.alignments, beams.lengths, beams.ended
        strip_end, is_diverse = self.search.strip_end, self.search.config.num_beam_groups > 1
        return [
            [
                (
                    rank,
                    Hypothesis(
                        strip_end(tokens[start : start + length]),
                        math.fsum(log_probs[start : start + length]) if is_diverse else score,
                        ended,
                        tuple(log_probs[start : start + length]),
                        tuple(alignment[start : start + length]),
                    ),
                )
                for rank, score, tokens, log_probs, alignment, length, ended in zip(*group, strict=True)
                if rank > NEG_INF
            ]
            for start, group in zip(starts, zip(*(column.tolist() for column in columns), strict=True), strict=True)
        ]
