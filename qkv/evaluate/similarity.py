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

from qkv.decode import Decoding, embed
from qkv.decode.frames import framed, place_of, tokeniser_of
from qkv.errors import InputError
from qkv.evaluate.metric import Mean, Rows, check_texts
from qkv.weights import Loaded

_TOGETHER = 256  # examples whose vectors are held at once


@dataclass(frozen=True)
class BertScore(Mean[str, Sequence[str]]):
    """F1, precision and recall of the best reference each; 0 where a side is empty.

    `idf` weighs a token by how few of the references hold it; what the model's template adds weighs nothing, but may be
    what a token is most similar to.
    """

    name: ClassVar[str] = "bertscore"
    figures: ClassVar[tuple[str, ...]] = ("f1", "precision", "recall")
    model: Loaded
    layer: int | None = None
    idf: bool = False
    too_long: Literal["refuse", "truncate"] = "refuse"
    called: str = ""  # the model's name, for the signature

    def values(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Rows:
        check_texts(hypotheses, references)
        weights = self._inverse_frequencies([text for accepted in references for text in accepted])
        rows: list[list[float]] = []
        for first in range(0, len(hypotheses), _TOGETHER):
            part = slice(first, first + _TOGETHER)
            known = self._seen({*hypotheses[part], *(t for accepted in references[part] for t in accepted)}, weights)
            for hypothesis, accepted in zip(hypotheses[part], references[part], strict=True):
                found = [_matched(known.get(hypothesis), known.get(reference)) for reference in accepted]
                rows.append([max(column) for column in zip(*found, strict=True)])
        return np.array(rows)

    def _seen(self, texts: set[str], weights: _Weights | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Unit vectors and weights of each text's tokens; a text of white space has none."""
        some = sorted(text for text in texts if text.strip())
        if not some:
            return {}
        how = Decoding(too_long=self.too_long)
        layers: Literal["last"] | int = "last" if self.layer is None else self.layer
        vectors = embed(self.model, some, pool="tokens", layers=layers, unit=True, how=how)  # [n, W] each
        frames = framed(self.model, some, [place_of(text) for text in some], how)
        out = {}
        for text, vector, frame in zip(some, vectors, frames, strict=True):
            plain = torch.tensor([float(part is not None) for part in frame.parts])  # [n]
            weighed = plain if weights is None else plain * torch.tensor([weights[id] for id in frame.ids])
            # a text of words that every reference holds would weigh nothing at all
            out[text] = vector, weighed if float(weighed.sum()) else plain
        return out

    def _inverse_frequencies(self, references: Sequence[str]) -> _Weights | None:
        if not self.idf:
            return None
        if len(references) < 2:
            raise InputError("BERTScore with idf needs several references: the weights come from all of them")
        counts = Counter(id for ids in tokeniser_of(self.model).encode_batch(references) for id in set(ids))
        return _Weights({id: math.log((len(references) + 1) / (n + 1)) for id, n in counts.items()}, len(references))

    def signature(self, references: Sequence[Sequence[str]]) -> str:  # noqa: ARG002
        layer = "last layer" if self.layer is None else f"layer {self.layer}"
        return (
            f"{self.called or self.model.model.spec.family}, {layer}, {'idf' if self.idf else 'no idf'}, not rescaled"
        )


class _Weights(dict[int, float]):
    """Inverse document frequencies; a token that no reference holds weighs most."""

    def __init__(self, known: dict[int, float], documents: int) -> None:
        super().__init__(known)
        self._unseen = math.log(documents + 1)

    def __missing__(self, id: int) -> float:
        return self._unseen


def _matched(hypothesis: tuple[Tensor, Tensor] | None, reference: tuple[Tensor, Tensor] | None) -> list[float]:
    """F1, precision, recall."""
    if hypothesis is None or reference is None:
        return [0.0, 0.0, 0.0]
    (predicted, predicted_weights), (wanted, wanted_weights) = hypothesis, reference
    similarity = predicted @ wanted.T  # [n, m]
    precision = float(similarity.amax(1) @ predicted_weights / predicted_weights.sum())
    recall = float(similarity.amax(0) @ wanted_weights / wanted_weights.sum())
    together = precision + recall
    return [2 * precision * recall / together if together else 0.0, precision, recall]
