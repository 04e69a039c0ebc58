"""BERTScore (Zhang et al. 2020): each token's vector is matched with the most similar one on the other side.

Precision is the mean over the hypothesis' tokens, recall over the reference's. On any model of ours that reads text;
the figures belong to the encoder and the layer, which the signature therefore names. The paper's own choices: layer 9
of BERT-base, 17 of RoBERTa-large; without a choice the last. Not rescaled with a baseline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from qkv.checkpoints import ModelBundle
from qkv.checkpoints.embed import embed
from qkv.checkpoints.inputs import describe_input, encode_inputs, require_tokenizer
from qkv.errors import InputError
from qkv.metrics.metric import MeanMetric, Stats, check_texts

_CHUNK_SIZE = 256  # examples whose vectors are held at once


@dataclass(frozen=True)
class BertScore(MeanMetric[str, Sequence[str]]):
    """F1, precision and recall of the best reference each; 0 where a side is empty.

    `idf` weighs a token by how few of the references hold it; what the model's template adds weighs nothing, but may be
    what a token is most similar to.
    """

    name: ClassVar[str] = "bertscore"
    score_names: ClassVar[tuple[str, ...]] = ("f1", "precision", "recall")
    model: ModelBundle
    layer: int | None = None
    idf: bool = False
    on_too_long: Literal["refuse", "truncate"] = "refuse"
    model_name: str = ""  # the model's name, for the signature

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Stats:
        check_texts(hypotheses, references)
        weights = self._idf_weights([text for accepted in references for text in accepted])
        rows: list[list[float]] = []
        for start in range(0, len(hypotheses), _CHUNK_SIZE):
            chunk = slice(start, start + _CHUNK_SIZE)
            embeddings = self._embed_texts({*hypotheses[chunk], *(t for accepted in references[chunk] for t in accepted)}, weights)
            for hypothesis, accepted in zip(hypotheses[chunk], references[chunk], strict=True):
                matches = [_greedy_match(embeddings.get(hypothesis), embeddings.get(reference)) for reference in accepted]
                rows.append([max(column) for column in zip(*matches, strict=True)])
        return np.array(rows)

    def _embed_texts(self, texts: set[str], weights: _IdfWeights | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Unit vectors and weights of each text's tokens; a text of white space has none."""
        ordered_texts = sorted(text for text in texts if text.strip())
        if not ordered_texts:
            return {}
        layers: Literal["last"] | int = "last" if self.layer is None else self.layer
        vectors = embed(self.model, ordered_texts, pool="tokens", layers=layers, normalize=True, on_too_long=self.on_too_long)  # [n, W] each
        encodings = encode_inputs(self.model, ordered_texts, [describe_input(text) for text in ordered_texts], on_too_long=self.on_too_long)
        embeddings = {}
        for text, vector, encoding in zip(ordered_texts, vectors, encodings, strict=True):
            is_text_token = torch.tensor([float(sequence_id is not None) for sequence_id in encoding.sequence_ids])  # [n]
            token_weights = is_text_token if weights is None else is_text_token * torch.tensor([weights[id] for id in encoding.ids])
            # a text of words that every reference holds would weigh nothing at all
            embeddings[text] = vector, token_weights if float(token_weights.sum()) else is_text_token
        return embeddings

    def _idf_weights(self, references: Sequence[str]) -> _IdfWeights | None:
        if not self.idf:
            return None
        if len(references) < 2:
            raise InputError("BERTScore with idf needs several references: the weights come from all of them")
        document_counts = Counter(id for ids in require_tokenizer(self.model).encode_batch(references) for id in set(ids))
        return _IdfWeights({id: math.log((len(references) + 1) / (n + 1)) for id, n in document_counts.items()}, len(references))

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        layer = "last layer" if self.layer is None else f"layer {self.layer}"
        return (
            f"{self.model_name or self.model.model.spec.family}, {layer}, {'idf' if self.idf else 'no idf'}, not rescaled"
        )


class _IdfWeights(dict[int, float]):
    """Inverse document frequencies; a token that no reference holds weighs most."""

    def __init__(self, weights: dict[int, float], num_documents: int) -> None:
        super().__init__(weights)
        self._default_weight = math.log(num_documents + 1)

    def __missing__(self, id: int) -> float:
        return self._default_weight


def _greedy_match(hypothesis: tuple[Tensor, Tensor] | None, reference: tuple[Tensor, Tensor] | None) -> list[float]:
    """F1, precision, recall."""
    if hypothesis is None or reference is None:
        return [0.0, 0.0, 0.0]
    (hypothesis_vectors, hypothesis_weights), (reference_vectors, reference_weights) = hypothesis, reference
    similarity = hypothesis_vectors @ reference_vectors.T  # [n, m]
    precision = float(similarity.amax(1) @ hypothesis_weights / hypothesis_weights.sum())
    recall = float(similarity.amax(0) @ reference_weights / reference_weights.sum())
    total = precision + recall
    return [2 * precision * recall / total if total else 0.0, precision, recall]
