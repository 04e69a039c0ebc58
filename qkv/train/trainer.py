"""The training loop. It yields records of its progress, and a run can be killed and resumed at any step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from qkv import spec
from qkv.checkpoints.lora import LORA_FILE, load_trainable_state_dict, trainable_state_dict
from qkv.checkpoints.model_folder import SPEC_FILE, WEIGHTS_FILE, is_finished
from qkv.checkpoints.safetensors_io import average_checkpoints, load_tensors, save_tensors
from qkv.data.prefetch import prefetch_map
from qkv.errors import InputError
from qkv.files import atomic_write_text
from qkv.recipe.parse import RECIPE_FILE, recipe_to_yaml
from qkv.recipe.schema import Recipe
from qkv.train.callbacks import Callback, make_callbacks
from qkv.train.checkpoint import (
    BEST_WEIGHTS,
    TrainState,
    averaging_path,
    check_best_exists,
    check_finite,
    load_checkpoint,
    save_checkpoint,
)
from qkv.train.distributed.processes import (
    DistributedInfo,
    destroy_process_group,
    init_distributed,
    on_main_rank,
    unsharded_copy,
)
from qkv.train.perf.lazy_adamw import LazyEmbeddingAdamW
from qkv.train.perf.mfu import flops_per_token_of_batch, matmul_peak_flops, trained_fraction
from qkv.train.run_folder import check_same_recipe, lock_run_folder
from qkv.train.run_log import LOG, LossMeter, Record, append_record, truncate_log
from qkv.train.schedule import learning_rate_at, peak_learning_rate, resolve_steps
from qkv.train.step import StepBatch, TrainStep
from qkv.train.workload import Workload, workload_class


def fit(
    recipe: Recipe,
    folder: str | Path,
    *,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
    data: Any = None,
) -> Iterator[Record]:
    """Train what a recipe describes and yield records; a run with a checkpoint is resumed, a finished one yields none.

    Under torchrun all processes train one model.

    Args:
        recipe: the recipe.
        folder: the run folder, which becomes a model folder.
        device: such as "cpu" or "cuda"; None: a GPU if there is one.
        callbacks: called in addition to those that the recipe names.
        data: the recipe's data if it was already read, as `qkv.train.auto_recipe` does.
    """
    folder, lock_fd = Path(folder), None
    dist_info = init_distributed(device)
    try:
        check_same_recipe(folder, recipe)
        if is_finished(folder):
            return
        workload = workload_class(recipe).build(recipe, folder, data)
        with _report_out_of_memory():
            trainer = Trainer(recipe, folder, workload, dist_info, callbacks)
            lock_fd = on_main_rank(dist_info, partial(lock_run_folder, folder))
            on_main_rank(dist_info, trainer.save_run_files)
            for record in trainer.train():
                if dist_info.is_main:
                    append_record(folder / LOG, record)
                yield record
    finally:
        destroy_process_group(dist_info)
        if dist_info.is_main and lock_fd is not None:
            os.close(lock_fd)


@contextmanager
def _report_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error into one line; the last checkpoint is complete."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError, on a CPU without a class of its own
        if isinstance(error, RuntimeError) and not any(phrase in str(error) for phrase in _OUT_OF_MEMORY_PHRASES):
            raise
        remedy = "raise train.gradient_accumulation_steps (the gradient stays the same)"
        remedy = f"{remedy}, set train.activation_checkpointing, or lower data.max_length"
        raise InputError(f"out of memory; {remedy}, and run it again to resume from the last checkpoint") from None


_OUT_OF_MEMORY_PHRASES = ("can't allocate memory", "out of memory")


class Trainer:
    """A run: the loop `train`, validation, and checkpoints. The optimizer step is `qkv.train.step.TrainStep`."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        workload: Workload,
        dist_info: DistributedInfo,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Build the model and load the last checkpoint of the folder, if there is one."""
        self.recipe, self.folder, self.workload, self.dist_info = recipe, folder, workload, dist_info
        self.callbacks = make_callbacks(recipe.train.callbacks, callbacks) if dist_info.is_main else []
        self.max_steps, self.warmup_steps, self.valid_every = resolve_steps(recipe, workload.steps_per_epoch)
        self.save_every = recipe.train.save_every or self.valid_every
        self.is_sharded = recipe.train.strategy == "fsdp"
        self.train_step = TrainStep(recipe, workload, dist_info)
        self.model, self.optimizer, self.ema = self.train_step.model, self.train_step.optimizer, self.train_step.ema
        self.device = self.train_step.device
        self.train_state = self._load_checkpoint()
        fingerprint = workload.fingerprint()
        if self.train_state.step and self.train_state.data_fingerprint != fingerprint:
            reason = "its checkpoint belongs to other training data"
            raise InputError(f"{folder}: {reason}; restore that data, or choose another --output")
        self.train_state.data_fingerprint = fingerprint
        workload.check()  # before anything is written
        self.peak_lr = peak_learning_rate(recipe.train, workload.spec, self.warmup_steps)
        self.metric_sign = -1 if workload.higher_is_better else 1  # times the metric: lower is better
        self.overhead_seconds = {"valid": 0.0, "save": 0.0}  # duration of the last validation and checkpoint

    def _load_checkpoint(self) -> TrainState:
        if self.is_sharded:
            from qkv.train.distributed.sharded_checkpoint import load_sharded  # slow to import

            train_state = load_sharded(self.folder, self.model, self.optimizer, self.dist_info)
        else:
            train_state = load_checkpoint(self.folder, self.model, self.optimizer, self.ema)
        if train_state.best_metric is not None:
            check_best_exists(self.folder)  # now, not at the end of the run
        return train_state

    def save_run_files(self) -> None:
        """Write recipe, spec and tokenizers, and drop records that a killed run logged after its checkpoint."""
        atomic_write_text(self.folder / RECIPE_FILE, recipe_to_yaml(self.workload.recipe))
        atomic_write_text(self.folder / SPEC_FILE, spec.to_json(self.workload.spec))
        self.workload.save_assets(self.folder)
        truncate_log(self.folder / LOG, self.train_state.step)

    # ---- the loop

    def train(self) -> Iterator[Record]:
        """Train to the last step, or until validation stops improving, and yield records."""
        train_state = self.train_state
        meter = LossMeter(self.workload.loss_names, self.device)
        notes = (f"resumed at step {train_state.step}",) if train_state.step else self.workload.data_notes
        if notes:
            yield Record("note", train_state.step, {"max_steps": self.max_steps}, notes)
        self.model.train()
        batches = self.batches()
        while train_state.step < self.max_steps and not train_state.finished:
            step_batch = next(batches)
            train_state.step += 1
            position = step_batch.next_position
            train_state.epoch, train_state.batch_index = position.epoch, position.batch_index
            learning_rate = self.learning_rate_at(train_state.step)
            self.train_step(train_state.step, step_batch, learning_rate, meter)
            train_state.tokens += step_batch.num_tokens
            yield from self._after_step(step_batch, learning_rate, meter)
        yield self.finish()

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate_at(
            self.recipe.train.schedule,
            step,
            peak_lr=self.peak_lr,
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
        )

    def batches(self) -> Iterator[StepBatch]:
        """Yield batches from the current position of the data, prepared ahead by `train.num_workers` threads."""
        train_state = self.train_state
        positioned_batches = self.workload.batches_from(train_state.epoch, train_state.batch_index)
        numbered_batches = enumerate(positioned_batches, train_state.step + 1)
        return prefetch_map(self.train_step.prepare, numbered_batches, self.recipe.train.num_workers, "prepare")

    def _after_step(self, step_batch: StepBatch, learning_rate: float, meter: LossMeter) -> Iterator[Record]:
        """Log, validate and save if they are due."""
        step, train_state = self.train_state.step, self.train_state
        is_last = step == self.max_steps
        if step % self.recipe.train.log_every == 0 or is_last:
            with meter.paused():
                meter.check_finite(step, self.dist_info)
                record = self._training_record(meter, step_batch, learning_rate)
                for callback in self.callbacks:
                    callback.on_step(self, record)
                yield record
        if step % self.valid_every == 0 or is_last:
            with meter.paused():
                meter.check_finite(step, self.dist_info)
                yield self.validate()
        if step % self.save_every == 0 or is_last or train_state.finished:
            with meter.paused():
                meter.check_finite(step, self.dist_info)
                self.save()

    def _training_record(self, meter: LossMeter, step_batch: StepBatch, learning_rate: float) -> Record:
        """Return mean losses, speed, model FLOPs utilization (`mfu`), and the estimated time left."""
        step, num_steps = self.train_state.step, meter.steps
        means, seconds = meter.flush(self.dist_info)
        self.train_state.train_seconds += seconds
        flops = flops_per_token_of_batch(self.workload.spec, step_batch.microbatches[0][1]) * step_batch.num_tokens_read
        # all processes together, per token of the global batch
        flops *= trained_fraction(self.model) * self.dist_info.world_size / step_batch.num_tokens
        peak_flops = matmul_peak_flops(self.device, self.train_step.use_bf16) * self.dist_info.world_size
        eta_seconds = (self.max_steps - step) * seconds / max(num_steps, 1)
        for every, kind in ((self.valid_every, "valid"), (self.save_every, "save")):
            eta_seconds += (self.max_steps // every - step // every) * self.overhead_seconds[kind]
        values = {"learning_rate": learning_rate, "epoch": self.train_state.epoch}
        values |= {"mfu": means["tokens_per_second"] * flops / peak_flops, "eta_seconds": eta_seconds}
        return Record("train", step, means | values)

    # ---- weights and checkpoints

    def _check_finite(self) -> None:
        """Complete the updates of lazy embeddings, and refuse weights that are not finite, before they are read."""
        if isinstance(self.optimizer, LazyEmbeddingAdamW):
            self.optimizer.flush()
        check_finite(self.model, self.train_state.step)

    def save(self) -> None:
        """Write a checkpoint, from which the run can be resumed."""
        start_time = time.perf_counter()
        self._check_finite()
        if self.is_sharded:
            from qkv.train.distributed.sharded_checkpoint import save_sharded

            save_sharded(self.folder, self.model, self.optimizer, self.train_state, self.dist_info)
        else:
            args = self.folder, self.model, self.optimizer, self.train_state, self.ema
            on_main_rank(self.dist_info, partial(save_checkpoint, *args))
        for callback in self.callbacks:
            callback.on_checkpoint(self, self.folder)
        self.overhead_seconds["save"] = time.perf_counter() - start_time

    def save_weights(self, path: Path) -> None:
        """Write the current trainable weights to one safetensors file."""
        if self.is_sharded:
            from qkv.train.distributed.sharded_checkpoint import gather_state_dict

            weights = gather_state_dict(self.model, self.dist_info)
        else:
            weights = trainable_state_dict(self.model)
        on_main_rank(self.dist_info, lambda: save_tensors(path, weights or {}))

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace the trainable weights."""
        if self.is_sharded:
            from qkv.train.distributed.sharded_checkpoint import load_full_state_dict

            load_full_state_dict(self.model, weights, "average")
        else:
            load_trainable_state_dict(self.model, weights, "average")

    # ---- validation

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Put the model into eval mode, and back into its former mode: predicting never changes the mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    def validate(self) -> Record:
        """Evaluate the model, or its EMA weights, and save the weights if they are the best or to be averaged."""
        train_state, patience, metric = self.train_state, self.recipe.validation.patience, self.workload.metric
        start_time = time.perf_counter()
        self._check_finite()
        with self._eval_mode(), self.ema.applied_to(self.model) if self.ema else nullcontext():
            with unsharded_copy(self.model) as model:
                values, samples = self.workload.evaluate(model), tuple(self.workload.sample_outputs(model))
            self._track_best(values[metric])
        if patience is not None and train_state.validations_since_best >= patience:
            train_state.finished = True
        for callback in self.callbacks:
            callback.on_validation(self, values)
        self.overhead_seconds["valid"] = time.perf_counter() - start_time
        values = {metric: values[metric]} | values | {"seconds": self.overhead_seconds["valid"]}  # `metric` first
        return Record("valid", train_state.step, values, samples)

    def _is_better(self, metric: float, other: float) -> bool:
        return self.metric_sign * metric < self.metric_sign * other

    def _track_best(self, metric: float) -> None:
        train_state, num_averaged = self.train_state, self.recipe.train.average_checkpoints
        best_metric = train_state.best_metric
        train_state.validations_since_best += 1
        # the correlation of constant predictions is NaN, and any value is better
        if best_metric is None or math.isnan(best_metric) or self._is_better(metric, best_metric):
            train_state.best_metric, train_state.best_step = metric, train_state.step
            train_state.validations_since_best = 0
            self.save_weights(self.folder / BEST_WEIGHTS)
        if num_averaged > 1:
            self.save_weights(averaging_path(self.folder, train_state.step))
            train_state.averaging_steps = [*train_state.averaging_steps, train_state.step][-num_averaged:]

    def finish(self) -> Record:
        """Write the final weights: the best ones, or the mean of the last checkpoints if it is not worse."""
        train_state, metric = self.train_state, self.workload.metric
        best_metric, steps = train_state.best_metric, train_state.averaging_steps
        values = {
            "best_step": float(train_state.best_step),
            "num_averaged_checkpoints": 0.0,
            metric: best_metric or 0.0,
        }
        weights, _ = load_tensors(self.folder / BEST_WEIGHTS)
        if len(steps) > 1:
            averaged_weights = average_checkpoints([averaging_path(self.folder, step) for step in steps])
            self.load_weights(averaged_weights)
            with self._eval_mode(), unsharded_copy(self.model) as model:
                scores = self.workload.evaluate(model)
            if best_metric is None or self.metric_sign * scores[metric] <= self.metric_sign * best_metric:
                weights, values = averaged_weights, {"num_averaged_checkpoints": float(len(steps))} | scores
        file = WEIGHTS_FILE if self.workload.spec.lora is None else LORA_FILE
        on_main_rank(self.dist_info, lambda: save_tensors(self.folder / file, weights))
        values |= {"seconds": train_state.train_seconds, "tokens": float(train_state.tokens)}
        return Record("final", train_state.step, values)
