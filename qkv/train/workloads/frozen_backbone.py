"""Hidden states of a frozen backbone, which are the same in every epoch: they are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from qkv import spec
from qkv.checkpoints.state import AnyModel
from qkv.data.batching import Ints, evaluation_batches
from qkv.tasks.features import Features, pack_features

_MAX_BYTES = 2**30  # more than this is computed again in every epoch
_BATCH_TOKENS = 8192


def has_constant_features(model: AnyModel) -> bool:
    """Return whether the head's input depends on the example alone: no trained layer comes before the head."""
    head = model.spec.head
    if head is None or not model.backbone_frozen or model.scalar_mix is not None:
        return False
    has_learned_pool = isinstance(head.pool, spec.Attention) and not head.is_token_level
    return not has_learned_pool and isinstance(spec.input_embedding(model.spec), spec.Embedding)


class FrozenFeatures:
    """The head's input for every feature of a training set, in host memory."""

    def __init__(self, rows: Tensor, counts: Sequence[int]):
        """Store the vectors `rows` [R, width], of which the features have `counts` each."""
        self._rows, self._ends = rows, [0, *accumulate(counts)]

    def select(self, indices: Ints) -> Tensor:
        """Return the vectors of the features at these indices.  # [rows of the batch, width]"""
        return torch.cat([self._rows[self._ends[index] : self._ends[index + 1]] for index in indices.tolist()])

    @staticmethod
    def compute(model: AnyModel, features: Sequence[Features]) -> FrozenFeatures | None:
        """Run the frozen backbone over all features; None if their vectors would take too much memory."""
        head = model.head
        assert head is not None
        counts = [feature.num_logits(head.spec.is_token_level) for feature in features]
        width = head.spec.d_model * head.spec.num_concat_layers
        if sum(counts) * width * 4 > _MAX_BYTES:
            return None
        frozen = FrozenFeatures(torch.empty(sum(counts), width), counts)
        was_training = model.training
        model.eval()
        for indices in evaluation_batches(_lengths(features), _BATCH_TOKENS):
            vectors = _head_inputs(model, [features[index] for index in indices])
            vectors_of_each = torch.split(vectors, [counts[index] for index in indices])
            for index, rows in zip(indices, vectors_of_each, strict=True):
                frozen._rows[frozen._ends[index] : frozen._ends[index + 1]] = rows
        model.train(was_training)
        return frozen


def _lengths(features: Sequence[Features]) -> Ints:
    return torch.tensor([feature.length for feature in features], dtype=torch.long).numpy()


@torch.no_grad()
def _head_inputs(model: AnyModel, features: Sequence[Features]) -> Tensor:
    """Return the vectors that the head reads, on the host.  # [rows, width]"""
    source, token_type_ids, positions = pack_features(features, model.spec.has_token_types)
    source, device = source.to(model.device), model.device
    hidden = model.hidden_states(source, None if token_type_ids is None else token_type_ids.to(device)).hidden
    assert model.head is not None
    vectors = model.head.pool_hidden(hidden.to_tokens() if model.head.spec.is_token_level else hidden)
    return (vectors if positions is None else vectors[positions.to(device)]).float().cpu()
