"""The path from a task's examples through a model with the task's head to logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.checkpoints.inputs import max_input_length
from qkv.checkpoints.state import AnyModel
from qkv.data.batching import evaluation_batches
from qkv.data.image_processor import ImageProcessor
from qkv.errors import InputError
from qkv.nn.capture import collect_batches
from qkv.objectives.classification import head_logits
from qkv.objectives.loss import to_device
from qkv.tasks.features import Features
from qkv.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qkv.tasks.base import HeadTask

ExampleT = TypeVar("ExampleT")
Processor = Tokenizer | ImageProcessor


@torch.inference_mode()
def _batch_logits(
    task: HeadTask[Any], model: AnyModel, features: Sequence[Features], is_token_level: bool
) -> list[Tensor]:
    """Return the logits of each feature in one batch, on the host."""
    logits = head_logits(model, to_device(task.collate(features, model.spec.has_token_types), model.device))
    return list(torch.split(logits.float().cpu(), [feature.num_logits(is_token_level) for feature in features]))


def iter_outputs(
    task: HeadTask[ExampleT], bundle: ModelBundle, examples: Sequence[ExampleT], max_tokens: int = 16384
) -> Iterator[tuple[int, list[tuple[Features, Tensor]]]]:
    """Yield each example's index and outputs once all its features have logits, so that few logits are in memory."""
    model, head = bundle.model, require_head(task, bundle.model.spec)
    features = task.featurize(
        examples, input_processor(task, bundle), task.output_names(head), max_input_length(model.spec)
    )
    pending: list[dict[int, tuple[Features, Tensor] | None]] = [{} for _ in examples]
    for index, feature in enumerate(features):
        pending[feature.example_index][index] = None
    yield from ((index, []) for index, outputs in enumerate(pending) if not outputs)
    num_missing = [len(outputs) for outputs in pending]
    lengths = np.array([feature.length for feature in features], dtype=np.int64)
    with collect_batches(model) as begin_batch:
        for indices in evaluation_batches(lengths, max_tokens):
            batch = [features[index] for index in indices]
            begin_batch([feature.example_index for feature in batch])
            batch_logits = _batch_logits(task, model, batch, head.is_token_level)
            for index, feature, logits in zip(indices, batch, batch_logits, strict=True):
                outputs = pending[feature.example_index]
                outputs[int(index)] = feature, logits
                num_missing[feature.example_index] -= 1
                if not num_missing[feature.example_index]:
                    yield feature.example_index, [output for output in outputs.values() if output is not None]
                    pending[feature.example_index] = {}


def require_head(task: HeadTask[Any], model_spec: spec.Model) -> spec.Head:
    """Return the head of a model, or refuse a model whose head does not fit the task."""
    head = model_spec.head
    if head is None or head.kind != task.head_kind:
        raise InputError(f"{task.name}: needs a head of kind '{task.head_kind}', which this {model_spec.family} lacks")
    return head


def input_processor(task: HeadTask[Any], bundle: ModelBundle) -> Processor:
    """Return the processor that turns the task's examples into model input: a tokenizer or an image processor."""
    check_modality(task, bundle.model.spec)
    processors: dict[str, Processor | None] = {"text": bundle.source_tokenizer, "image": bundle.image_processor}
    processor = processors[task.modality]
    if processor is not None:
        return processor
    missing = {
        "text": "tokenizer, so it cannot read text",
        "image": "preprocessor_config.json, so it cannot read images",
    }
    raise InputError(f"this {bundle.model.spec.family} has no {missing[task.modality]}")


def check_modality(task: HeadTask[Any], model_spec: spec.Model) -> None:
    """Refuse a text model for a task on images, and the reverse."""
    modality = spec.input_embedding(model_spec).modality
    if modality != task.modality:
        other_task = {"image": "image_classification", "text": "text_classification"}[modality]
        article = {"image": "an image", "text": "a text"}[modality]
        raise InputError(
            f"task {task.name}: this {model_spec.family} is {article} model; use another model or the task {other_task}"
        )
