"""The interface of a task, and the path from its examples through a model to predictions.

A built-in task is one file of this package. A task from outside subclasses `Task` and is registered with
`qkv.register.task("name")`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.checkpoints.arguments import is_missing
from qkv.checkpoints.state import AnyModel
from qkv.data.examples import Example
from qkv.data.rng import CounterRNG
from qkv.errors import InputError, check_names, describe_value
from qkv.generation.config import GenerationConfig
from qkv.limits import limit, raise_hint
from qkv.metrics.metric import DataKind, Metric
from qkv.metrics.registry import METRICS, MetricOptions
from qkv.objectives.classification import Inputs
from qkv.objectives.loss import LossSum
from qkv.recipe.task_names import TASKS, resolve_task_name
from qkv.tasks.features import FeatureOutputs, Features
from qkv.tasks.head_outputs import Processor, input_processor, iter_outputs, require_head
from qkv.tasks.predictions import TaskPrediction

__all__ = ["TASKS", "HeadTask", "PredictionTask", "Task", "get_task"]

ExampleT = TypeVar("ExampleT")
_TEXT_FIELDS = ("text", "text_pair", "context", "source")  # of examples, which may be long


def option_name(setting: str) -> str:
    """Return the option of `qkv predict` that changes a setting."""
    return "--sample" if setting == "do_sample" else f"--{setting.replace('_', '-')}"


class PredictionTask(ABC, Generic[ExampleT]):
    """A task as `qkv.tasks.predictor.Predictor` uses it: from input lines and examples to predictions."""

    name: ClassVar[str]
    example_type: ClassVar[type]
    option_aliases: ClassVar[Mapping[str, str]] = {}
    """Setting names for command-line options that are named differently."""
    has_alternatives: ClassVar[bool] = True
    """Whether a prediction lists the n best outputs."""

    def parse_line(self, line: str, location: str) -> ExampleT:
        """Parse one line of input; the texts of one example are separated by tabs."""
        return self.parse_texts(line.split("\t"), location)

    @abstractmethod
    def parse_texts(self, texts: Sequence[str], location: str) -> ExampleT:
        """Make an unlabeled example of its texts. `location` names it in error messages."""

    def parse_input(self, value: Any, location: str) -> ExampleT:
        """Make an example of a line of text, a file name, a sequence of texts, or an example of any kind that fits."""
        check_text_length(value, location)
        if isinstance(value, str | Path):
            return self.parse_line(str(value), location)
        if isinstance(value, list | tuple):
            texts = check_names(value, location, "a text, or several texts of one example")
            return self.parse_texts(texts, location)
        if is_missing(value):
            raise InputError(f"{location}: an input is missing; give a text")
        if not isinstance(value, Example | self.example_type):
            raise InputError(f"{location}: expected a text, several texts or an example, not {describe_value(value)}")
        return self.from_example(value)

    def from_example(self, example: Any) -> ExampleT:
        """Convert an example that a file format gave to the task's own kind, or refuse it."""
        check_example_type(self.name, [example], self.example_type)
        converted: ExampleT = example
        return converted

    @abstractmethod
    def predict(
        self,
        bundle: ModelBundle,
        examples: Sequence[ExampleT],
        *,
        n_best: int = 1,
        max_tokens: int = 8192,
        first_index: int = 0,
    ) -> list[TaskPrediction]:
        """Predict for each example, in input order.

        Args:
            bundle: a model in eval mode with its processor.
            examples: the examples, labeled or not.
            n_best: how many alternatives a prediction lists.
            max_tokens: tokens per batch.
            first_index: number of the first example in the whole input, which seeds sampling.
        """

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a copy with other settings, named as fields of the task or as command-line options."""
        assert dataclasses.is_dataclass(self)
        known = {field.name for field in dataclasses.fields(self)}
        renamed = {self.option_aliases.get(name, name): value for name, value in settings.items()}
        for name, option in zip(renamed, settings, strict=True):
            if name not in known:
                raise InputError(f"{option_name(option)}: the task '{self.name}' has no such setting; leave it out")
        changed: Self = dataclasses.replace(self, **renamed)
        return changed

    def check_used(self, settings: Sequence[str], bundle: ModelBundle) -> None:  # most tasks use all
        """Refuse settings that a user chose and that have no effect with the others, or on this model."""

    def with_generation(self, config: GenerationConfig | None, prefix: str) -> Self:  # noqa: ARG002
        """Return the task with a generation config; tasks that generate nothing ignore it."""
        return self


class HeadTask(PredictionTask[ExampleT]):
    """A task that a model's head solves: features of examples go in, logits come out."""

    head_kind: ClassVar[spec.HeadKind]
    modality: ClassVar[spec.Modality] = "text"

    def output_names(self, head: spec.Head) -> tuple[str, ...]:
        """Return the names of a head's outputs; numbers if a checkpoint has no names."""
        return head.labels or tuple(map(str, range(head.num_outputs)))

    @abstractmethod
    def featurize(
        self, examples: Sequence[ExampleT], processor: Any, labels: Sequence[str], max_length: int
    ) -> list[Features]:
        """Turn each example into one or more model inputs of at most `max_length` tokens. See `input_processor`."""

    @abstractmethod
    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        """Pack features into one batch."""

    @abstractmethod
    def postprocess(self, outputs: FeatureOutputs, example: ExampleT, labels: Sequence[str]) -> Any:
        """Return the prediction for one example, as the metrics take it."""

    def describe(
        self,
        prediction: Any,
        outputs: FeatureOutputs,  # noqa: ARG002
        example: ExampleT,  # noqa: ARG002
        labels: Sequence[str],  # noqa: ARG002
        n_best: int,  # noqa: ARG002
    ) -> TaskPrediction:
        """Format one prediction with its probabilities; `outputs` are those that `postprocess` got."""
        return TaskPrediction(prediction, str(prediction), None, (), {"prediction": str(prediction)})

    def predict(
        self,
        bundle: ModelBundle,
        examples: Sequence[ExampleT],
        *,
        n_best: int = 1,
        max_tokens: int = 8192,
        first_index: int = 0,  # noqa: ARG002  # nothing is sampled
    ) -> list[TaskPrediction]:
        labels = self.output_names(require_head(self, bundle.model.spec))
        predictions: dict[int, TaskPrediction] = {}
        for index, outputs in iter_outputs(self, bundle, examples, max_tokens):
            prediction = self.postprocess(outputs, examples[index], labels)
            described = self.describe(prediction, outputs, examples[index], labels, n_best)
            truncated = any(feature.truncated for feature, _ in outputs)
            predictions[index] = dataclasses.replace(described, truncated=truncated)
        return [predictions[index] for index in range(len(examples))]


