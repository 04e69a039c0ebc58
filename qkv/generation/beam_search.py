"""Batched beam search: the beams of one source are adjacent rows and share its encoder output.

In diverse beam search the beams of a source form groups; each group is searched like a source of its own, but tokens
that earlier groups chose in the same step cost a penalty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from qkv.generation.logits_processors import NEG_INF
from qkv.generation.search import Hypothesis, Search
from qkv.nn.shell import DecoderState


@dataclass
class Beams:
    """Outputs of each group, finished or not."""

    ranks: Tensor  # [G, C] score / length ** penalty, by which they are ranked; NEG_INF marks an empty slot
    scores: Tensor  # [G, C] sum of log-probabilities
    tokens: Tensor  # [G, C, max_length]
    log_probs: Tensor  # [G, C, max_length] of each token
    lengths: Tensor  # [G, C] EOS included
    ended: Tensor  # [G, C] whether the output ended, rather than being cut at the maximum length

    @staticmethod
    def empty(num_groups: int, num_beams: int, max_length: int, eos_id: int, device: torch.device) -> Beams:
        """Make empty slots."""
        scores = torch.full((num_groups, num_beams), NEG_INF, device=device)
        tokens = torch.full((num_groups, num_beams, max_length), eos_id, device=device)
        lengths = torch.zeros(num_groups, num_beams, dtype=torch.long, device=device)
        return Beams(scores, scores.clone(), tokens, torch.zeros_like(tokens, dtype=scores.dtype), lengths, lengths > 0)

    def columns(self) -> list[Tensor]:
        """Return all fields."""
        return [getattr(self, field.name) for field in fields(self)]

    def select(self, index: Tensor) -> Beams:
        """Return the outputs at `index` [G, K]."""
        rows = index[..., None].expand(-1, -1, self.tokens.shape[2])
        return Beams(*(column.gather(1, rows if column.dim() == 3 else index) for column in self.columns()))

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


class BeamLoop:
    """A beam search over all groups of all sources, [G = sources * groups, K = beams per group].

    All tensors are updated in place and the number of the step is one of them, so that `advance` can be captured as
    part of a CUDA graph.
    """

    def __init__(self, search: Search, num_rows: int | None = None, max_length: int | None = None) -> None:
        """Make a loop for a search; a captured one has more rows and columns, which `load` fills for each search."""
        config, device, eos_id = search.config, search.device, search.model.spec.eos_id
        self.search = search
        self.num_beams = config.num_beams // config.num_beam_groups
        num_groups = (num_rows or search.num_rows) // self.num_beams
        max_length = max_length or search.max_length
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.limits = torch.zeros(num_groups, 1, dtype=torch.long, device=device)
        self.done = torch.zeros(num_groups, 1, dtype=torch.bool, device=device)  # groups whose result is final
        self.live, self.finished, self.cut = (
            Beams.empty(num_groups, self.num_beams, max_length, eos_id, device) for _ in range(3)
        )  # `cut`: the live beams of a group when it reached its maximum length
        self.tokens = torch.zeros(num_groups * self.num_beams, dtype=torch.long, device=device)  # last ones of `live`
        self._first_rows = torch.arange(num_groups, device=device)[:, None] * self.num_beams
        continues_input = search.model.continues_input
        unfinished_beams = config.unfinished_beams
        self.rank_unfinished = continues_input if unfinished_beams is None else unfinished_beams == "ranked"

    def load(self, search: Search, sample_ids: Sequence[int] | None = None) -> None:  # noqa: ARG002
        """Start anew for a search. Groups beyond those of the search are done from the beginning."""
        self.search = search
        num_groups = search.num_rows // self.num_beams
        for tensor in (self.step, self.limits, self.done, self.tokens):
            tensor.zero_()
        self.limits[:num_groups, 0] = search.row_limits[:: self.num_beams]
        self.done[num_groups:] = True
        for beams in (self.live, self.finished, self.cut):
            for column in beams.columns():
                column.zero_()
            beams.tokens.fill_(search.model.spec.eos_id)
            beams.ranks.fill_(NEG_INF)
            beams.scores.fill_(NEG_INF)
        self.live.scores[:, 0] = 0.0  # the beams of a group are equal at first, so only one of them is live

    def advance(self, logits: Tensor, state: DecoderState) -> None:
        """Add one token to each beam, and let the state continue from the beams that remain."""
        search = self.search
        log_probs = search.process(search.log_probs(logits), self.live.tokens.flatten(0, 1))  # [R, vocabulary]
        is_last = (self.limits == self.step + 1).repeat_interleave(self.num_beams, 0)  # [R, 1]
        log_probs = search.force_last(log_probs, is_last)
        candidates, parents = self._expand(log_probs.view(*self.live.scores.shape, -1))
        new_tokens = candidates.tokens.index_select(2, self.step).squeeze(2)  # [G, C]
        candidates.ended = search.ends(new_tokens, candidates.tokens)
        self._finish(candidates)
        selected = candidates.scores.masked_fill(candidates.ended, NEG_INF).topk(self.num_beams, 1)
        live = candidates.select(selected.indices)
        live.scores = selected.values
        self.live.copy_(live)
        self.tokens.copy_(new_tokens.gather(1, selected.indices).flatten())
        self.step += 1
        self._update_done()
        state.reorder((self._first_rows + parents.gather(1, selected.indices)).flatten())

    def is_done(self) -> bool:
        """Return whether all results are final."""
        return bool(self.done.all())

    def _expand(self, log_probs: Tensor) -> tuple[Beams, Tensor]:
        """Return the best continuations of each group, and the beams that they continue [G, C]."""
        vocab_size, num_groups = log_probs.shape[-1], self.search.config.num_beam_groups
        totals = (self.live.scores[..., None] + log_probs).flatten(1)  # [G, K * V]
        # enough that K of them go on if all others end
        num_candidates = min(max(2, 1 + len(self.search.eos_ids)) * self.num_beams, totals.shape[1])
        if num_groups == 1:
            scores, flat_index = totals.topk(num_candidates, 1)
        else:
            scores, flat_index = self._diverse_top(totals.view(-1, num_groups, totals.shape[1]), num_candidates)
        parents, tokens = flat_index // vocab_size, flat_index % vocab_size  # [G, C]
        candidates = self.live.select(parents)
        candidates.tokens.index_copy_(2, self.step, tokens[..., None])
        candidates.log_probs.index_copy_(2, self.step, (scores - candidates.scores)[..., None])
        candidates.scores = scores
        candidates.lengths += 1
        candidates.ranks = scores / (self.step + 1) ** self.search.config.length_penalty
        return candidates, parents

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
        at_limit = self.limits == self.step + 1  # [G, 1]
        can_finish = candidates.ended | at_limit if self.rank_unfinished else candidates.ended
        is_best = torch.arange(can_finish.shape[1], device=can_finish.device) < self.num_beams
        ranks = candidates.ranks.masked_fill(~(can_finish & is_best) | self.done, NEG_INF)
        merged = self.finished.append(Beams(ranks, *candidates.columns()[1:]))
        self.finished.copy_(merged.select(merged.ranks.topk(self.num_beams, 1).indices))

    def _update_done(self) -> None:
        """Mark the groups whose finished outputs no live beam can improve; `step` is the present length."""
        config, at_limit = self.search.config, self.limits == self.step  # [G, 1]
        never = config.early_stopping == "never" and config.length_penalty > 0
        best_rank = self.live.scores[:, :1] / (self.limits if never else self.step) ** config.length_penalty
        cannot_improve = best_rank <= self.finished.ranks[:, -1:]
        if config.early_stopping is True:
            cannot_improve = cannot_improve | (self.finished.ranks > NEG_INF).all(1, keepdim=True)
        if not self.rank_unfinished:
            self.cut.copy_(self.live, where=at_limit & ~self.done & ~cannot_improve)
        self.done |= cannot_improve | (self.limits <= self.step)

    def results(self) -> list[list[Hypothesis]]:
        """Return the outputs of each source, best first."""
        config = self.search.config
        finished = self._hypotheses(self.finished, self.finished.ranks)
        unfinished = self._hypotheses(self.cut, self.cut.scores)
        outputs = []
        for first in range(0, self.search.num_rows // self.num_beams, config.num_beam_groups):
            groups = range(first, first + config.num_beam_groups)
            merged = [hypothesis for group in groups for hypothesis in finished[group]]
            if config.num_beam_groups > 1:
                merged.sort(key=self._rank, reverse=True)
            merged += [hypothesis for group in groups for hypothesis in unfinished[group]]
            outputs.append(merged[: config.n_best])
        return outputs

    def _rank(self, hypothesis: Hypothesis) -> float:
        length = float(len(hypothesis.token_log_probs))
        return hypothesis.score / math.pow(length, self.search.config.length_penalty)

    def _hypotheses(self, beams: Beams, ranks: Tensor) -> list[list[Hypothesis]]:
        """Return the outputs of each group; a rank of NEG_INF marks an empty slot."""
        columns = ranks, beams.scores, beams.tokens, beams.log_probs, beams.lengths, beams.ended
        return [
            [
                Hypothesis(self.search.strip_end(tokens[:length]), score, ended, tuple(log_probs[:length]))
                for rank, score, tokens, log_probs, length, ended in zip(*group, strict=True)
                if rank > NEG_INF
            ]
            for group in zip(*(column.tolist() for column in columns), strict=True)
        ]
