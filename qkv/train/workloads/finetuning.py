"""Learning a task: its examples, a model that is there under the task's head, the task's own metrics."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv import families, spec
from qkv.checkpoints.lora import backbone_digest, check_base_reference, write_base_reference
from qkv.checkpoints.model_folder import SOURCE_TOKENIZER_FILE, AnyModel, ModelBundle
from qkv.data.batching import DataPosition, Ints, ResumableBatches, balanced_split
from qkv.data.examples import Examples
from qkv.data.filtering import filter_invalid, format_skipped
from qkv.data.image_processor import PREPROCESSOR, ImageProcessor
from qkv.data.labels import LabeledExample, check_labels
from qkv.data.rng import CounterRNG
from qkv.errors import InputError, did_you_mean
from qkv.families import bert
from qkv.checkpoints.inputs import max_input_length
from qkv.nn import Decoder, build
from qkv.nn.model import set_features_and_lora
from qkv.objectives.classification import auxiliary_lm_loss, head_logits
from qkv.objectives.loss import LossSum
from qkv.recipe.parse import model_config
from qkv.recipe.schema import FinetuneRecipe, TokenizerSection
from qkv.tasks.base import (
    Features,
    Task,
    apply_head_overrides,
    check_modality,
    compute_metrics,
    get_task,
    has_token_types,
    predict,
)
from qkv.tasks.benchmark_defaults import default_settings
from qkv.tasks.image_classification import ImageClassification, ImageInput
from qkv.tokenization.tokenizer import Tokenizer
from qkv.train.checkpoint import has_checkpoint
from qkv.train.init_model import load_initial_model
from qkv.train.workloads.pretraining_data import resolve_tokenizer, special_token_ids
from qkv.train.workloads.task_data import iter_texts, read_split

__all__ = ["FinetuneWorkload", "build_finetune_workload", "read_split"]

_SINGLE_LABEL_TASKS = ("text_classification", "image_classification")  # tasks that choose one class


@dataclass(frozen=True, eq=False)
class FeatureBatch:
    """Some examples of a batch."""

    features: list[Features]
    epoch: int

    @property
    def tokens(self) -> int:
        return sum(feature.length for feature in self.features)

    def split(self, num_microbatches: int) -> list[FeatureBatch]:
        """Cut into at most `num_microbatches` consecutive batches of about equal token count."""
        ends = np.cumsum([feature.length for feature in self.features]).tolist()
        edges = balanced_split(ends, min(num_microbatches, len(self.features)))
        return [FeatureBatch(self.features[start:end], self.epoch) for start, end in pairwise(edges)]


class FeatureBatches(ResumableBatches[FeatureBatch]):
    """The endless run of batches of a task's examples, as chance has them.

    Nothing is padded, so that examples of one length need not share a batch; those of a kind would too often.
    """

    def __init__(self, features: Sequence[Features], max_tokens: int, seed: int, num_workers: int = 0) -> None:
        super().__init__(max_tokens, seed, num_workers, bucket_pool=1)
        self._features = features
        self._feature_lengths = np.array([feature.length for feature in features], dtype=np.int64)

    def _lengths(self, epoch: int) -> tuple[Ints, Ints]:  # noqa: ARG002  # the same in every epoch
        return self._feature_lengths, np.zeros_like(self._feature_lengths)

    def _collate(self, epoch: int, indices: Ints) -> FeatureBatch:
        return FeatureBatch([self._features[index] for index in indices], epoch)


@dataclass(frozen=True, eq=False)
class FinetuneWorkload:
    """See `qkv.train.workload.Workload`."""

    recipe: FinetuneRecipe
    task: Task[Any]
    initial_model: AnyModel  # as it was loaded, or fresh
    processor: Tokenizer | ImageProcessor
    features: list[Features]
    valid_examples: Sequence[Any]
    data_notes: tuple[str, ...]
    base_digest: str | None = None  # of a model with adapters, the digest of what they sit on

    higher_is_better = True

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("loss", "lm_loss") if self.recipe.finetune.lm_loss_weight else ("loss",)

    @property
    def spec(self) -> spec.Model:
        return self.initial_model.spec

    @property
    def metric(self) -> str:
        return self.recipe.validation.metric or self.task.primary_metric(self._labels)

    @property
    def _labels(self) -> tuple[str, ...]:
        assert self.spec.head is not None
        return self.spec.head.labels

    def fingerprint(self) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        for feature in self.features:  # whole: what numpy prints of a long array leaves out its middle
            for row in (*feature.input_ids, feature.labels, () if feature.label_positions is None else feature.label_positions):
                hasher.update(np.asarray(row, dtype=np.float64).tobytes() + b"|")
            if isinstance(feature.metadata, ImageInput):
                hasher.update(feature.metadata.content_hash())
        return hasher.hexdigest()

    def check(self) -> None:
        self._batches.batches_per_epoch(0)

    def batches_per_epoch(self) -> int:
        """Batches in which all training examples are seen once."""
        return self._batches.batches_per_epoch(0)

    def save_assets(self, folder: Path) -> None:
        self.processor.save(folder / (PREPROCESSOR if isinstance(self.processor, ImageProcessor) else SOURCE_TOKENIZER_FILE))
        if self.base_digest is not None:
            write_base_reference(folder, str(self.recipe.model["init_from"]), self.base_digest)

    def batches_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, FeatureBatch]]:
        return self._batches.iterate_from(epoch, batch_index)

    @cached_property
    def _batches(self) -> FeatureBatches:
        train_config = self.recipe.train
        return FeatureBatches(self.features, train_config.batch_tokens, self.recipe.seed, train_config.num_workers)

    def collate(self, batch: FeatureBatch, step: int) -> Any:  # noqa: ARG002
        if isinstance(self.task, ImageClassification):
            return self.task.augment_and_collate(batch.features, CounterRNG(self.recipe.seed, batch.epoch))
        return self.task.collate(batch.features, has_token_types(self.spec))

    def losses(self, model: AnyModel, inputs: Any) -> tuple[LossSum, ...]:
        lm_loss_weight = self.recipe.finetune.lm_loss_weight
        if not lm_loss_weight:
            return (self.task.loss(head_logits(model, inputs), inputs),)
        assert isinstance(model, Decoder)
        logits, hidden = model.forward_with_hidden_states(inputs.source, inputs.positions)
        lm_loss = auxiliary_lm_loss(model, inputs, hidden)
        return self.task.loss(logits, inputs), LossSum(lm_loss.total * lm_loss_weight, lm_loss.num_targets)

    def model(self) -> AnyModel:
        return self.initial_model

    def evaluate(self, model: AnyModel) -> dict[str, float]:
        if isinstance(self.processor, ImageProcessor):
            bundle = ModelBundle(model, image_processor=self.processor)
        else:
            bundle = ModelBundle(model, self.processor, self.processor)
        metrics = compute_metrics(self.task, predict(self.task, bundle, self.valid_examples), self.valid_examples, self._labels)
        if self.metric not in metrics:
            raise InputError(f"validation.metric: {self.task.name} has no '{self.metric}'; {did_you_mean(self.metric, metrics)}")
        return metrics

    def sample_outputs(self, model: AnyModel) -> list[str]:  # noqa: ARG002
        return []


def build_finetune_workload(recipe: FinetuneRecipe, folder: Path) -> FinetuneWorkload:
    """Reads the examples, and loads or makes the model, under the head of its task."""
    task = make_task(recipe)
    train, valid = read_split(recipe.data, "train"), read_split(recipe.data, "valid")
    if recipe.data.skip_bad:
        train = filter_invalid(train, task.labels)
    if train and not valid and not valid.skipped and recipe.data.valid is None:
        grouping = f" by their {recipe.data.group_by}" if recipe.data.group_by else ""
        message = f"none of the {len(train):,} was held out{grouping}; raise data.hold_out.valid, or give data.valid"
        raise InputError(f"no validation examples: {message}")
    train, valid = _require_examples(train, "training"), _require_examples(valid, "validation")
    labels = tuple(task.labels(train))
    if hasattr(task, "infer_settings"):
        recipe = replace(recipe, task=recipe.task | task.infer_settings(train))
        task = make_task(recipe)
    if recipe.finetune.class_weights == "balanced":
        task = make_task(recipe, class_weights=_balanced_class_weights(task, train, labels))
    torch.manual_seed(recipe.seed)  # what is fresh is drawn
    bundle = _load_pretrained(recipe, task, labels) if "init_from" in recipe.model else _build_fresh(recipe, folder, task, labels, train)
    model, processor = bundle.model, _make_processor(recipe, task, bundle)
    apply_head_overrides(task, model)
    base_digest = _apply_finetune_config(recipe, folder, model)
    max_length = max_input_length(model.spec)
    if recipe.data.skip_bad:
        train = _drop_unlearnable(task, train, processor, labels, max_length)
    features = task.featurize(train, processor, labels, max_length)
    valid = _select_valid(recipe, valid, labels, lambda subset: _check_scorable(task, subset, processor, labels, max_length))
    data_notes = _make_data_notes(train, valid, features, max_length, model)
    return FinetuneWorkload(recipe, task, model, processor, features, valid, data_notes, base_digest)


def _make_processor(recipe: FinetuneRecipe, task: Task[Any], bundle: ModelBundle) -> Tokenizer | ImageProcessor:
    """What makes of examples what the model takes."""
    check_modality(task, bundle.model.spec)
    if isinstance(task, ImageClassification):
        assert isinstance(bundle.model.spec.source_embedding, spec.PatchEmbedding)  # it was looked at
        return task.make_image_processor(bundle.model.spec.source_embedding, bundle.image_processor)
    if bundle.source_tokenizer is None:
        raise InputError(f"{recipe.model['init_from']}: has no tokeniser; name a model that has one")
    return bundle.source_tokenizer


def _load_pretrained(recipe: FinetuneRecipe, task: Task[Any], labels: tuple[str, ...]) -> ModelBundle:
    """The model that the recipe starts from."""
    with _name_task_in_errors(task):
        return load_initial_model(recipe, head=task.head_kind, labels=labels)


def _build_fresh(recipe: FinetuneRecipe, folder: Path, task: Task[Any], labels: tuple[str, ...], train: Sequence[Any]) -> ModelBundle:
    """A fresh model, and where it reads text a tokeniser that the training examples' texts are cut by."""
    family = recipe.model["family"]
    module = families.get_family(family)
    spec_parameters = inspect.signature(module.make_spec).parameters
    if "head" not in spec_parameters:
        raise InputError(f"model.family: {family} has no head for a task; try bert, roberta, gpt2, rnn or vit")
    if recipe.finetune.backbone_frozen:
        raise InputError("finetune: of a fresh model everything has to be trained; leave out what keeps its body as it is")
    if isinstance(task, ImageClassification):
        if not hasattr(module.Config, "patch_size"):
            raise InputError(f"model.family: {family} reads text, and the task image_classification needs one that looks; take vit")
        if recipe.tokenizer != TokenizerSection():
            raise InputError("tokenizer: a model that looks at pictures has no tokeniser; leave out this section")
        with _name_task_in_errors(task):
            return ModelBundle(build(module.make_spec(model_config(recipe), head=task.head_kind, labels=labels)))
    template = getattr(module, "TOKENIZER_TEMPLATE", bert.TOKENIZER_TEMPLATE)  # a family that has none, the recurrent one, reads as BERT
    tokenizer = resolve_tokenizer(recipe, folder, iter_texts(train), template)
    vocab_args = {name: tokenizer.vocab_size for name in ("source_vocab_size", "target_vocab_size") if name in spec_parameters} | special_token_ids(recipe, tokenizer)
    with _name_task_in_errors(task):
        return ModelBundle(build(module.make_spec(model_config(recipe), head=task.head_kind, labels=labels, **vocab_args)), tokenizer, tokenizer)