class Task(HeadTask[ExampleT]):
    """A task that trains a head, with its loss and metrics. Subclasses are frozen dataclasses of settings."""

    metric_data_kind: ClassVar[DataKind | None] = None
    """Kind of predictions and labels, so that a recipe can name a registered metric; None: the task's metrics only."""

    @property
    def head_overrides(self) -> Mapping[str, Any]:
        """Fields that the task sets on the model's head, so that they are saved with the model."""
        return {}

    @abstractmethod
    def primary_metric(self, labels: Sequence[str]) -> str:
        """Return the metric that selects checkpoints by default; higher is better."""

    @abstractmethod
    def labels(self, examples: Sequence[ExampleT]) -> tuple[str, ...]:
        """Return the names of the head's outputs, from the training examples."""

    def infer_settings(self, examples: Sequence[ExampleT]) -> dict[str, Any]:  # noqa: ARG002
        """Return settings that the recipe leaves open and the training examples determine."""
        return {}

    def training_processor(self, bundle: ModelBundle) -> Processor:
        """Return the processor of the training examples, which is saved with the model."""
        return input_processor(self, bundle)

    def make_bundle(self, model: AnyModel, processor: Any) -> ModelBundle:
        """Return a model with the processor of its training examples."""
        return ModelBundle(model, processor, processor)

    def content_hash(self, feature: Features) -> bytes:  # noqa: ARG002
        """Return a hash of what an example contains besides the ids and labels of its feature, such as pixels."""
        return b""

    def collate_training(self, features: Sequence[Features], use_token_types: bool, rng: CounterRNG) -> Inputs:  # noqa: ARG002
        """Pack features into one training batch; tasks with data augmentation draw it from `rng`."""
        return self.collate(features, use_token_types)

    @abstractmethod
    def loss(self, logits: Tensor, batch: Inputs) -> LossSum:
        """Return the summed loss and the number of targets."""

    @abstractmethod
    def gold(self, example: ExampleT) -> Any:
        """Return the label that a prediction is compared with, or refuse an unlabeled example."""

    def format_gold(self, gold: Any) -> str:
        """Return a label as text, as `describe` writes predictions."""
        return str(gold) if isinstance(gold, str | int | float) else " ".join(sorted(gold))

    @abstractmethod
    def metrics(
        self, labels: Sequence[str], predictions: Sequence[Any], golds: Sequence[Any]
    ) -> list[Metric[Any, Any]]:
        """Return the task's metrics for these predictions and labels."""

    def predictions_for_scoring(
        self,
        predictions: Sequence[TaskPrediction],
        golds: Sequence[Any],  # noqa: ARG002
    ) -> list[TaskPrediction]:
        """Return the predictions as the metrics read them, given the labels of the whole set."""
        return list(predictions)


