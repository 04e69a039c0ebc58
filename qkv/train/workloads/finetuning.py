"""Fine-tuning: a task's labeled examples, a pretrained or new model with the task's head, the task's metrics."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from qkv import families, spec
from qkv.checkpoints import ModelBundle
from qkv.checkpoints.inputs import max_input_length
from qkv.checkpoints.lora import backbone_digest, check_base_reference, write_base_reference
from qkv.checkpoints.model_folder import save_processors
from qkv.checkpoints.state import AnyModel
from qkv.data.batching import DataPosition
from qkv.data.examples import Examples
from qkv.data.image_processor import ImageProcessor
from qkv.data.rng import CounterRNG
from qkv.errors import InputError, did_you_mean
from qkv.families import bert
from qkv.families.heads import with_pooling
from qkv.metrics.registry import METRICS
from qkv.nn import build
from qkv.nn.construction import replace_head, set_features_and_lora
from qkv.objectives.classification import auxiliary_lm_loss, head_logits
from qkv.objectives.loss import LossSum
from qkv.recipe.model_section import model_config
from qkv.recipe.schema import FinetuneRecipe
from qkv.tasks.base import Task, apply_head_overrides, compute_metrics, predict
from qkv.tasks.features import Features
from qkv.tasks.recipe_task import make_task
from qkv.tokenization.tokenizer import Tokenizer
from qkv.train.cost_inputs import CostInputs, with_default_lengths
from qkv.train.init_model import load_initial_model, load_initial_vectors
from qkv.train.run_folder import holds_run
from qkv.train.workloads.finetuning_data import (
    FeatureBatch,
    FeatureBatches,
    Featurizer,
    balanced_class_weights,
    check_splits,
    drop_unlearnable,
    make_data_notes,
    select_valid,
)
from qkv.train.workloads.frozen_backbone import FrozenFeatures, has_constant_features
from qkv.train.workloads.pretraining_data import resolve_tokenizer, special_token_ids
from qkv.train.workloads.task_data import fold_of, iter_texts, read_split, read_splits, with_detected_options

_CHECKED_EXAMPLES = 4  # validation examples that are scored before training


@dataclass(frozen=True, eq=False)
class FinetuneWorkload:
    """Training on a task; implements `qkv.train.workload.Workload`."""

    recipe: FinetuneRecipe
    task: Task[Any]
    initial_model: AnyModel  # pretrained or newly initialized
    processor: Tokenizer | ImageProcessor
    features: list[Features]
    valid_examples: Sequence[Any]
    data_notes: tuple[str, ...]
    base_digest: str | None = None  # with LoRA, the digest of the backbone

    recipe_class = FinetuneRecipe

    @classmethod
    def build(
        cls, recipe: FinetuneRecipe, folder: Path, data: dict[str, Examples[Any]] | None = None
    ) -> FinetuneWorkload:
        """Read the examples, and load or build the model with the task's head.

        `data` are the splits "train" and "valid" if they were already read; they are taken out of the mapping, so that
        the texts do not stay in memory during training.
        """
        task = make_task(recipe)
        splits = read_splits(recipe.data, ("train", "valid")) if data is None else data
        recipe = replace(recipe, data=with_detected_options(recipe.data, splits.values()))
        train, valid = check_splits(recipe.data, task, splits.pop("train"), splits.pop("valid"))
        labels = tuple(task.labels(train))
        recipe = replace(recipe, task=recipe.task | task.infer_settings(train))
        task = make_task(recipe)
        if recipe.finetune.class_weights == "balanced":
            task = make_task(recipe, class_weights=balanced_class_weights(task, train, labels))
        torch.manual_seed(recipe.seed)  # for newly initialized parameters
        with _name_task_in_errors(task):
            if "init_from" in recipe.model:
                bundle = load_initial_model(recipe, head=task.head_kind, labels=labels)
            else:
                bundle = _build_new(recipe, folder, task, labels, train)
        model, processor = bundle.model, task.training_processor(bundle)
        apply_head_overrides(task, model)
        base_digest = _apply_finetune_config(recipe, folder, model)
        featurizer = Featurizer(task, processor, labels, max_input_length(model.spec))
        if recipe.data.skip_bad:
            train = drop_unlearnable(featurizer, train)
        features = featurizer(train)
        valid = select_valid(recipe, valid, labels, featurizer.check_scorable)
        data_notes = make_data_notes(recipe.data, train, valid, features, featurizer.max_length, model)
        if isinstance(processor, Tokenizer):
            vectors = load_initial_vectors(recipe, folder, processor, model.spec)
            if vectors is not None:
                vectors.apply(model)
                data_notes += (vectors.note,)
        return cls(recipe, task, model, processor, features, valid, data_notes, base_digest)

    @classmethod
    def cost_inputs(
        cls,
        recipe: FinetuneRecipe,
        folder: Path,
        model_spec: spec.Model | None,
        vocab_sizes: tuple[int, int] | None,  # noqa: ARG003
    ) -> CostInputs:
        """Return the model of a run; that of a recipe has a head for labels that are not read for this."""
        if model_spec is None:
            reason = "the head of a task's model depends on the labels of its data"
            raise InputError(f"{folder}: {reason}; name the folder of a run")
        return with_default_lengths(model_spec, recipe)

    @classmethod
    def fold_recipes(cls, recipe: FinetuneRecipe, count: int) -> list[FinetuneRecipe]:
        """Return one recipe per fold; the recipe's own validation split is not used."""
        hold_out: dict[Literal["valid", "test"], float] = {**recipe.data.hold_out}
        hold_out.pop("valid", None)
        recipe = replace(recipe, data=replace(recipe.data, valid=None, hold_out=hold_out, fold=None))
        _check_folds(recipe, count)
        return [replace(recipe, data=replace(recipe.data, fold=[index, count])) for index in range(1, count + 1)]

    @property
    def higher_is_better(self) -> bool:
        return self.metric not in METRICS or METRICS.get(self.metric).higher_is_better

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
        for feature in self.features:
            label_positions = () if feature.label_positions is None else feature.label_positions
            for row in (*feature.input_ids, feature.labels, label_positions):
                # all bytes of the array: the printed form of a long one omits its middle
                hasher.update(np.asarray(row, dtype=np.float64).tobytes() + b"|")
            hasher.update(self.task.content_hash(feature))
        return hasher.hexdigest()

    def check(self) -> None:
        self._batches.batches_per_epoch(0)
        self._check_metric()

    def steps_per_epoch(self) -> int:
        return self._batches.batches_per_epoch(0)

    def save_assets(self, folder: Path) -> None:
        save_processors(self.task.make_bundle(self.initial_model, self.processor), folder)
        if self.base_digest is not None:
            write_base_reference(folder, str(self.recipe.model["init_from"]), self.base_digest)

    def batches_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, FeatureBatch]]:
        _ = self._frozen_features  # before threads collate batches; the model is on its device by now
        return self._batches.iterate_from(epoch, batch_index)

    @cached_property
    def _frozen_features(self) -> FrozenFeatures | None:
        """The head's input for all training examples if it never changes; sharded weights are not at hand for it."""
        is_sharded = self.recipe.train.strategy == "fsdp"
        if is_sharded or not has_constant_features(self.initial_model):
            return None
        return FrozenFeatures.compute(self.initial_model, self.features)

    @cached_property
    def _batches(self) -> FeatureBatches:
        config, seed = self.recipe.train, self.recipe.seed
        return FeatureBatches(self.features, config.batch_tokens, seed, config.num_workers, config.batch_size)

    def collate(self, batch: FeatureBatch, step: int) -> Any:  # noqa: ARG002
        rng = CounterRNG(self.recipe.seed, batch.epoch)
        inputs = self.task.collate_training(batch.features, self.spec.has_token_types, rng)
        frozen_features = self._frozen_features
        return inputs if frozen_features is None else inputs._replace(head_inputs=frozen_features.select(batch.indices))

    def losses(self, model: AnyModel, inputs: Any) -> tuple[LossSum, ...]:
        lm_loss_weight = self.recipe.finetune.lm_loss_weight
        if not lm_loss_weight:
            return (self.task.loss(head_logits(model, inputs), inputs),)
        logits, hidden = model.forward_with_hidden_states(inputs.source, inputs.positions)
        lm_loss = auxiliary_lm_loss(model, inputs, hidden)
        return self.task.loss(logits, inputs), LossSum(lm_loss.total * lm_loss_weight, lm_loss.num_targets)

    def model(self) -> AnyModel:
        return self.initial_model

    def evaluate(self, model: AnyModel) -> dict[str, float]:
        return self._evaluate_examples(model, self.valid_examples)

    def _evaluate_examples(self, model: AnyModel, examples: Sequence[Any]) -> dict[str, float]:
        predictions = predict(self.task, self.task.make_bundle(model, self.processor), examples)
        metrics = compute_metrics(self.task, predictions, examples, self._labels, self.metric)
        if self.metric not in metrics:
            hint = did_you_mean(self.metric, metrics)
            raise InputError(f"validation.metric: {self.task.name} has no '{self.metric}'; {hint}")
        return metrics

    def _check_metric(self) -> None:
        """Score a few predictions: an unknown metric or a missing package is reported now, not after an epoch."""
        if self.recipe.train.strategy == "fsdp":  # a sharded model does not predict
            return
        was_training = self.initial_model.training
        self._evaluate_examples(self.initial_model.eval(), self.valid_examples[:_CHECKED_EXAMPLES])
        self.initial_model.train(was_training)

    def sample_outputs(self, model: AnyModel) -> list[str]:  # noqa: ARG002
        """Return nothing: predictions are in the report of `qkv eval`."""
        return []


