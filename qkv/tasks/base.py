"""What a task is. `get_task` gives one by its name; adding one touches its own file and the table in
`qkv.recipe.task_names`.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.checkpoints.model_folder import AnyModel
from qkv.data.batching import evaluation_batches
from qkv.data.examples import ImageExample
from qkv.data.image_processor import ImageProcessor
from qkv.errors import InputError
from qkv.generation.generate import eval_mode
from qkv.checkpoints.inputs import max_input_length
from qkv.metrics.metric import Metric
from qkv.nn import Ragged
from qkv.objectives.classification import Inputs, head_logits, pack_sequences
from qkv.objectives.loss import LossSum, to_device
from qkv.recipe.task_names import resolve_task_name
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

ExampleT = TypeVar("ExampleT")


@dataclass(frozen=True)
class Features:
    """An example, or a part of one, as a model takes it."""

    example_index: int
    input_ids: tuple[Sequence[int], ...]  # one, or one an option
    token_type_ids: tuple[Sequence[int], ...]
    labels: tuple[float, ...]  # what is right; () where nobody has said
    label_positions: tuple[int, ...] | None = None  # the tokens that are judged
    metadata: Any = None  # what a task keeps to read answers off: where tokens stand in the text, whose word a row is of
    truncated: bool = False  # the text was longer than the model takes

    @staticmethod
    def from_encodings(example_index: int, encodings: Sequence[Encoding], labels: tuple[float, ...], **optional_fields: Any) -> Features:
        """From what a tokeniser gave; kept in arrays, for a list has some 40 bytes a token and there are millions."""
        input_ids = tuple(array("i", encoding.ids) for encoding in encodings)
        return Features(example_index, input_ids, tuple(bytes(encoding.token_type_ids) for encoding in encodings), labels, **optional_fields)

    @property
    def length(self) -> int:
        return sum(map(len, self.input_ids))

    def num_logits(self, is_token_level: bool) -> int:
        """How many rows of logits it gets."""
        if not is_token_level:
            return len(self.input_ids)
        return self.length if self.label_positions is None else len(self.label_positions)


class Task(Protocol, Generic[ExampleT]):
    """One task with its settings.

    It may have a method `infer_settings(examples)` besides: settings that nobody gave and that the training examples tell.
    """

    name: str
    head_kind: spec.HeadKind  # of the head that it takes
    head_overrides: Mapping[str, Any]  # of that head, set whatever the model had there before
    example_type: type

    def primary_metric(self, labels: Sequence[str]) -> str:
        """The figure by which models are compared where nobody names another; more is better."""
        ...

    def labels(self, examples: Sequence[ExampleT]) -> tuple[str, ...]:
        """The names of the head's outputs."""
        ...

    def featurize(self, examples: Sequence[ExampleT], processor: Any, labels: Sequence[str], max_length: int) -> list[Features]:
        """Each example as one or several things that a model of this length takes; for `processor` see `input_processor`."""
        ...

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs: ...

    def loss(self, logits: Tensor, batch: Inputs) -> LossSum: ...

    def postprocess(self, outputs: Sequence[tuple[Features, Tensor]], example: ExampleT, labels: Sequence[str]) -> Any:
        """The prediction for an example from the logits of its parts."""
        ...

    def gold(self, example: ExampleT) -> Any:
        """What a prediction is compared with."""
        ...

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[Any], golds: Sequence[Any]
    ) -> list[Metric[Any, Any]]: ...


def get_task(name: str, **settings: Any) -> Task[Any]:
    """A task by its name or an alias of it."""
    make: Callable[..., Task[Any]] = importlib.import_module(f"qkv.tasks.{resolve_task_name(name)}").make
    return make(**settings)


def check_labeled(task: Task[Any], examples: Sequence[Any], *example_types: type) -> None:
    """What is learned from has to be of a task's kinds, and somebody has to have said what is right."""
    check_example_type(task.name, examples, *example_types)
    for example in examples:
        task.gold(example)


def check_example_type(name: str, examples: Sequence[Any], *example_types: type) -> None:
    """The examples of some formats are another task's."""
    wrong = next((example for example in examples if not isinstance(example, example_types)), None)
    if wrong is not None:
        expected, actual = " or ".join(example_type.__name__ for example_type in example_types), type(wrong).__name__
        raise InputError(f"task {name}: takes {expected} examples, and this format gives {actual} ones; see data.format")


def location_range(examples: Sequence[Any]) -> str:
    """From where to where examples stand, for what is the fault of all and of none alone."""
    return f"{examples[0].location} to {examples[-1].location}"


