"""Beam search, batched: the rows of one sentence lie side by side and share its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.decode.write import Hypothesis
from qkv.nn import EncoderDecoder, Ragged

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
    model: EncoderDecoder, source: Ragged, *, beams: int, limit: int, length_penalty: float = 1.0
) -> list[list[Hypothesis]]:
    """The `beams` best outputs of each source, best first, ranked by log-probability over length^penalty.

    The length counts the end token; penalty 0 ranks by probability alone, 1 by its mean a token.
    """
    sentences, device = len(source), source.values.device
    end, vocabulary = model.spec.end, model.head.linear.out_features
    state = model.begin(model.encode(source), sentences * beams, limit)
    live = torch.full((sentences, beams), NEVER, device=device)
    live[:, 0] = 0.0  # all rows of a sentence are alike at first: one of them stands for all
    written = torch.full((sentences, beams, limit), end, device=device)
    empty = torch.full((sentences, beams), NEVER, device=device)
    found = Found(empty, empty.clone(), written.clone(), torch.zeros_like(empty, dtype=torch.long))
    token = torch.full((sentences * beams,), model.spec.start, device=device)
    offsets = torch.arange(sentences, device=device)[:, None] * beams
    for step in range(limit):
        logits, state = model.step(token, state)
        log_probabilities = torch.log_softmax(logits.float(), -1).view(sentences, beams, vocabulary)
        flat = (live[..., None] + log_probabilities).flatten(1)  # [B, K * V]
        scores, chosen = flat.topk(min(2 * beams, flat.shape[1]), 1)  # twice: at most half of them end here
        origin, tokens = chosen // vocabulary, chosen % vocabulary  # [B, 2K]
        grown = written.gather(1, origin[..., None].expand(-1, -1, limit)).clone()
        grown[:, :, step] = tokens
        ended = tokens == end
        ranks = scores / (step + 1) ** length_penalty
        may_end = ended & (torch.arange(scores.shape[1], device=device) < beams)
        found.add(ranks.masked_fill(~may_end, NEVER), scores, grown, torch.full_like(tokens, step))
        live, kept = scores.masked_fill(ended, NEVER).topk(beams, 1)
        written = grown.gather(1, kept[..., None].expand(-1, -1, limit))
        token = tokens.gather(1, kept).flatten()
        if _settled(found, live, step + 1, length_penalty):
            break
        state.reorder((offsets + origin.gather(1, kept)).flatten())
    # what the limit cut short counts where a sentence has too few finished ones
    cut_short = live.masked_fill(found.ranks[:, -1:] > NEVER, NEVER)
    lengths = torch.full_like(found.lengths, step + 1)
    found.add(_below(cut_short / (step + 1) ** length_penalty, found.ranks), live, written, lengths)
    return _hypotheses(found, end)


def _below(ranks: Tensor, finished: Tensor) -> Tensor:
    """Unfinished outputs come after every finished one, in their own order."""
    worst = finished.masked_fill(finished == NEVER, 0.0).min(1, keepdim=True).values
    return ranks + worst - 1e4


def _settled(found: Found, live: Tensor, length: int, penalty: float) -> bool:
    """No live row can still beat the worst that is kept, as far as its present length tells."""
    return bool((live[:, 0] / length**penalty <= found.ranks[:, -1]).all())


def _hypotheses(found: Found, end: int) -> list[list[Hypothesis]]:
    parts = (found.ranks, found.scores, found.tokens, found.lengths)
    out = []
    for ranks, scores, tokens, lengths in zip(*(part.tolist() for part in parts), strict=True):
        rows = zip(ranks, scores, tokens, lengths, strict=True)
        kept = [(score, row[:n], row[n : n + 1] == [end]) for rank, score, row, n in rows if rank > NEVER]
        out.append([Hypothesis(row, score, finished) for score, row, finished in kept])
    return out
