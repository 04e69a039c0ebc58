"""Next-sentence prediction: whether the second text follows the first (Devlin et al. 2019, 3.1, task 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkv import spec
from qkv.data.examples import TextExample
from qkv.errors import InputError
from qkv.tasks.text_classification import TextClassification

NEXT_SENTENCE_LABELS = ("follows", "does not follow")


@dataclass(frozen=True, kw_only=True)
class NextSentence(TextClassification):
    """Classification of a pair of sentences by a pretrained next-sentence head."""

    name = "next_sentence"
    head_kind = "next_sentence"

    @property
    def head_overrides(self) -> Mapping[str, Any]:
        return {}

    def output_names(self, head: spec.Head) -> tuple[str, ...]:  # noqa: ARG002
        return NEXT_SENTENCE_LABELS

    def parse_texts(self, texts: Sequence[str], location: str) -> TextExample:
        if len(texts) != 2:
            raise InputError(f"{location}: this model takes two sentences, separated by a tab")
        return super().parse_texts(texts, location)
