"""Examples of a fine-tuning run: checks before training, batches of features, and notes for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from qkv.data.batching import Ints, ResumableBatches, balanced_split
from qkv.data.examples import Examples
from qkv.data.filtering import filter_invalid, format_skipped
from qkv.data.image_processor import ImageProcessor
from qkv.data.labels import check_labels, describe_labels
from qkv.errors import InputError
from qkv.nn.model import Model
from qkv.recipe.schema import FinetuneRecipe, TaskData
from qkv.tasks.base import Task
from qkv.tasks.features import Features
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class FeatureBatch:
    """A batch of featurized examples."""

    features: list[Features]
    indices: Ints  # of the features in the training set
    epoch: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(feature.length for feature in self.features)

    def split(self, num_microbatches: int) -> list[FeatureBatch]:
        """Split into at most `num_microbatches` consecutive batches of about equal token count."""
        ends = np.cumsum([feature.length for feature in self.features]).tolist()
        edges = balanced_split(ends, min(num_microbatches, len(self.features)))
        slices = [slice(*edge) for edge in pairwise(edges)]
        return [FeatureBatch(self.features[rows], self.indices[rows], self.epoch) for rows in slices]


class FeatureBatches(ResumableBatches[FeatureBatch]):
    """Endless batches of a task's examples in random order.

    Batches are not bucketed by length: there is no padding to save, and examples of equal length are often similar.
    """

    def __init__(
        self,
        features: Sequence[Features],
        max_tokens: int | None,
        seed: int,
        num_workers: int = 0,
        max_examples: int | None = None,
    ) -> None:
        super().__init__(max_tokens, seed, num_workers, bucket_pool=1, max_examples=max_examples)
        self._features = features
        self._feature_lengths = np.array([feature.length for feature in features], dtype=np.int64)

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:  # noqa: ARG002  # the same in every epoch
        return self._feature_lengths, np.zeros_like(self._feature_lengths)

    def _collate(self, epoch: int, indices: Ints) -> FeatureBatch:
        return FeatureBatch([self._features[index] for index in indices], indices, epoch)


@dataclass(frozen=True)
class Featurizer:
    """A task with the processor, labels and maximum length of a model."""

    task: Task[Any]
    processor: Tokenizer | ImageProcessor
    labels: tuple[str, ...]
    max_length: int

    def __call__(self, examples: Sequence[Any]) -> list[Features]:
        """Return the features of examples."""
        return list(self.task.featurize(examples, self.processor, self.labels, self.max_length))

    def check_scorable(self, examples: Sequence[Any]) -> None:
        """Refuse validation examples that cannot be read or have no label, before training."""
        self(examples)
        for example in examples:
            self.task.gold(example)


def check_splits(
    data: TaskData, task: Task[Any], train: Examples[Any], valid: Examples[Any]
) -> tuple[Examples[Any], Examples[Any]]:
    """Return the training and validation examples, of which there must be some; bad ones are skipped if requested."""
    if not train and valid and data.valid is None and "valid" in data.hold_out:
        message = f"all {len(valid):,} examples were held out for validation, because their texts are equal or too few"
        raise InputError(f"no training examples: {message}; give --valid FILE, or more examples")
    if data.skip_bad:
        train = filter_invalid(train, task.labels)
    if train and not valid and not valid.skipped and data.valid is None:
        grouping = f" by their {data.group_by}" if data.group_by else ""
        message = f"none of the {len(train):,} was held out{grouping}; raise data.hold_out.valid, or give data.valid"
        raise InputError(f"no validation examples: {message}")
    return require_examples(train, "training"), require_examples(valid, "validation")


def require_examples(examples: Examples[Any], split: str) -> Examples[Any]:
    """Return the examples; none at all are refused with the first reason why one was skipped."""
    if not examples:
        skipped = examples.skipped
        count = f"{len(skipped):,} were bad, the first: {skipped[0]}" if skipped else ""
        raise InputError(f"no {split} examples{f', {count}' if skipped else '; see data.train and data.valid'}")
    return examples


def balanced_class_weights(task: Task[Any], train: Sequence[Any], labels: Sequence[str]) -> tuple[float, ...]:
    """Return weights in inverse proportion to the frequency of each class; their mean over all examples is 1."""
    if not hasattr(task, "class_weights"):
        raise InputError("finetune.class_weights: goes with tasks that choose one class; leave it at none")
    counts = Counter(task.gold(example) for example in train)
    return tuple(len(train) / (len(labels) * counts[label]) for label in labels)


def drop_unlearnable(featurizer: Featurizer, train: Examples[Any]) -> Examples[Any]:
    """Skip training examples that the model cannot read; a label that loses all its examples is refused."""
    learnable = require_examples(filter_invalid(train, featurizer), "training")
    missing_labels = sorted(set(featurizer.labels).difference(featurizer.task.labels(learnable)))
    if missing_labels:
        message = f"no example of the label '{missing_labels[0]}' is left"
        raise InputError(f"{message}, the last bad one: {learnable.skipped[-1]}")
    return learnable


def select_valid(
    recipe: FinetuneRecipe, valid: Examples[Any], labels: Sequence[str], check: Callable[[Sequence[Any]], None]
) -> Examples[Any]:
    """Select the validation examples; those that `check` refuses are skipped with `data.skip_bad`, else refused."""
    if recipe.data.skip_bad:
        valid = require_examples(filter_invalid(valid, check), "validation")
    max_examples = recipe.validation.max_examples
    if max_examples is not None and max_examples < len(valid):
        valid = valid.derive(valid[i * len(valid) // max_examples] for i in range(max_examples))
    if not recipe.data.skip_bad:
        if recipe.data.valid is None and recipe.data.hold_out and labels:
            _check_labels_in_train(labels, valid)
        check(valid)
    return valid


def _check_labels_in_train(labels: Sequence[str], held_out: Sequence[Any]) -> None:
    """Refuse held-out examples with a label that training examples lack: they come from the same file."""
    errors = check_labels(labels, held_out, skip_bad=True).skipped
    if errors:
        message = "all examples with it were held out: add some, or name other validation examples"
        raise InputError(f"{errors[0]}; {message}")


def _hold_out_notes(data: TaskData) -> list[str]:
    """Return a line on how the validation examples were chosen; none if they have their own file."""
    fraction = data.hold_out.get("valid")
    if fraction is None or data.valid is not None:
        return []
    choice = f"chosen by a hash of their {data.group_by or 'text'}"
    if data.split_by == "position":
        choice = "the last ones of the files"
    return [f"{100 * fraction:.3g} % of the examples are held out, {choice}"]


def make_data_notes(
    data: TaskData,
    train: Examples[Any],
    valid: Examples[Any],
    features: Sequence[Features],
    max_length: int,
    model: Model,
) -> tuple[str, ...]:
    """Return lines on the data: detected settings, examples, labels, trained parameters, truncated and skipped ones."""
    notes = [*dict.fromkeys([*train.notes, *valid.notes])]
    notes.append(f"{len(train):,} training and {len(valid):,} validation examples")
    notes += _hold_out_notes(data)
    label_note = describe_labels(train)
    notes += [] if label_note is None else [label_note]
    num_total = sum(p.numel() for p in model.parameters())
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if num_trained < num_total:
        notes.append(f"{num_trained:,} of {num_total:,} parameters are trained")
    num_truncated = sum(feature.truncated for feature in features)
    if num_truncated:
        limit = f"the model's {max_length} tokens"
        notes.append(f"{num_truncated:,} of the training texts are longer than {limit} and are truncated")
    skipped = list(dict.fromkeys([*train.skipped, *valid.skipped]))  # held-out examples are in the same file
    return (*notes, *format_skipped(skipped))
