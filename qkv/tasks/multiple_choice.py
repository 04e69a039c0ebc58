"""Multiple choice: one sequence per choice with the context, and a softmax over their scores.

As BERT does for SWAG (Devlin et al. 2019, 4.4): the context, then an optional text that precedes every choice, then the
choice. Examples may have different numbers of choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from qkv.checkpoints.inputs import OnTooLong
from qkv.data.examples import MultipleChoiceExample
from qkv.errors import InputError
from qkv.metrics.classification import Accuracy
from qkv.metrics.metric import Metric
from qkv.nn import BatchLayout
from qkv.objectives import classification
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.tasks import text_inputs
from qkv.tasks.base import Task, check_example_type, check_labeled, check_not_empty, check_setting
from qkv.tasks.features import FeatureOutputs, Features, pack_features
from qkv.tasks.predictions import TaskPrediction, rank
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Task[MultipleChoiceExample]):
    """One of several choices. A prediction is the index of a choice."""

    on_too_long: OnTooLong = "truncate"
    """Truncate or refuse a choice that, with its context, exceeds the model's maximum length."""

    metric: str = "accuracy"
    """Metric that selects checkpoints."""

    name = "multiple_choice"
    head_kind = "choice"
    metric_data_kind = "labels"
    example_type = MultipleChoiceExample

    def __post_init__(self) -> None:
        check_setting("on_too_long", self.on_too_long, get_args(OnTooLong))

    def parse_texts(self, texts: Sequence[str], location: str) -> MultipleChoiceExample:
        check_not_empty(texts, location)
        if len(texts) < 2:
            raise InputError(f"{location}: this model takes a text and its choices, separated by tabs")
        return MultipleChoiceExample(texts[0], tuple(texts[1:]), None, location)

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
            fitted_encodings = [
                text_inputs.fit_length(encoding, max_length, self.on_too_long, example.location)
                for encoding in encodings
            ]
            label_ids = () if example.label is None else (float(example.label),)
            truncated = any(truncated for _, truncated in fitted_encodings)
            features.append(
                Features.from_encodings(
                    example_index, [encoding for encoding, _ in fitted_encodings], label_ids, truncated=truncated
                )
            )
        return features

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, _ = pack_features(features, use_token_types)
        label_ids = torch.tensor([int(x) for feature in features for x in feature.labels])
        choices = BatchLayout([len(feature.input_ids) for feature in features])
        return Inputs(source, token_type_ids, None, label_ids, choices)

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        return classification.multiple_choice_ce(logits, batch)

    def postprocess(self, outputs: FeatureOutputs, example: MultipleChoiceExample, labels: Sequence[str]) -> int:  # noqa: ARG002
        ((_, logits),) = outputs
        return int(logits[:, 0].argmax())

    def describe(
        self,
        prediction: int,
        outputs: FeatureOutputs,
        example: MultipleChoiceExample,
        labels: Sequence[str],  # noqa: ARG002
        n_best: int,
    ) -> TaskPrediction:
        probs, text = torch.softmax(outputs[0][1][:, 0], 0).tolist(), example.choices[prediction]
        fields: dict[str, Any] = {"choice": prediction, "text": text, "probability": probs[prediction]}
        if n_best > 1:
            fields["probabilities"] = probs
        return TaskPrediction(
            prediction, text, probs[prediction], rank(example.choices, probs)[:n_best], fields, probs[prediction]
        )

    def gold(self, example: MultipleChoiceExample) -> int:
        if example.label is None:
            raise InputError(f"{example.location}: has no gold choice; add its index")
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
        count_text = "there is one choice" if example.choices else "there are no choices"
        raise InputError(f"{example.location}: {count_text}; give at least two")
    if not all(choice.strip() for choice in example.choices):
        raise InputError(f"{example.location}: a choice is empty; fill it in, or remove it")
    if example.label is not None and not 0 <= example.label < len(example.choices):
        range_text = f"the answer is {example.label}, but the choices are 0 to {len(example.choices) - 1}"
        raise InputError(f"{example.location}: {range_text}; correct it")
