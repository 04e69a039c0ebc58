"""Head for answers whose end depends on their start, with a score for unanswerable questions (Yang et al. 2019).

The end is scored once per start: for the best starts, or for the starts that are given in training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.heads import Head
from qkv.nn.norm import build_norm
from qkv.nn.ragged import Ragged
from qkv.nn.relative_attention import SegmentedRagged


class ConditionalSpanHead(Head):
    """Scores of each token as start, as end given each start, and of the sequence as unanswerable."""

    def __init__(self, s: spec.Head):
        super().__init__(spec.replace(s, num_outputs=1, norm=None))  # `linear` scores starts
        self.spec = s
        assert s.norm is not None
        self.end_dense = nn.Linear(2 * s.d_model, s.d_model)
        self.end_norm = build_norm(s.norm, s.d_model)
        self.end_linear = nn.Linear(s.d_model, 1)
        self.answer_dense = nn.Linear(2 * s.d_model, s.d_model)
        self.answer_linear = nn.Linear(s.d_model, 1, bias=False)

    def forward(self, hidden: Ragged | Tensor, starts: Tensor | None = None) -> Tensor:
        """Return per token: the score of a start, of "no answer", and of an end given each of several starts.

        Args:
            hidden: the hidden states; those of a `SegmentedRagged` have candidates for starts after segment 0 only.
            starts: the position of one start in each sequence [B]; None: the `start_beams` best ones, best first.

        # [T, 2 + starts]
        """
        if not isinstance(hidden, Ragged):
            raise InputError("this head reads whole sequences; leave out positions")
        assert self.linear is not None
        layout, values = hidden.layout, hidden.values
        start_logits: Tensor = self.linear(values)  # [T, 1]
        padded = hidden.with_values(start_logits[:, 0]).to_padded(float("-inf"))  # [B, longest]
        if isinstance(hidden, SegmentedRagged):
            padded = padded.masked_fill(~start_candidates(hidden), float("-inf"))
        first_tokens = layout.cu_seqlens[:-1].long()  # [B]
        if starts is None:
            best_starts = self._best_starts(padded)  # [B, beams]
            start_states = hidden.sum_sequences(values * _by_token(torch.softmax(padded, -1), hidden)[:, None])
        else:
            best_starts = starts.clamp(min=0)[:, None]
            start_states = values[first_tokens + best_starts[:, 0]]  # [B, width]
        rows = layout.sequence_ids()
        given_starts = values[(first_tokens[:, None] + best_starts)[rows]]  # [T, beams, width]
        pairs = torch.cat([values[:, None].expand_as(given_starts), given_starts], -1)
        end_logits = self.end_linear(self.end_norm(torch.tanh(self.end_dense(pairs))))[..., 0]  # [T, beams]
        last_states = values[layout.cu_seqlens[1:].long() - 1]  # [B, width] of `<cls>`
        answer_states = torch.tanh(self.answer_dense(torch.cat([start_states, last_states], -1)))
        answer_logits: Tensor = self.answer_linear(answer_states)  # [B, 1]
        return torch.cat([start_logits, answer_logits[rows], end_logits], -1)

    def _best_starts(self, scores: Tensor) -> Tensor:
        """Return the positions of the best starts; a sequence with too few candidates repeats its last one."""
        num_beams, num_candidates = self.spec.start_beams, (scores > float("-inf")).sum(-1, keepdim=True)
        ranks = torch.arange(num_beams, device=scores.device).clamp(max=num_candidates - 1)  # [B, beams]
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices.gather(-1, ranks)


def start_candidates(hidden: SegmentedRagged) -> Tensor:
    """Return a mask of the tokens after segment 0, or of all tokens of a sequence without any.  # [B, longest]"""
    is_candidate = hidden.with_values(hidden.segments != 0).to_padded(0.0)
    return is_candidate | ~is_candidate.any(-1, keepdim=True)


def _by_token(padded: Tensor, hidden: Ragged) -> Tensor:
    """Return the values of the tokens of a padded batch.  # [B, longest] -> [T]"""
    return padded.flatten()[hidden.layout.padded_index()]