def apply_head_overrides(task: Task[Any], model: AnyModel) -> None:
    """Tells a model's head what the task makes of it, so that it is saved with the model."""
    assert model.spec.head is not None
    assert model.head is not None
    model.head.spec = spec.replace(model.spec.head, **task.head_overrides)
    model.spec = spec.replace(model.spec, head=model.head.spec)


def pack_features(features: Sequence[Features], use_token_types: bool) -> tuple[Ragged, Tensor | None, Tensor | None]:
    """Ids, segments where the model has them, and the tokens that are judged."""
    ids, lengths = pack_sequences([sequence for feature in features for sequence in feature.input_ids])
    token_type_ids = pack_sequences([type_ids for feature in features for type_ids in feature.token_type_ids])[0] if use_token_types else None
    if features[0].label_positions is None:
        return Ragged.from_lengths(ids, lengths), token_type_ids, None
    positions, offset = [], 0
    for feature in features:
        positions += [offset + position for position in feature.label_positions or ()]
        offset += feature.length
    return Ragged.from_lengths(ids, lengths), token_type_ids, torch.tensor(positions, dtype=torch.long)


def predict(task: Task[ExampleT], bundle: ModelBundle, examples: Sequence[ExampleT], max_tokens: int = 16384) -> list[Any]:
    """What a model says of each example, in their order."""
    outputs_per_example, head = predict_logits(task, bundle, examples, max_tokens), bundle.model.spec.head
    assert head is not None  # or there would be no logits
    return [task.postprocess(outputs, example, head.labels) for outputs, example in zip(outputs_per_example, examples, strict=True)]


def predict_logits(
    task: Task[ExampleT], bundle: ModelBundle, examples: Sequence[ExampleT], max_tokens: int = 16384
) -> list[list[tuple[Features, Tensor]]]:
    """Each example's parts as a model was asked them, with what its head gave for each."""
    model, head = bundle.model, bundle.model.spec.head
    if head is None or head.kind != task.head_kind:
        raise InputError(f"{task.name}: needs a head of kind '{task.head_kind}', which this {model.spec.family} lacks")
    features = task.featurize(examples, input_processor(task, bundle), head.labels, max_input_length(model.spec))
    outputs_per_example: list[list[tuple[Features, Tensor]]] = [[] for _ in examples]
    with eval_mode(model), torch.inference_mode():
        for indices in evaluation_batches([feature.length for feature in features], max_tokens):  # type: ignore[arg-type]
            batch = [features[index] for index in indices]
            logits = head_logits(model, to_device(task.collate(batch, has_token_types(model.spec)), model.device))
            logit_counts = [feature.num_logits(head.is_token_level) for feature in batch]
            for feature, feature_logits in zip(batch, torch.split(logits.float().cpu(), logit_counts), strict=True):
                outputs_per_example[feature.example_index].append((feature, feature_logits))
    return outputs_per_example


def input_processor(task: Task[Any], bundle: ModelBundle) -> Tokenizer | ImageProcessor:
    """What makes of a task's examples what a model takes: its tokeniser, or how its pictures are prepared."""
    check_modality(task, bundle.model.spec)
    processor = bundle.image_processor if task.example_type is ImageExample else bundle.source_tokenizer
    if processor is not None:
        return processor
    missing = "a tokeniser, so it cannot read text"
    if task.example_type is ImageExample:
        missing = "a preprocessor_config.json, so it cannot read pictures"
    raise InputError(f"this {bundle.model.spec.family} came without {missing}")


def check_modality(task: Task[Any], s: spec.Model) -> None:
    """A model reads text, or looks at pictures."""
    is_image_model = isinstance(s.source_embedding, spec.PatchEmbedding)
    if is_image_model != (task.example_type is ImageExample):
        modality, other_task = ("looks at pictures", "image_classification") if is_image_model else ("reads text", "text_classification")
        raise InputError(f"task {task.name}: this {s.family} {modality}; take another model, or the task {other_task}")


def compute_metrics(
    task: Task[ExampleT], predictions: Sequence[Any], examples: Sequence[ExampleT], labels: Sequence[str]
) -> dict[str, float]:
    """All figures of a task's metrics."""
    golds = [task.gold(example) for example in examples]
    scores: dict[str, float] = {}
    for metric in task.metrics(labels, predictions, golds):
        scores |= metric(predictions, golds)
    return scores


def has_token_types(s: spec.Model) -> bool:
    return s.decoder is None and isinstance(s.source_embedding, spec.Embedding) and s.source_embedding.num_segments > 0
