"""Examples as model input, and their packing into batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.nn import Ragged
from qkv.objectives.classification import pack_sequences
from qkv.tokenization.backend import Encoding


@dataclass(frozen=True)
class Features:
    """An example, or a window of one, as model input."""

    example_index: int
    input_ids: tuple[Sequence[int], ...]  # one sequence, or one per choice
    token_type_ids: tuple[Sequence[int], ...]
    labels: tuple[float, ...]  # targets; () for an unlabeled example
    label_positions: tuple[int, ...] | None = None  # tokens with a target; None: all tokens, or whole sequences
    metadata: Any = None  # what `postprocess` needs, such as offsets of tokens in the text
    truncated: bool = False  # the text was longer than the model's maximum length

    @staticmethod
    def from_encodings(
        example_index: int, encodings: Sequence[Encoding], labels: tuple[float, ...], **optional_fields: Any
    ) -> Features:
        """Make features of a tokenizer's output, in arrays: a list takes about 40 bytes per token."""
        input_ids = tuple(array("i", encoding.ids) for encoding in encodings)
        return Features(
            example_index,
            input_ids,
            tuple(bytes(encoding.token_type_ids) for encoding in encodings),
            labels,
            **optional_fields,
        )

    @property
    def length(self) -> int:
        return sum(map(len, self.input_ids))

    def num_logits(self, is_token_level: bool) -> int:
        """Return the number of rows of logits."""
        if not is_token_level:
            return len(self.input_ids)
        return self.length if self.label_positions is None else len(self.label_positions)


FeatureOutputs = Sequence[tuple[Features, Tensor]]  # the features of one example with their logits


def pack_features(features: Sequence[Features], use_token_types: bool) -> tuple[Ragged, Tensor | None, Tensor | None]:
    """Return packed ids, token types if the model uses them, and the positions of labeled tokens."""
    ids, lengths = pack_sequences([sequence for feature in features for sequence in feature.input_ids])
    token_type_ids = (
        pack_sequences([type_ids for feature in features for type_ids in feature.token_type_ids])[0]
        if use_token_types
        else None
    )
    if features[0].label_positions is None:
        return Ragged.from_lengths(ids, lengths), token_type_ids, None
    positions, offset = [], 0
    for feature in features:
        positions += [offset + position for position in feature.label_positions or ()]
        offset += feature.length
    return Ragged.from_lengths(ids, lengths), token_type_ids, torch.tensor(positions, dtype=torch.long)