def _check_folds(recipe: FinetuneRecipe, count: int) -> None:
    """Refuse folds of which one has all examples of a class, before the first run."""
    if recipe.data.skip_bad:  # such examples are then skipped and listed
        return
    task, examples = make_task(recipe), read_split(recipe.data, "train")
    if not examples:
        return
    all_labels = set(task.labels(examples))
    folds = [fold_of(example, recipe.data.group_by, count) for example in examples]
    for index in range(1, count + 1):
        train_examples = [example for example, fold in zip(examples, folds, strict=True) if fold != index]
        missing = sorted(all_labels.difference(task.labels(train_examples)))
        if missing:
            message = f"all examples of '{missing[0]}' are in fold {index}, so that none are left to train on"
            raise InputError(f"--num-folds: {message}; give more of them, or another number of folds")


def _build_new(
    recipe: FinetuneRecipe, folder: Path, task: Task[Any], labels: tuple[str, ...], train: Sequence[Any]
) -> ModelBundle:
    """Build a newly initialized model and, for a task on text, find or train its tokenizer."""
    family = recipe.model["family"]
    module = families.get_family(family)
    spec_parameters = inspect.signature(module.make_spec).parameters
    if "head" not in spec_parameters:
        raise InputError(f"model.family: {family} has no head for a task; try bert, roberta, gpt2, rnn or vit")
    if recipe.finetune.backbone_frozen:
        raise InputError("finetune: a new model has to be trained as a whole; leave out keys that freeze its backbone")
    if task.modality == "image":
        if not hasattr(module.Config, "patch_size"):
            reason = f"{family} reads text, and the task {task.name} needs a model of images"
            raise InputError(f"model.family: {reason}; use vit")
        if recipe.has_tokenizer_section:
            raise InputError("tokenizer: a model of images has none; leave out this section")
        return ModelBundle(build(module.make_spec(model_config(recipe), head=task.head_kind, labels=labels)))
    # the recurrent family has no template of its own and uses BERT's
    template = getattr(module, "TOKENIZER_TEMPLATE", bert.TOKENIZER_TEMPLATE)
    tokenizer = resolve_tokenizer(recipe, folder, iter_texts(train), template)
    size_names = [name for name in ("source_vocab_size", "target_vocab_size") if name in spec_parameters]
    vocab_args = dict.fromkeys(size_names, tokenizer.vocab_size) | special_token_ids(recipe, tokenizer)
    model_spec = module.make_spec(model_config(recipe), head=task.head_kind, labels=labels, **vocab_args)
    return ModelBundle(build(model_spec), tokenizer, tokenizer)


