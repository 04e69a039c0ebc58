"""Beam search, batched: the rows of one sentence lie side by side and share its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.decode.write import Hypothesis, Writer, log_chances, opening
from qkv.nn import Ragged

NEVER = float("-inf")


@dataclass
class Found:
    """The best finished outputs of each sentence so far."""

    ranks: Tensor  # [B, K] score over length^penalty, which orders them
    scores: Tensor  # [B, K] sum of log-probabilities
    tokens: Tensor  # [B, K, limit]
    lengths: Tensor  # [B, K] without the end token

    def add(self, ranks: Tensor, scores: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Takes in candidates [B, C] (rank NEVER: none) and keeps the K best."""
        width = self.ranks.shape[1]
        self.ranks, best = torch.cat([self.ranks, ranks], 1).topk(width, 1)
        self.scores = torch.cat([self.scores, scores], 1).gather(1, best)
        self.lengths = torch.cat([self.lengths, lengths], 1).gather(1, best)
        pool = torch.cat([self.tokens, tokens], 1)  # [B, K + C, limit]
        self.tokens = pool.gather(1, best[..., None].expand(-1, -1, pool.shape[2]))


@torch.no_grad()
def beam(
    model: Writer,
    source: Ragged,
    *,
    beams: int,
    limits: Sequence[int],
    length_penalty: float = 1.0,
    ranked: bool = False,
) -> list[list[Hypothesis]]:
    """The `beams` best outputs of each source, best first, ranked by log-probability over length^penalty.

    The length counts the end token; penalty 0 ranks by probability alone, 1 by its mean a token. What the limit cut
    short comes after all that is finished, or, `ranked`, where its own rank puts it.
    """
    sentences, device, limit = len(source), source.values.device, max(limits)
    end = model.spec.end
    logits, state = opening(model, source, beams, limit)
    vocabulary = logits.shape[-1]
    live = torch.full((sentences, beams), NEVER, device=device)
    live[:, 0] = 0.0  # all rows of a sentence are alike at first: one of them stands for all
    written = torch.full((sentences, beams, limit), end, device=device)
    empty = torch.full((sentences, beams), NEVER, device=device)
    found = Found(empty, empty.clone(), written.clone(), torch.zeros_like(empty, dtype=torch.long))
    offsets = torch.arange(sentences, device=device)[:, None] * beams
    room = torch.tensor(limits, device=device)[:, None]  # [B, 1]
    short: dict[int, list[Hypothesis]] = {}
    settled = torch.zeros_like(room, dtype=torch.bool)  # a sentence that is done takes in nothing more
    token: Tensor | None = None
    for step in range(limit):
        if token is not None:
            logits, state = model.step(token, state)
        log_probabilities = log_chances(model, logits).view(sentences, beams, vocabulary)
        flat = (live[..., None] + log_probabilities).flatten(1)  # [B, K * V]
        scores, chosen = flat.topk(min(2 * beams, flat.shape[1]), 1)  # twice: at most half of them end here
        origin, tokens = chosen // vocabulary, chosen % vocabulary  # [B, 2K]
        grown = written.gather(1, origin[..., None].expand(-1, -1, limit))
        grown[:, :, step] = tokens
        ended = tokens == end
        ranks = scores / (step + 1) ** length_penalty
        last = room == step + 1  # [B, 1]
        may_end = (ended | last if ranked else ended) & (torch.arange(scores.shape[1], device=device) < beams)
        found.add(ranks.masked_fill(~may_end | settled, NEVER), scores, grown, step + (~ended).long())
        live, kept = scores.masked_fill(ended, NEVER).topk(beams, 1)
        written = grown.gather(1, kept[..., None].expand(-1, -1, limit))
        token = tokens.gather(1, kept).flatten()
        # no live row can still beat the worst that is kept, as far as its present length tells
        beaten = live[:, :1] / (step + 1) ** length_penalty <= found.ranks[:, -1:]
        cut = [] if ranked else (last & ~settled & ~beaten).flatten().nonzero().flatten().tolist()
        for i in cut:
            rows = zip(live[i].tolist(), written[i, :, : step + 1].tolist(), strict=True)
            short[i] = [Hypothesis(row, score, finished=False) for score, row in rows if score > NEVER]
        settled = settled | beaten | (room <= step + 1)
        if settled.all():
            break
        state.reorder((offsets + origin.gather(1, kept)).flatten())
    return [(done + short.get(i, []))[:beams] for i, done in enumerate(_hypotheses(found, limits))]


def _hypotheses(found: Found, limits: Sequence[int]) -> list[list[Hypothesis]]:
    parts = (found.ranks, found.scores, found.tokens, found.lengths)
    return [
        [Hypothesis(row[:n], score, n < limit) for rank, score, row, n in zip(*rows, strict=True) if rank > NEVER]
        for limit, rows in zip(limits, zip(*(part.tolist() for part in parts), strict=True), strict=True)
    ]
