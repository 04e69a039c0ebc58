"""Ensembles: several models of one vocabulary decode together, and the mean of their predictions chooses the token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from qkv.checkpoints import ModelBundle
from qkv.errors import InputError, quote
from qkv.nn.frontend import FrontEnd, RawInput
from qkv.nn.ragged import Ragged
from qkv.nn.shell import DecoderState, Model
from qkv.nn.stack import EncoderOutput, StackState
from qkv.tokenization.tokenizer import Tokenizer

Mean = Literal["probabilities", "log_probabilities"]
_GENERATES_ONLY = "an ensemble generates and scores text only; use one of its models"


class Ensemble(Model):
    """Models that read the same tokens and write tokens of the same vocabulary, whatever their architectures.

    Its logits are log-probabilities: of the mean of the members' probabilities, or the mean of their
    log-probabilities, which the softmax of a search normalizes to their geometric mean.
    """

    def __init__(self, members: Sequence[Model], mean: Mean = "probabilities") -> None:
        super().__init__(members[0].spec)
        self.members, self.mean = nn.ModuleList(members), mean
        self.continues_input = members[0].continues_input
        self.is_encoder_decoder = members[0].is_encoder_decoder
        self.head, self.aux_head = members[0].head, None
        self.training = any(member.training for member in members)
        # a padding token is suppressed before the softmax, so that it gets no probability
        suppressed = torch.tensor(self.spec.suppress_tokens, dtype=torch.long, device=self.device)
        self.register_buffer("suppressed", suppressed, persistent=False)

    def with_mean(self, mean: Mean) -> Ensemble:
        """Return an ensemble of the same members with another kind of mean."""
        return self if mean == self.mean else Ensemble(self.models, mean)

    @property
    def models(self) -> list[Model]:
        """The members."""
        return cast("list[Model]", list(self.members))

    @property
    def front_end(self) -> FrontEnd:
        return self.models[0].front_end

    @property
    def input_stack(self) -> Any:
        return self.models[0].input_stack

    @property
    def max_input_length(self) -> int:
        return min(member.max_input_length for member in self.models)

    def max_new_tokens(self, source_lengths: Sequence[int], requested: int | None = None) -> list[int]:
        rooms = [member.max_new_tokens(source_lengths, requested) for member in self.models]
        return [min(row) for row in zip(*rooms, strict=True)]

    def prefill(
        self,
        source: RawInput | EncoderOutput,
        rows_per_source: int,
        max_new_tokens: int,
        *,
        watch_attention: bool = False,
    ) -> tuple[Tensor, DecoderState]:
        outputs = [
            member.prefill(source, rows_per_source, max_new_tokens, watch_attention=watch_attention)
            for member in self.models
        ]
        return self._combine_steps([logits for logits, _ in outputs]), EnsembleState([state for _, state in outputs])

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        assert isinstance(state, EnsembleState)
        pairs = zip(self.models, state.members, strict=True)
        outputs = [member.step(tokens, member_state) for member, member_state in pairs]
        return self._combine_steps([logits for logits, _ in outputs]), EnsembleState([new for _, new in outputs])

    def forward(self, *inputs: Ragged) -> Tensor:
        """Return the log-probabilities of the next token for every token, with teacher forcing.  # [T, vocabulary]"""
        return self._combine([member(*inputs) for member in self.models])

    def hidden_states(self, source: RawInput, token_type_ids: Tensor | None = None) -> EncoderOutput:  # noqa: ARG002
        raise InputError(_GENERATES_ONLY)

    def logits(self, source: RawInput, positions: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:  # noqa: ARG002
        raise InputError(_GENERATES_ONLY)

    def _combine_steps(self, logits: Sequence[Tensor]) -> Tensor:
        if self.spec.suppress_tokens:
            suppressed = cast("Tensor", self.suppressed)
            logits = [member_logits.index_fill(-1, suppressed, -math.inf) for member_logits in logits]
        return self._combine(logits)

    def _combine(self, logits: Sequence[Tensor]) -> Tensor:
        log_probs = torch.stack([torch.log_softmax(member_logits.float(), -1) for member_logits in logits])  # [M, R, V]
        if self.mean == "log_probabilities":
            return log_probs.mean(0)
        return torch.logsumexp(log_probs, 0) - math.log(len(log_probs))


class EnsembleState(DecoderState):
    """The decoder states of the members."""

    def __init__(self, members: Sequence[DecoderState]) -> None:
        super().__init__(StackState([], []), members[0].position)
        self.members = list(members)

    def attention_weights(self) -> Tensor | None:
        """Return the mean of the members' attention over the source.  # [R, M]"""
        weights = [state.attention_weights() for state in self.members]
        present = [member_weights for member_weights in weights if member_weights is not None]
        return torch.stack(present).mean(0) if present else None

    def reorder(self, indices: Tensor) -> None:
        """Let row i of every member continue from row indices[i]."""
        for state in self.members:
            state.reorder(indices)

    def merge(self, kept: Tensor, other: DecoderState | None, rows_per_source: int) -> None:
        """Keep the sources at `kept` in the states of all members, and append those of `other`."""
        others = other.members if isinstance(other, EnsembleState) else [None] * len(self.members)
        for state, other_state in zip(self.members, others, strict=True):
            state.merge(kept, other_state, rows_per_source)
        self.position = self.members[0].position


def ensemble_bundle(bundles: Sequence[ModelBundle], names: Sequence[str]) -> ModelBundle:
    """Return the models as one, with the tokenizers, the folder and the settings of the first.

    Args:
        bundles: models that generate text; those of one vocabulary only.
        names: names of the models in error messages.
    """
    first = bundles[0]
    for bundle, name in zip(bundles, names, strict=True):
        if not bundle.model.is_generative:
            raise InputError(
                f"{name}: this {bundle.model.spec.family} generates no text, and the models of an "
                "ensemble do; leave it out"
            )
        difference = _first_difference(first, bundle)
        if difference:
            raise InputError(
                f"{name}: {difference} in {names[0]}; the models of an ensemble read and write the same tokens"
            )
    if len(bundles) == 1:
        return first
    ensemble: Any = Ensemble([bundle.model for bundle in bundles])
    return replace(first, model=ensemble)


def _first_difference(first: ModelBundle, other: ModelBundle) -> str | None:
    """Return how the texts or tokens of a model differ from those of the first: what it has, and `not …`."""
    kinds = [("continues a prompt" if b.model.continues_input else "reads a source") for b in (other, first)]
    if kinds[0] != kinds[1]:
        return f"the model {kinds[0]}, and {kinds[1]}"
    sides = (
        ("source", first.source_tokenizer, other.source_tokenizer),
        ("target", first.target_tokenizer, other.target_tokenizer),
    )
    for side, tokenizer, other_tokenizer in sides:
        if tokenizer is not None and other_tokenizer is not None and tokenizer is not other_tokenizer:
            difference = _vocabulary_difference(side, tokenizer, other_tokenizer)
            if difference:
                return difference
    heads = [bundle.model.spec.head for bundle in (other, first)]
    sizes = [0 if head is None else head.num_outputs for head in heads]
    if sizes[0] != sizes[1]:
        return f"the model has {sizes[0]:,} outputs, and {sizes[1]:,}"
    if other.model.spec.eos_id != first.model.spec.eos_id:
        return f"EOS is token {other.model.spec.eos_id}, and {first.model.spec.eos_id}"
    return None


def _vocabulary_difference(side: str, first: Tokenizer, other: Tokenizer) -> str | None:
    for token_id in range(max(first.vocab_size, other.vocab_size)):
        token, other_token = first.backend.id_to_token(token_id), other.backend.id_to_token(token_id)
        if token != other_token:
            names = [quote(name) if name is not None else "missing" for name in (other_token, token)]
            return f"token {token_id} of the {side} vocabulary is {names[0]}, and {names[1]}"
    return None
