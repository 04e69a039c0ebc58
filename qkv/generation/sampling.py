"""Greedy search and sampling: one token per row and step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qkv.generation.logits_processors import filter_for_sampling
from qkv.generation.search import Hypothesis, Search
from qkv.nn.shell import DecoderState


class TokenLoop:
    """Outputs that grow by one token per step, greedily or by sampling.

    All tensors are updated in place and the number of the step is one of them, so that `advance` can be captured as
    part of a CUDA graph.
    """

    def __init__(self, search: Search, num_rows: int | None = None, max_length: int | None = None) -> None:
        """Make a loop for a search; a captured one has more rows and columns, which `load` fills for each search."""
        num_rows, max_length = num_rows or search.num_rows, max_length or search.max_length
        device, eos_id = search.device, search.model.spec.eos_id
        self.search = search
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(num_rows, dtype=torch.long, device=device)  # the last token of each row
        self.generated = torch.full((num_rows, max_length), eos_id, device=device)
        self.log_probs = torch.zeros(num_rows, max_length, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)  # EOS included
        self.ended = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.limits = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.draws = torch.zeros(num_rows, max_length, device=device) if search.config.do_sample else None

    def load(self, search: Search, sample_ids: Sequence[int] | None = None) -> None:
        """Start anew for a search. Rows beyond those of the search are done from the beginning."""
        self.search = search
        for tensor in (self.step, self.tokens, self.log_probs, self.lengths, self.limits):
            tensor.zero_()
        self.generated.fill_(search.model.spec.eos_id)
        self.ended.zero_()
        self.limits[: search.num_rows] = search.row_limits
        if self.draws is not None:
            self.draws[: search.num_rows, : search.max_length] = _uniform_draws(search, sample_ids)

    def advance(self, logits: Tensor, state: DecoderState) -> None:  # noqa: ARG002  # rows are never reordered
        """Choose the next token of each row."""
        search = self.search
        if search.processors or search.forced_last is not None or self.draws is not None:
            log_probs = search.log_probs(logits)  # [R, vocabulary]
            scores = search.process_logits(logits, self.generated) if search.processors else log_probs
            token = self._choose(search.force_last(scores, (self.limits == self.step + 1)[:, None]))  # [R]
            chosen_log_probs = log_probs.gather(1, token[:, None]).squeeze(1)
        else:
            token, chosen_log_probs = search.best_token(logits)
        done = self.ended | (self.limits <= self.step)
        self.log_probs.index_copy_(1, self.step, chosen_log_probs.masked_fill(done, 0.0)[:, None])
        self.generated.index_copy_(1, self.step, token.masked_fill(done, search.model.spec.eos_id)[:, None])
        self.lengths += ~done
        self.ended |= ~done & search.ends(token, self.generated)
        self.tokens.copy_(token)  # finished rows run along with any token: EOS may not be in the vocabulary
        self.step += 1

    def is_done(self) -> bool:
        """Return whether all outputs are complete."""
        return bool((self.ended | (self.limits <= self.step)).all())

    def _choose(self, scores: Tensor) -> Tensor:
        if self.draws is None:
            return scores.argmax(-1)
        probs = torch.softmax(filter_for_sampling(scores, self.search.config), -1)  # [R, vocabulary]
        draw = self.draws.index_select(1, self.step)  # [R, 1]
        below_draw = probs.cumsum(-1) <= draw * probs.sum(-1, keepdim=True)
        last_possible = (
            probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
        )  # rounding must not select a token of probability 0
        return torch.minimum(below_draw.sum(-1), last_possible)

    def results(self) -> list[list[Hypothesis]]:
        """Return the outputs of each source."""
        search, num_rows = self.search, self.search.num_rows
        columns = self.generated, self.log_probs, self.lengths, self.ended
        hypotheses = [
            Hypothesis(search.strip_end(row[:length]), sum(log_probs[:length]), finished, tuple(log_probs[:length]))
            for row, log_probs, length, finished in zip(*(c[:num_rows].tolist() for c in columns), strict=True)
        ]
        outputs = [hypotheses[i : i + search.rows_per_source] for i in range(0, num_rows, search.rows_per_source)]
        if search.config.do_sample:
            return [sorted(rows, key=lambda hypothesis: -hypothesis.score) for rows in outputs]
        return outputs


def _uniform_draws(search: Search, sample_ids: Sequence[int] | None) -> Tensor:
    """Return a random number per row and step, which depends on the seed and the source's `sample_ids` entry only.

    It does not depend on the batch or the device.  # [R, max_length]
    """
    ids = sample_ids if sample_ids is not None else range(len(search.source))
    keys = [(sample_id, row) for sample_id in ids for row in range(search.rows_per_source)]
    seed = search.config.seed
    uniform = [np.random.Generator(np.random.PCG64([seed, *key])).random(search.max_length) for key in keys]
    return torch.tensor(np.stack(uniform), dtype=torch.float32, device=search.device)
