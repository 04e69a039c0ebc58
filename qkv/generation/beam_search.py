"""Batched beam search: the beams of one source are adjacent rows and share its encoder output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.generation.sampling import Hypothesis, next_token_log_probs
from qkv.nn import Ragged
from qkv.nn.shell import Model

NEG_INF = float("-inf")


@dataclass
class FinishedBeams:
    """The best finished outputs of each source so far."""

    normalized_scores: Tensor  # [B, K] score / length ** penalty, by which they are ranked
    scores: Tensor  # [B, K] sum of log-probabilities
    tokens: Tensor  # [B, K, max_length]
    lengths: Tensor  # [B, K] without EOS

    @staticmethod
    def empty(tokens: Tensor) -> FinishedBeams:
        """Make empty slots for outputs shaped like `tokens` [B, K, max_length]."""
        scores = torch.full(tokens.shape[:2], NEG_INF, device=tokens.device)
        return FinishedBeams(scores, scores.clone(), tokens.clone(), torch.zeros_like(scores, dtype=torch.long))

    def add(self, normalized_scores: Tensor, scores: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Add candidates [B, C] and keep the K best; a normalized score of NEG_INF marks an empty candidate."""
        num_beams = self.normalized_scores.shape[1]
        self.normalized_scores, top_index = torch.cat([self.normalized_scores, normalized_scores], 1).topk(num_beams, 1)
        self.scores = torch.cat([self.scores, scores], 1).gather(1, top_index)
        self.lengths = torch.cat([self.lengths, lengths], 1).gather(1, top_index)
        all_tokens = torch.cat([self.tokens, tokens], 1)  # [B, K + C, max_length]
        self.tokens = all_tokens.gather(1, top_index[..., None].expand(-1, -1, all_tokens.shape[2]))


@torch.no_grad()
def beam_search(
    model: Model,
    source: Ragged,
    *,
    num_beams: int,
    max_lengths: Sequence[int],
    length_penalty: float = 1.0,
    rank_unfinished: bool = False,
) -> list[list[Hypothesis]]:
    """Return the `num_beams` best outputs per source, best first, ranked by log-probability / length ** penalty.

    The length includes EOS; penalty 0 ranks by log-probability, 1 by its mean per token. Outputs that reach the maximum
    length without EOS come after all finished ones, or, with `rank_unfinished`, are ranked among them.
    """
    batch_size, device, max_length = len(source), source.values.device, max(max_lengths)
    eos_id = model.spec.eos_id
    logits, state = model.prefill(source, num_beams, max_length)
    vocab_size = logits.shape[-1]
    beam_scores = torch.full((batch_size, num_beams), NEG_INF, device=device)
    beam_scores[:, 0] = 0.0  # the beams of a source are equal at first, so only one of them is live
    generated = torch.full((batch_size, num_beams, max_length), eos_id, device=device)
    finished_beams = FinishedBeams.empty(generated)
    batch_offsets = torch.arange(batch_size, device=device)[:, None] * num_beams
    length_limits = torch.tensor(max_lengths, device=device)[:, None]  # [B, 1]
    unfinished: dict[int, list[Hypothesis]] = {}
    is_done = torch.zeros_like(length_limits, dtype=torch.bool)  # [B, 1] sources whose result is final
    token: Tensor | None = None
    for step in range(max_length):
        if token is not None:
            logits, state = model.step(token, state)
        log_probs = next_token_log_probs(model, logits).view(batch_size, num_beams, vocab_size)
        candidate_scores = (beam_scores[..., None] + log_probs).flatten(1)  # [B, K * V]
        num_candidates = min(2 * num_beams, candidate_scores.shape[1])  # 2K: at most K of them end with EOS
        scores, flat_index = candidate_scores.topk(num_candidates, 1)
        parent_beam, tokens = flat_index // vocab_size, flat_index % vocab_size  # [B, 2K]
        candidate_tokens = generated.gather(1, parent_beam[..., None].expand(-1, -1, max_length))
        candidate_tokens[:, :, step] = tokens
        is_eos = tokens == eos_id
        normalized_scores = scores / (step + 1) ** length_penalty
        at_limit = length_limits == step + 1  # [B, 1]
        can_finish = is_eos | at_limit if rank_unfinished else is_eos
        can_finish = can_finish & (torch.arange(num_candidates, device=device) < num_beams) & ~is_done
        candidate_lengths = step + (~is_eos).long()
        finished_beams.add(
            normalized_scores.masked_fill(~can_finish, NEG_INF), scores, candidate_tokens, candidate_lengths
        )
        beam_scores, selected = scores.masked_fill(is_eos, NEG_INF).topk(num_beams, 1)
        generated = candidate_tokens.gather(1, selected[..., None].expand(-1, -1, max_length))
        token = tokens.gather(1, selected).flatten()
        # no live beam can beat the worst finished one at its present length
        cannot_improve = beam_scores[:, :1] / (step + 1) ** length_penalty <= finished_beams.normalized_scores[:, -1:]
        if not rank_unfinished:
            unfinished |= _unfinished(at_limit & ~is_done & ~cannot_improve, beam_scores, generated[..., : step + 1])
        is_done = is_done | cannot_improve | (length_limits <= step + 1)
        if is_done.all():
            break
        state.reorder((batch_offsets + parent_beam.gather(1, selected)).flatten())
    finished = _to_hypotheses(finished_beams, max_lengths)
    return [(hypotheses + unfinished.get(i, []))[:num_beams] for i, hypotheses in enumerate(finished)]


def _unfinished(is_cut: Tensor, scores: Tensor, tokens: Tensor) -> dict[int, list[Hypothesis]]:
    """Return the live beams of the sources in `is_cut` [B, 1], whose maximum length is reached."""
    hypotheses: dict[int, list[Hypothesis]] = {}
    for i in is_cut.flatten().nonzero().flatten().tolist():
        rows = zip(scores[i].tolist(), tokens[i].tolist(), strict=True)
        hypotheses[i] = [Hypothesis(row, score, finished=False) for score, row in rows if score > NEG_INF]
    return hypotheses


def _to_hypotheses(finished_beams: FinishedBeams, max_lengths: Sequence[int]) -> list[list[Hypothesis]]:
    columns = (finished_beams.normalized_scores, finished_beams.scores, finished_beams.tokens, finished_beams.lengths)
    return [
        [
            Hypothesis(row[:n], score, n < max_length)
            for normalized_score, score, row, n in zip(*rows, strict=True)
            if normalized_score > NEG_INF
        ]
        for max_length, rows in zip(
            max_lengths, zip(*(column.tolist() for column in columns), strict=True), strict=True
        )
    ]