@contextmanager
def _name_task_in_errors(task: Task[Any]) -> Iterator[None]:
    """Add the task to errors about a head that the model cannot have."""
    try:
        yield
    except InputError as error:
        location, separator, reason = str(error).partition("head: ")
        if not separator or (location and not location.endswith(": ")):
            raise
        raise InputError(f"{location}task {task.name} needs a '{task.head_kind}' head: {reason}") from None


def _apply_finetune_config(recipe: FinetuneRecipe, folder: Path, model: AnyModel) -> str | None:
    """Set the head's pooling, add LoRA weights and feature layers to the model, and freeze its backbone.

    Returns the digest of the backbone if the recipe has LoRA weights, which are saved without it.
    """
    finetune, base_digest = recipe.finetune, None
    if finetune.pooling is not None:
        pooled_head = with_pooling(model.spec, finetune.pooling).head
        if pooled_head is not None and pooled_head != model.spec.head:
            replace_head(model, pooled_head)
    is_sharded = recipe.train.strategy == "fsdp"
    if finetune.lm_loss_weight and (not model.continues_input or finetune.backbone_frozen or is_sharded):
        reason = "goes with a decoder such as gpt2 that is trained as a whole, and with train.strategy: ddp"
        raise InputError(f"finetune.lm_loss_weight: {reason}; set it to 0")
    if finetune.lora is not None:
        if is_sharded:
            raise InputError("finetune.lora: is not supported with train.strategy: fsdp; use ddp")
        base_digest = backbone_digest(model)
        if holds_run(folder):
            check_base_reference(folder, str(recipe.model["init_from"]), base_digest)
    if finetune.lora is not None or finetune.feature_layers not in (None, "last"):
        lora_config = None
        if finetune.lora is not None:
            fields = asdict(finetune.lora)
            lora_config = spec.LoraConfig(**(fields | {"target_modules": tuple(fields["target_modules"])}))
        set_features_and_lora(model, finetune.feature_layers or "last", lora_config)
    if finetune.backbone_frozen:
        model.freeze_backbone()
    return base_digest