@contextmanager
def _name_task_in_errors(task: Task[Any]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if not str(error).startswith("head: "):
            raise
        raise InputError(f"task {task.name} needs a '{task.head_kind}' {error}") from None


def _apply_finetune_config(recipe: FinetuneRecipe, folder: Path, model: AnyModel) -> str | None:
    """Makes ready what is trained; of a model with adapters the digest of what they sit on."""
    finetune, base_digest = recipe.finetune, None
    if finetune.lm_loss_weight and (not isinstance(model, Decoder) or finetune.backbone_frozen or recipe.train.strategy == "fsdp"):
        reason = "goes with a decoder such as gpt2 that is trained as a whole, and not in shards"
        raise InputError(f"finetune.lm_loss_weight: the next token's loss {reason}; set it to 0")
    if finetune.lora is not None:
        if recipe.train.strategy == "fsdp":
            raise InputError("finetune.lora: trains in copies, not in shards; leave train.strategy at ddp")
        base_digest = backbone_digest(model)
        if has_checkpoint(folder):
            check_base_reference(folder, str(recipe.model["init_from"]), base_digest)
    if finetune.lora is not None or finetune.feature_layers not in (None, "last"):
        fields = None if finetune.lora is None else asdict(finetune.lora)
        lora_config = None if fields is None else spec.LoraConfig(**(fields | {"target_modules": tuple(fields["target_modules"])}))
        set_features_and_lora(model, finetune.feature_layers or "last", lora_config)
    if finetune.backbone_frozen:
        model.freeze_backbone()
    return base_digest


def make_task(recipe: FinetuneRecipe, **overrides: Any) -> Task[Any]:
    """A recipe's task with its settings: those that it gives, and those that are usual for its data."""
    settings = dict(recipe.task)
    name = settings.pop("name", None)
    if name is None:
        raise InputError("key 'task.name' is missing")
    settings = _with_label_smoothing(recipe, default_settings(recipe.data.format, str(name)) | settings)
    try:
        return get_task(str(name), **settings, **overrides)
    except TypeError as error:
        raise InputError(f"task: {name}: {error}") from None


def _with_label_smoothing(recipe: FinetuneRecipe, settings: dict[str, Any]) -> dict[str, Any]:
    """A task's settings with the label smoothing that `train` asks for."""
    if not recipe.train.label_smoothing:
        return settings
    if recipe.task["name"] not in _SINGLE_LABEL_TASKS:
        raise InputError(f"train.label_smoothing: goes with the task {' or '.join(_SINGLE_LABEL_TASKS)}; set it to 0 here")
    if "label_smoothing" in settings:
        raise InputError("train.label_smoothing and task.label_smoothing are one thing; leave out one of the two")
    return settings | {"label_smoothing": recipe.train.label_smoothing}


def _balanced_class_weights(task: Task[Any], train: Sequence[Any], labels: Sequence[str]) -> tuple[float, ...]:
    """Inverse to how often a class is there; their mean over examples is one."""
    if task.name not in _SINGLE_LABEL_TASKS:
        raise InputError("finetune.class_weights: goes with tasks that choose one class; leave it at none")
    counts = Counter(task.gold(example) for example in train)
    return tuple(len(train) / (len(labels) * counts[label]) for label in labels)


def _check_scorable(
    task: Task[Any], examples: Sequence[Any], processor: Tokenizer | ImageProcessor, labels: Sequence[str], max_length: int
) -> None:
    """What cannot be read or has no truth is said before training, not hours into it."""
    task.featurize(examples, processor, labels, max_length)
    for example in examples:
        task.gold(example)


def _select_valid(
    recipe: FinetuneRecipe, valid: Examples[Any], labels: Sequence[str], check: Callable[[Sequence[Any]], None]
) -> Examples[Any]:
    """The validation examples that are scored; those that cannot be are skipped where asked."""
    if recipe.data.skip_bad:
        valid = _require_examples(filter_invalid(valid, check), "validation")
    max_examples = recipe.validation.max_examples
    if max_examples is not None and max_examples < len(valid):
        valid = Examples((valid[i * len(valid) // max_examples] for i in range(max_examples)), valid.skipped)
    if not recipe.data.skip_bad:
        if recipe.data.valid is None and recipe.data.hold_out and labels and isinstance(valid[0], LabeledExample):
            _check_labels_in_train(labels, valid)
        check(valid)
    return valid


def _check_labels_in_train(labels: Sequence[str], held_out: Sequence[Any]) -> None:
    """A class whose few examples are all held out is in the person's file: that training never saw it is half of it."""
    errors = check_labels(labels, held_out, skip_bad=True).skipped
    if errors:
        raise InputError(f"{errors[0]}; all that have it were held out: add some, or name other validation examples")


def _drop_unlearnable(
    task: Task[Any], train: Examples[Any], processor: Tokenizer | ImageProcessor, labels: Sequence[str], max_length: int
) -> Examples[Any]:
    """Those that a model can be asked; a class that would be left without any is named."""
    learnable = _require_examples(filter_invalid(train, lambda subset: task.featurize(subset, processor, labels, max_length)), "training")
    missing_labels = sorted(set(labels).difference(task.labels(learnable)))
    if missing_labels:
        raise InputError(f"no example of the label '{missing_labels[0]}' is left, the last bad one: {learnable.skipped[-1]}")
    return learnable


def _require_examples(examples: Examples[Any], split: str) -> Examples[Any]:
    """Examples, of which there has to be one."""
    if not examples:
        skipped = examples.skipped
        reason = f", {len(skipped):,} were bad, the first: {skipped[0]}" if skipped else "; see data.train and data.valid"
        raise InputError(f"no {split} examples{reason}")
    return examples


def _make_data_notes(
    train: Examples[Any], valid: Examples[Any], features: Sequence[Features], max_length: int, model: AnyModel
) -> tuple[str, ...]:
    num_truncated = sum(feature.truncated for feature in features)
    notes = [f"{len(train):,} training and {len(valid):,} validation examples"]
    num_trained, num_total = (sum(p.numel() for p in model.parameters() if p.requires_grad or include_frozen) for include_frozen in (False, True))
    if num_trained < num_total:
        notes.append(f"{num_trained:,} of {num_total:,} parameters are trained")
    if num_truncated:
        notes.append(f"{num_truncated:,} of the training texts are longer than the model's {max_length} tokens and are cut")
    skipped = list(dict.fromkeys([*train.skipped, *valid.skipped]))  # what is held out comes from the same file
    return (*notes, *format_skipped(skipped))
