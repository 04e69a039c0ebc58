"""Permutation language modeling: predict tokens in a random order of factorization (Yang et al. 2019).

Both streams are packed: sequences of any length, odd ones too, and queries for the tokens to predict only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.corpora.segments import Segments
from qkv.data.noise.config import DEFAULT_PLM, PLMConfig
from qkv.data.noise.permutation import sample_factorization
from qkv.data.rng import CounterRNG, Ints, PackedChunks
from qkv.data.template_batch import apply_template
from qkv.nn import Ragged
from qkv.nn.memory import Memory
from qkv.nn.two_stream import TwoStreamEncoder
from qkv.objectives.base import Objective, TextContext
from qkv.objectives.chunked_cross_entropy import lm_head, nll
from qkv.objectives.loss import LossSum
from qkv.objectives.samples import fill_mask_sample
from qkv.recipe.objectives import PLMObjective
from qkv.tokenization.vocab_tables import VocabTables


class Inputs(NamedTuple):
    """Inputs and labels of an encoder with two streams."""

    source: Ragged  # [T]
    token_type_ids: Tensor | None  # [T]
    order: Tensor  # [T] rank of each token in the order of factorization
    targets: Ragged  # [M] the tokens to predict
    labels: Tensor  # [M] their ids
    segments: Segments | None = None  # the streams that the sequences continue, for models with memory

    @property
    def num_targets(self) -> tuple[int, ...]:
        return (len(self.labels),)


def make_inputs(
    chunks: PackedChunks,
    vocab_tables: VocabTables,
    rng: CounterRNG,
    config: PLMConfig = DEFAULT_PLM,
    *,
    token_type_ids: Ints | None = None,
) -> Inputs:
    """Draw an order of factorization for chunks that have the tokenizer's special tokens already."""
    order, targets, target_counts = sample_factorization(chunks, vocab_tables, rng, config)
    return Inputs(
        Ragged.from_lengths(torch.from_numpy(chunks.ids), chunks.lengths.tolist()),
        None if token_type_ids is None else torch.from_numpy(token_type_ids),
        torch.from_numpy(order),
        Ragged.from_lengths(torch.from_numpy(targets), target_counts.tolist()),
        torch.from_numpy(chunks.ids[targets]),
    )


def loss(model: TwoStreamEncoder, batch: Inputs) -> LossSum:
    """Return the negative log-likelihood of the tokens to predict."""
    features = model(batch.source, batch.token_type_ids, batch.targets, order=batch.order, return_logits=False)
    return LossSum(nll(lm_head(model), features, batch.labels), len(batch.labels))  # [M, width], [M]


class PermutationLM(Objective[PLMObjective]):
    """Permutation language modeling. Segments of streams, which continue a memory, get no special tokens."""

    name = "plm"
    config_class = PLMObjective
    architectures = frozenset({"two-stream encoder"})
    inputs_class = Inputs
    supports_memory = True

    def max_chunk_tokens(self, max_length: int, context: TextContext) -> int:
        return max_length if context.carries_memory else max_length - context.template.num_added_tokens

    def prepare(self, batch: ChunkBatch, context: TextContext, rng: CounterRNG) -> Inputs:
        if context.carries_memory:
            # one segment, as that of the memory; without any, the weights of segments would have no gradient
            token_type_ids = np.zeros_like(batch.chunks.ids)
            inputs = make_inputs(batch.chunks, context.vocab_tables, rng, self.config, token_type_ids=token_type_ids)
            return inputs._replace(segments=batch.segments)
        chunks, token_type_ids = apply_template(batch, context.template)
        return make_inputs(chunks, context.vocab_tables, rng, self.config, token_type_ids=token_type_ids)

    def losses(
        self,
        model: TwoStreamEncoder,
        inputs: Inputs,
        label_smoothing: float = 0.0,  # noqa: ARG002  # not supported
    ) -> tuple[LossSum, ...]:
        return (loss(model, inputs),)

    def losses_with_memory(
        self,
        model: TwoStreamEncoder,
        inputs: Inputs,
        memory: Memory,
        label_smoothing: float = 0.0,  # noqa: ARG002  # not supported
    ) -> tuple[tuple[LossSum, ...], Memory]:
        features, memory = model.forward_with_memory(
            inputs.source,
            memory,
            inputs.targets,
            token_type_ids=inputs.token_type_ids,
            order=inputs.order,
            return_logits=False,
        )
        return (LossSum(nll(lm_head(model), features, inputs.labels), len(inputs.labels)),), memory

    def sample(
        self,
        model: TwoStreamEncoder,
        chunk: ChunkBatch,
        context: TextContext,
        rng: CounterRNG,  # noqa: ARG002
    ) -> str:
        return fill_mask_sample(model, context.tokenizer, context.template, chunk.chunks.ids.tolist())
