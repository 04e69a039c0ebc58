"""Beam search, batched: the rows of one sentence lie side by side and share its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.generation.sampling import GenerativeModel, Hypothesis, next_token_log_probs, prefill
from qkv.nn import Ragged

NEG_INF = float("-inf")


@dataclass
class FinishedBeams:
    """The best finished outputs of each sentence so far."""

    normalized_scores: Tensor  # [B, K] score over length^penalty, which orders them
    scores: Tensor  # [B, K] sum of log-probabilities
    tokens: Tensor  # [B, K, limit]
    lengths: Tensor  # [B, K] without the end token

    def add(self, normalized_scores: Tensor, scores: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Takes in candidates [B, C] (normalized score NEG_INF: none) and keeps the K best."""
        num_beams = self.normalized_scores.shape[1]
        self.normalized_scores, top_index = torch.cat([self.normalized_scores, normalized_scores], 1).topk(num_beams, 1)
        self.scores = torch.cat([self.scores, scores], 1).gather(1, top_index)
        self.lengths = torch.cat([self.lengths, lengths], 1).gather(1, top_index)
        all_tokens = torch.cat([self.tokens, tokens], 1)  # [B, K + C, limit]
        self.tokens = all_tokens.gather(1, top_index[..., None].expand(-1, -1, all_tokens.shape[2]))


@torch.no_grad()
def beam_search(
    model: GenerativeModel,
    source: Ragged,
    *,
    num_beams: int,
    max_lengths: Sequence[int],
    length_penalty: float = 1.0,
    rank_unfinished: bool = False,
) -> list[list[Hypothesis]]:
    """The `num_beams` best outputs of each source, best first, ranked by log-probability over length^penalty.

    The length counts the end token; penalty 0 ranks by probability alone, 1 by its mean a token. What the limit cut
    short comes after all that is finished, or, `rank_unfinished`, where its own rank puts it.
    """
    batch_size, device, max_length = len(source), source.values.device, max(max_lengths)
    eos_id = model.spec.eos_id
    logits, state = prefill(model, source, num_beams, max_length)
    vocab_size = logits.shape[-1]
    beam_scores = torch.full((batch_size, num_beams), NEG_INF, device=device)
    beam_scores[:, 0] = 0.0  # all rows of a sentence are alike at first: one of them stands for all
    generated = torch.full((batch_size, num_beams, max_length), eos_id, device=device)
    empty_scores = torch.full((batch_size, num_beams), NEG_INF, device=device)
    finished_beams = FinishedBeams(empty_scores, empty_scores.clone(), generated.clone(), torch.zeros_like(empty_scores, dtype=torch.long))
    batch_offsets = torch.arange(batch_size, device=device)[:, None] * num_beams
    length_limits = torch.tensor(max_lengths, device=device)[:, None]  # [B, 1]
    unfinished: dict[int, list[Hypothesis]] = {}
    is_done = torch.zeros_like(length_limits, dtype=torch.bool)  # a sentence that is done takes in nothing more
    token: Tensor | None = None
    for step in range(max_length):
        if token is not None:
            logits, state = model.step(token, state)
        log_probs = next_token_log_probs(model, logits).view(batch_size, num_beams, vocab_size)
        candidate_scores = (beam_scores[..., None] + log_probs).flatten(1)  # [B, K * V]
        scores, flat_index = candidate_scores.topk(min(2 * num_beams, candidate_scores.shape[1]), 1)  # twice: at most half of them end here
        parent_beam, tokens = flat_index // vocab_size, flat_index % vocab_size  # [B, 2K]
        candidate_tokens = generated.gather(1, parent_beam[..., None].expand(-1, -1, max_length))
        candidate_tokens[:, :, step] = tokens
        is_eos = tokens == eos_id
        normalized_scores = scores / (step + 1) ** length_penalty
        at_limit = length_limits == step + 1  # [B, 1]
        can_finish = (is_eos | at_limit if rank_unfinished else is_eos) & (torch.arange(scores.shape[1], device=device) < num_beams)
        finished_beams.add(normalized_scores.masked_fill(~can_finish | is_done, NEG_INF), scores, candidate_tokens, step + (~is_eos).long())
        beam_scores, selected = scores.masked_fill(is_eos, NEG_INF).topk(num_beams, 1)
        generated = candidate_tokens.gather(1, selected[..., None].expand(-1, -1, max_length))
        token = tokens.gather(1, selected).flatten()
        # no live row can still beat the worst that is kept, as far as its present length tells
        cannot_improve = beam_scores[:, :1] / (step + 1) ** length_penalty <= finished_beams.normalized_scores[:, -1:]
        truncated = [] if rank_unfinished else (at_limit & ~is_done & ~cannot_improve).flatten().nonzero().flatten().tolist()
        for i in truncated:
            rows = zip(beam_scores[i].tolist(), generated[i, :, : step + 1].tolist(), strict=True)
            unfinished[i] = [Hypothesis(row, score, finished=False) for score, row in rows if score > NEG_INF]
        is_done = is_done | cannot_improve | (length_limits <= step + 1)
        if is_done.all():
            break
        state.reorder((batch_offsets + parent_beam.gather(1, selected)).flatten())
    return [(finished_hypotheses + unfinished.get(i, []))[:num_beams] for i, finished_hypotheses in enumerate(_to_hypotheses(finished_beams, max_lengths))]


def _to_hypotheses(finished_beams: FinishedBeams, max_lengths: Sequence[int]) -> list[list[Hypothesis]]:
    columns = (finished_beams.normalized_scores, finished_beams.scores, finished_beams.tokens, finished_beams.lengths)
    return [
        [Hypothesis(row[:n], score, n < max_length) for normalized_score, score, row, n in zip(*rows, strict=True) if normalized_score > NEG_INF]
        for max_length, rows in zip(max_lengths, zip(*(column.tolist() for column in columns), strict=True), strict=True)
    ]
