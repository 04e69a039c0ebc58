"""Causal language modeling: predict each token from the tokens before it (Radford et al. 2018, 2019)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv import spec
from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.corpora.segments import Segments
from qkv.data.rng import CounterRNG, Ints, PackedChunks
from qkv.errors import InputError
from qkv.nn import Decoder, Ragged
from qkv.nn.memory import Memory
from qkv.nn.stack import EncoderOutput
from qkv.objectives.base import Objective, TextContext
from qkv.objectives.chunked_cross_entropy import lm_head, nll
from qkv.objectives.loss import LossSum
from qkv.objectives.samples import continuation_sample
from qkv.recipe.objectives import CLMObjective


class Inputs(NamedTuple):
    """Inputs and labels of a decoder."""

    tokens: Ragged  # [T]
    positions: Tensor | None  # [M] tokens after which the next one is predicted; None: all tokens
    labels: Tensor  # [M]
    segments: Segments | None = None  # the streams that the sequences continue, for models with memory

    @property
    def num_targets(self) -> tuple[int, ...]:
        return len(self.labels), self.tokens.layout.num_tokens


def make_inputs(chunks: PackedChunks, *, bos_id: int | None = None) -> Inputs:
    """Shift chunks by one token to get inputs and labels.

    All tokens of a chunk are labels; without a BOS token, all but the first. The last token is a label only. A chunk of
    one token, without a BOS token, has no label.
    """
    chunk_ids, token_positions = chunks.row_ids, np.arange(len(chunks.ids)) - np.repeat(chunks.starts, chunks.lengths)
    is_last = token_positions == chunks.lengths[chunk_ids] - 1
    if bos_id is not None and bos_id >= 0:
        tokens = np.where(token_positions == 0, bos_id, np.roll(chunks.ids, 1))
        return _pack_inputs(tokens, chunks.lengths, None, chunks.ids)
    is_input = ~is_last | (token_positions == 0)
    lengths = np.maximum(chunks.lengths - 1, 1)
    label_positions = None if chunks.lengths.min() > 1 else np.flatnonzero(~is_last[is_input])
    return _pack_inputs(chunks.ids[is_input], lengths, label_positions, chunks.ids[token_positions > 0])


def _pack_inputs(tokens: Ints, lengths: Ints, positions: Ints | None, labels: Ints) -> Inputs:
    packed = Ragged.from_lengths(torch.from_numpy(tokens), lengths.tolist())
    return Inputs(packed, None if positions is None else torch.from_numpy(positions), torch.from_numpy(labels))


def loss(model: Decoder, batch: Inputs) -> LossSum:
    """Return the negative log-likelihood of the labels."""
    features = model(batch.tokens, batch.positions, return_logits=False)  # [M, width]
    return LossSum(nll(lm_head(model), features, batch.labels), len(batch.labels))


def activation_penalty(output: EncoderOutput, config: CLMObjective) -> LossSum:
    """Return the penalties on large and on changing hidden states, summed over tokens (Merity et al. 2018, 4.6).

    The first is on the hidden states after dropout, the second on those before it.
    """
    hidden = output.hidden
    undropped = hidden.values if output.undropped is None else output.undropped
    changes = (undropped[1:] - undropped[:-1])[hidden.layout.positions[1:] > 0]  # within sequences
    total = config.activation_penalty * hidden.values.float().square().mean(-1).sum()
    total = total + config.temporal_penalty * changes.float().square().mean(-1).sum()
    return LossSum(total, hidden.layout.num_tokens)


class CausalLM(Objective[CLMObjective]):
    """Causal language modeling. Chunks of packed documents get no BOS token, because they start inside a document."""

    name = "clm"
    config_class = CLMObjective
    architectures = frozenset({"decoder"})
    inputs_class = Inputs
    supports_memory = True
    segment_overlap = 1

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("loss", "penalty") if self._is_penalized else ("loss",)

    @property
    def _is_penalized(self) -> bool:
        return self.config.activation_penalty > 0 or self.config.temporal_penalty > 0

    def check_model(self, model: spec.Model) -> None:
        super().check_model(model)
        if self._is_penalized and not isinstance(model.decoder, spec.RecurrentStack):
            message = f"activation_penalty and temporal_penalty are for recurrent models, and {model.family} is not one"
            raise InputError(f"objective.clm: {message}; remove them")

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        # the last token is no input; its place is free unless a BOS token comes first
        return max_length + 1 if self._bos_id(context) is None else max_length

    def prepare(self, batch: ChunkBatch, context: TextContext, rng: CounterRNG) -> Inputs:  # noqa: ARG002  # no noise
        return make_inputs(batch.chunks, bos_id=self._bos_id(context))._replace(segments=batch.segments)

    def losses(self, model: Decoder, inputs: Inputs, label_smoothing: float = 0.0) -> tuple[LossSum, ...]:
        if self._is_penalized:
            return self.losses_with_memory(model, inputs, model.initial_memory(len(inputs.tokens)), label_smoothing)[0]
        return (loss(model, inputs),)

    def losses_with_memory(
        self,
        model: Decoder,
        inputs: Inputs,
        memory: Memory,
        label_smoothing: float = 0.0,  # noqa: ARG002  # not supported
    ) -> tuple[tuple[LossSum, ...], Memory]:
        if not self._is_penalized:
            features, memory = model.forward_with_memory(inputs.tokens, memory, inputs.positions, return_logits=False)
            return (self._nll(model, features, inputs),), memory
        output = model.hidden_with_memory(inputs.tokens, memory)
        assert output.memory is not None
        assert model.head is not None
        hidden = output.hidden.values if inputs.positions is None else output.hidden.values[inputs.positions]
        nll_loss = self._nll(model, model.head.compute_features(hidden), inputs)
        return (nll_loss, activation_penalty(output, self.config)), output.memory

    @staticmethod
    def _nll(model: Decoder, features: Tensor, inputs: Inputs) -> LossSum:
        return LossSum(nll(lm_head(model), features, inputs.labels), len(inputs.labels))

    def sample(self, model: Decoder, chunk: ChunkBatch, context: TextContext, rng: CounterRNG) -> str:  # noqa: ARG002
        return continuation_sample(model, context.tokenizer, chunk.chunks.ids.tolist())

    @staticmethod
    def _bos_id(context: TextContext) -> int | None:
        return None if context.is_packed or context.carries_memory else context.tokenizer.bos_id
