"""Multiple choice: each option is a sequence of its own with the context, and their scores compete.

As BERT takes SWAG (Devlin et al. 2019, 4.4): the context first, then what stands between it and the option, and the
option. Examples may have different numbers of options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.data.examples import MultipleChoiceExample
from qkv.errors import InputError
from qkv.metrics.classification import Accuracy
from qkv.metrics.metric import Metric
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks import text_inputs
from qkv.tasks.base import Features, check_example_type, check_labeled, pack_features
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    """See `qkv.tasks.base.Task`. A prediction is an option's number, from 0."""

    on_too_long: text_inputs.OnTooLong = "truncate"
    metric: str = "accuracy"

    name = "multiple_choice"
    head_kind = "choice"
    head_overrides: ClassVar[dict[str, Any]] = {}
    example_type = MultipleChoiceExample

    def primary_metric(self, labels: Sequence[str]) -> str:  # noqa: ARG002
        return self.metric

    def labels(self, examples: Sequence[MultipleChoiceExample]) -> tuple[str, ...]:
        check_labeled(self, examples, MultipleChoiceExample)
        return ()

    def featurize(
        self,
        examples: Sequence[MultipleChoiceExample],
        tokenizer: Tokenizer,
        labels: Sequence[str],  # noqa: ARG002
        max_length: int,
    ) -> list[Features]:
        check_example_type(self.name, examples, MultipleChoiceExample)
        features = []
        for example_index, example in enumerate(examples):
            _check_example(example)
            prefix = f"{example.text_pair} " if example.text_pair else ""
            encodings = tokenizer.encode_plus_batch([(example.context, prefix + choice) for choice in example.choices])
            fitted_encodings = [text_inputs.fit_length(encoding, max_length, self.on_too_long, example.location) for encoding in encodings]
            label_ids = () if example.label is None else (float(example.label),)
            truncated = any(truncated for _, truncated in fitted_encodings)
            features.append(Features.from_encodings(example_index, [encoding for encoding, _ in fitted_encodings], label_ids, truncated=truncated))
        return features

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, _ = pack_features(features, use_token_types)
        label_ids = torch.tensor([int(x) for feature in features for x in feature.labels])
        return Inputs(source, token_type_ids, None, label_ids, tuple(len(feature.input_ids) for feature in features))

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        return classification.multiple_choice_ce(logits, batch)

    def postprocess(self, outputs: Sequence[tuple[Features, Tensor]], example: MultipleChoiceExample, labels: Sequence[str]) -> int:  # noqa: ARG002
        ((_, logits),) = outputs
        return int(logits[:, 0].argmax())

    def gold(self, example: MultipleChoiceExample) -> int:
        if example.label is None:
            raise InputError(f"{example.location}: nobody has said which option is right; give its number")
        return example.label

    def metrics(
        self,
        labels: Sequence[str],  # noqa: ARG002
        predictions: Sequence[int],  # noqa: ARG002
        golds: Sequence[int],  # noqa: ARG002
    ) -> list[Metric[Any, Any]]:
        return [Accuracy()]


def _check_example(example: MultipleChoiceExample) -> None:
    if len(example.choices) < 2:
        count_text = "there is one option" if example.choices else "there are no options"
        raise InputError(f"{example.location}: {count_text} to choose from; give at least two")
    if not all(choice.strip() for choice in example.choices):
        raise InputError(f"{example.location}: an option is empty; fill it in, or remove it")
    if example.label is not None and not 0 <= example.label < len(example.choices):
        range_text = f"the answer is {example.label}, but the options are 0 to {len(example.choices) - 1}"
        raise InputError(f"{example.location}: {range_text}; correct it")


def make(**settings: Any) -> MultipleChoice:
    return MultipleChoice(**settings)
