"""Embedding: one vector per text, the prediction of a model without a head (Devlin et al. 2019, 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qkv.checkpoints import ModelBundle
from qkv.checkpoints.embed import LayerSelection, embed
from qkv.checkpoints.inputs import OnTooLong
from qkv.data.examples import TextExample
from qkv.tasks.base import PredictionTask, check_not_empty
from qkv.tasks.predictions import TaskPrediction
from qkv.tasks.text_inputs import get_texts


@dataclass(frozen=True, kw_only=True)
class Embedding(PredictionTask[TextExample]):
    """One vector per text or pair of texts. A prediction is a tensor [d_model]."""

    pool: Literal["mean", "cls"] = "mean"
    """Average of all tokens, or the first token."""

    layers: LayerSelection | int = "last"
    """The last layer; sum or concat of the last four; or the number of a layer, 0 being the embedding layer."""

    normalize: bool = False
    """Scale each vector to length 1."""

    on_too_long: OnTooLong = "refuse"
    """Refuse or truncate a text that exceeds the model's maximum length."""

    name = "embedding"
    has_alternatives = False
    example_type = TextExample

    def parse_texts(self, texts: Sequence[str], location: str) -> TextExample:
        check_not_empty(texts, location)
        return TextExample(texts[0], location, "\t".join(texts[1:]) or None)

    def predict(
        self,
        bundle: ModelBundle,
        examples: Sequence[TextExample],
        *,
        n_best: int = 1,  # noqa: ARG002
        max_tokens: int = 8192,
        first_index: int = 0,  # noqa: ARG002
    ) -> list[TaskPrediction]:
        vectors = embed(
            bundle,
            [get_texts(example) for example in examples],
            pool=self.pool,
            layers=self.layers,
            normalize=self.normalize,
            on_too_long=self.on_too_long,
            batch_tokens=max_tokens,
            locations=[example.location for example in examples],
        )
        rows = [vector.tolist() for vector in vectors]
        return [
            TaskPrediction(vector, " ".join(f"{value:.6g}" for value in row), None, (), {"vector": row})
            for vector, row in zip(vectors, rows, strict=True)
        ]