def get_task(name: str, **settings: Any) -> Task[Any]:
    """Make a trainable task by its name or alias."""
    make: Callable[..., Task[Any]] = TASKS.get(resolve_task_name(name))
    return make(**settings)


def check_labeled(task: Task[Any], examples: Sequence[Any], *example_types: type) -> None:
    """Check that all training examples have the expected type and a label."""
    check_example_type(task.name, examples, *example_types)
    for example in examples:
        task.gold(example)


def check_example_type(name: str, examples: Sequence[Any], *example_types: type) -> None:
    """Refuse examples of another task, which some file formats give."""
    wrong = next((example for example in examples if not isinstance(example, example_types)), None)
    if wrong is not None:
        expected, actual = " or ".join(example_type.__name__ for example_type in example_types), type(wrong).__name__
        raise InputError(
            f"task {name}: takes {expected} examples, and this format gives {actual} ones; see data.format"
        )


def check_setting(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value of a task's setting that is not one of those allowed."""
    if value not in allowed:
        raise InputError(f"task.{name} is one of {', '.join(allowed)}, not '{value}'")


def check_not_empty(texts: Sequence[str], location: str) -> None:
    """Refuse an input with an empty text."""
    if not texts or not all(text.strip() for text in texts):
        raise InputError(f"{location}: is empty; give some text")


def check_text_length(value: Any, location: str) -> None:
    """Refuse an input whose text would keep a model busy for hours: a text, several of them, or an example."""
    texts = value if isinstance(value, list | tuple) else (value, *(getattr(value, key, "") for key in _TEXT_FIELDS))
    for text in texts:
        if isinstance(text, str) and len(text) > limit("text_chars"):
            raise InputError(f"{location}: the text has {len(text):,} characters; {raise_hint('text_chars')}")


def location_range(examples: Sequence[Any]) -> str:
    """Return the locations of the first and the last example, for an error in the whole set."""
    return f"{examples[0].location} to {examples[-1].location}"


def apply_head_overrides(task: Task[Any], model: AnyModel) -> None:
    """Set the task's fields on the model's head, so that they are saved with the model."""
    assert model.spec.head is not None
    assert model.head is not None
    model.head.spec = spec.replace(model.spec.head, **task.head_overrides)
    model.spec = spec.replace(model.spec, head=model.head.spec)


def predict(
    task: HeadTask[ExampleT], bundle: ModelBundle, examples: Sequence[ExampleT], max_tokens: int = 16384
) -> list[Any]:
    """Return each example's prediction as the metrics take it, without formatting it."""
    labels = task.output_names(require_head(task, bundle.model.spec))
    predictions = {
        index: task.postprocess(outputs, examples[index], labels)
        for index, outputs in iter_outputs(task, bundle, examples, max_tokens)
    }
    return [predictions[index] for index in range(len(examples))]


def make_metrics(
    task: Task[Any], labels: Sequence[str], predictions: Sequence[Any], golds: Sequence[Any], name: str | None = None
) -> list[Metric[Any, Any]]:
    """Return the task's metrics and, if its data kind fits the task, the registered metric of a name."""
    metrics = task.metrics(labels, predictions, golds)
    is_registered = name is not None and name in METRICS and name not in [metric.name for metric in metrics]
    if is_registered and METRICS.get(str(name)).data_kind == task.metric_data_kind:
        metrics.append(METRICS.get(str(name)).make(MetricOptions(), (labels, predictions, golds)))
    return metrics


def compute_metrics(
    task: Task[ExampleT],
    predictions: Sequence[Any],
    examples: Sequence[ExampleT],
    labels: Sequence[str],
    name: str | None = None,
) -> dict[str, float]:
    """Return all scores of the task's metrics, and those of the registered metric of a name."""
    golds = [task.gold(example) for example in examples]
    scores: dict[str, float] = {}
    for metric in make_metrics(task, labels, predictions, golds, name):
        scores |= metric(predictions, golds)
    return scores
