"""BERTScore (Zhang et al. 2020): each token's vector is matched with the most similar vector on the other side.

Precision is the mean over the tokens of the hypothesis, recall over those of the reference. Any model that reads text
can be the encoder; scores depend on the encoder and the layer, so the signature contains both. The paper uses layer 9
of BERT-base and 17 of RoBERTa-large; the default is the last layer. Scores are not rescaled with a baseline.
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
from qkv.metrics.registry import AllSides, MetricEntry, MetricOptions

_CHUNK_SIZE = 256  # examples whose vectors are in memory at once


@dataclass(frozen=True)
class BertScore(MeanMetric[str, Sequence[str]]):
    """F1, precision and recall, each of the best reference; 0 if a side is empty.

    Special tokens of the model's template have no weight, but other tokens may be most similar to them.
    """

    name: ClassVar[str] = "bertscore"
    score_names: ClassVar[tuple[str, ...]] = ("f1", "precision", "recall")
    model: ModelBundle
    """The encoder with its tokenizer."""
    layer: int | None = None
    """Layer whose vectors are compared; 0 is the input of the first block, None the last layer."""
    idf: bool = False
    """Weight each token by its inverse document frequency in the references."""
    on_too_long: Literal["refuse", "truncate"] = "refuse"
    """What happens to a text over the encoder's maximum length."""
    model_name: str = ""
    """Name of the encoder in the signature."""

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Stats:
        check_texts(hypotheses, references)
        weights = self._idf_weights([text for accepted in references for text in accepted])
        rows: list[list[float]] = []
        for start in range(0, len(hypotheses), _CHUNK_SIZE):
            chunk = slice(start, start + _CHUNK_SIZE)
            embeddings = self._embed_texts(
                {*hypotheses[chunk], *(t for accepted in references[chunk] for t in accepted)}, weights
            )
            for hypothesis, accepted in zip(hypotheses[chunk], references[chunk], strict=True):
                matches = [
                    _greedy_match(embeddings.get(hypothesis), embeddings.get(reference)) for reference in accepted
                ]
                rows.append([max(column) for column in zip(*matches, strict=True)])
        return np.array(rows)

    def _embed_texts(self, texts: set[str], weights: _IdfWeights | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Return unit vectors and weights of each text's tokens, without texts of white space only."""
        ordered_texts = sorted(text for text in texts if text.strip())
        if not ordered_texts:
            return {}
        layers: Literal["last"] | int = "last" if self.layer is None else self.layer
        vectors = embed(
            self.model, ordered_texts, pool="tokens", layers=layers, normalize=True, on_too_long=self.on_too_long
        )  # [n, W] each
        encodings = encode_inputs(
            self.model, ordered_texts, [describe_input(text) for text in ordered_texts], on_too_long=self.on_too_long
        )
        embeddings = {}
        for text, vector, encoding in zip(ordered_texts, vectors, encodings, strict=True):
            is_text_token = torch.tensor(
                [float(sequence_id is not None) for sequence_id in encoding.sequence_ids]
            )  # [n]
            token_weights = (
                is_text_token if weights is None else is_text_token * torch.tensor([weights[id] for id in encoding.ids])
            )
            # the idf of a word in every reference is 0; a text of such words only is weighted evenly
            embeddings[text] = vector, token_weights if float(token_weights.sum()) else is_text_token
        return embeddings

    def _idf_weights(self, references: Sequence[str]) -> _IdfWeights | None:
        if not self.idf:
            return None
        if len(references) < 2:
            raise InputError("BERTScore with idf needs at least two references, from which it computes the weights")
        document_counts = Counter(
            id for ids in require_tokenizer(self.model).encode_batch(references) for id in set(ids)
        )
        return _IdfWeights(
            {id: math.log((len(references) + 1) / (n + 1)) for id, n in document_counts.items()}, len(references)
        )

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        layer = "last layer" if self.layer is None else f"layer {self.layer}"
        name = self.model_name or self.model.model.spec.family
        return f"{name}, {layer}, {'idf' if self.idf else 'no idf'}, not rescaled"


class _IdfWeights(dict[int, float]):
    """Inverse document frequencies; a token that is in no reference has the largest weight."""

    def __init__(self, weights: dict[int, float], num_documents: int) -> None:
        super().__init__(weights)
        self._default_weight = math.log(num_documents + 1)

    def __missing__(self, id: int) -> float:
        return self._default_weight


def _greedy_match(hypothesis: tuple[Tensor, Tensor] | None, reference: tuple[Tensor, Tensor] | None) -> list[float]:
    """Return F1, precision and recall of one pair of texts."""
    if hypothesis is None or reference is None:
        return [0.0, 0.0, 0.0]
    (hypothesis_vectors, hypothesis_weights), (reference_vectors, reference_weights) = hypothesis, reference
    similarity = hypothesis_vectors @ reference_vectors.T  # [n, m]
    precision = float(similarity.amax(1) @ hypothesis_weights / hypothesis_weights.sum())
    recall = float(similarity.amax(0) @ reference_weights / reference_weights.sum())
    total = precision + recall
    return [2 * precision * recall / total if total else 0.0, precision, recall]


def _make_bertscore(options: MetricOptions, _: AllSides) -> BertScore:
    if options.model is None:
        raise InputError("bertscore needs an encoder; name one with --model")
    return BertScore(options.model, options.layer, options.idf, options.on_too_long, options.model_name)


BERTSCORE = MetricEntry("texts", _make_bertscore, ("model", "layer", "idf", "on_too_long", "device"))
