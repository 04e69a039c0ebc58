"""The training loop. It yields records of its progress, and a run can be killed and resumed at any step."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from qkv import spec
from qkv.checkpoints.lora import LORA_FILE, load_trainable_state_dict, trainable_state_dict
from qkv.checkpoints.model_folder import SPEC_FILE, WEIGHTS_FILE, is_finished
from qkv.checkpoints.safetensors_io import average_checkpoints, load_tensors, save_tensors
from qkv.checkpoints.state import unique_state_dict
from qkv.checkpoints.unfinished_run import BEST_WEIGHTS, has_checkpoint
from qkv.data.prefetch import prefetch_map
from qkv.errors import InputError
from qkv.files import atomic_write_text
from qkv.recipe.parse import RECIPE_FILE, recipe_to_yaml
from qkv.recipe.schema import Recipe
from qkv.train.callbacks import Callback, make_callbacks
from qkv.train.checkpoint import averaging_path, check_best_exists, check_finite, load_checkpoint, save_checkpoint
from qkv.train.distributed.processes import DistributedInfo, on_main_rank, unsharded_copy, wait_for_all
from qkv.train.in_place_step import make_train_step
from qkv.train.interruption import TrainingInterrupted
from qkv.train.perf.lazy_adamw import LazyEmbeddingAdamW
from qkv.train.perf.mfu import flops_per_token_of_batch, peak_flops, trained_fraction
from qkv.train.resume import apply_change, restart_factor, resume_notes
from qkv.train.run_folder import RunChange, remove_training_files, reopen_finished
from qkv.train.run_log import LOG, LossMeter, Record, truncate_log
from qkv.train.schedule import learning_rate_at, peak_learning_rate, resolve_steps, warmup_note
from qkv.train.step import StepBatch
from qkv.train.train_state import TrainState, read_state_file, write_state_file
from qkv.train.workload import Workload


class Trainer:
    """A run: the loop `train`, validation, and checkpoints. The optimizer step is `qkv.train.step.TrainStep`."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        workload: Workload,
        dist_info: DistributedInfo,
        callbacks: Sequence[Callback] = (),
        change: RunChange | None = None,
    ) -> None:
        """Build the model and load the last checkpoint of the folder, if there is one.

        Args:
            recipe: the recipe.
            folder: the run folder.
            workload: the data and the model.
            dist_info: this process among all.
            callbacks: called in addition to those that the recipe names.
            change: the differences from the recipe of the run in the folder.
        """
        self.recipe, self.folder, self.workload, self.dist_info = recipe, folder, workload, dist_info
        self.callbacks = make_callbacks(recipe.train.callbacks, callbacks) if dist_info.is_main else []
        self.length = resolve_steps(recipe, workload.steps_per_epoch)
        self.max_steps, self.warmup_steps, self.valid_every = self.length
        self.save_every = recipe.train.save_every or self.valid_every
        self.is_sharded = recipe.train.strategy == "fsdp"
        self.train_step = make_train_step(recipe, workload, dist_info)
        self.model, self.optimizer, self.ema = self.train_step.model, self.train_step.optimizer, self.train_step.ema
        self.device = self.train_step.device
        workload.check()  # before anything is written; before a checkpoint whose lazy embeddings a lookup would change
        self.train_state = self._load_checkpoint()
        fingerprint = workload.fingerprint()
        if self.train_state.step and self.train_state.data_fingerprint != fingerprint:
            reason = "its checkpoint belongs to other training data"
            raise InputError(f"{folder}: {reason}; restore that data, or choose another --output")
        self.train_state.data_fingerprint = fingerprint
        self.peak_lr = peak_learning_rate(recipe.train, workload.spec, self.warmup_steps)
        self.metric_sign = -1 if workload.higher_is_better else 1  # times the metric: lower is better
        self.overhead_seconds = {"valid": 0.0, "save": 0.0}  # duration of the last validation and checkpoint
        self._saved_step = self.train_state.step
        self._change, self._was_finished = change or RunChange(), is_finished(folder)
        self.is_best_reset = apply_change(self, self._change)

    @property
    def is_done(self) -> bool:
        """Whether no step is left to train."""
        return self.train_state.finished or self.train_state.step >= self.max_steps

    def _load_checkpoint(self) -> TrainState:
        if is_finished(self.folder) and not has_checkpoint(self.folder):
            return self._load_finished()
        if self.is_sharded:
            from qkv.train.distributed.sharded_checkpoint import load_sharded  # slow to import

            train_state = load_sharded(self.folder, self.model, self.optimizer, self.dist_info)
        else:
            args = self.folder, self.model, self.optimizer, self.ema, self.train_step.memory
            train_state = load_checkpoint(*args)
        if train_state.best_metric is not None and not is_finished(self.folder):
            check_best_exists(self.folder)  # now, not at the end of the run
        return train_state

    def _load_finished(self) -> TrainState:
        """Load the weights of a finished run whose checkpoint was removed; the optimizer starts without its state."""
        train_state = on_main_rank(self.dist_info, partial(read_state_file, self.folder))
        self.load_weights(load_tensors(self.folder / self._weights_file)[0])
        if self.ema is not None:
            self.ema.load_state_dict(unique_state_dict(self.model))
        train_state.optimizer_restart = train_state.step
        return train_state

    @property
    def _weights_file(self) -> str:
        return WEIGHTS_FILE if self.workload.spec.lora is None else LORA_FILE

    def prepare_folder(self) -> None:
        """Write the files of the run; one that was finished gets a checkpoint first, and becomes an unfinished run."""
        wait_for_all(self.dist_info)  # until all processes have read the files of the run
        if self.train_state.step and (self._was_finished or self._change.changes_length):
            self._write_checkpoint()
        on_main_rank(self.dist_info, self._save_run_files)

    def _save_run_files(self) -> None:
        """Write recipe, spec and tokenizers, and drop records that a killed run logged after its checkpoint."""
        reopen_finished(self.folder)
        atomic_write_text(self.folder / RECIPE_FILE, recipe_to_yaml(self.workload.recipe))
        atomic_write_text(self.folder / SPEC_FILE, spec.to_json(self.workload.spec))
        self.workload.save_assets(self.folder)
        truncate_log(self.folder / LOG, self.train_state.step)

    # ---- the loop

    def train(self) -> Iterator[Record]:
        """Train to the last step, or until validation stops improving, and yield records."""
        train_state = self.train_state
        meter = LossMeter(self.workload.loss_names, self.device)
        notes = self._opening_notes()
        if notes:
            yield Record(
                "resume" if train_state.step else "note", train_state.step, {"max_steps": self.max_steps}, notes
            )
        try:
            yield from self._train_steps(meter)
            if train_state.best_metric is None:  # the validation settings changed after the last step
                yield self.validate()
            yield self.finish()
        finally:
            for callback in self.callbacks:
                callback.on_end(self)

    def _train_steps(self, meter: LossMeter) -> Iterator[Record]:
        train_state = self.train_state
        self.model.train()
        batches = self.batches()
        while not self.is_done:
            step_batch = next(batches)
            train_state.step += 1
            position = step_batch.next_position
            train_state.epoch, train_state.batch_index = position.epoch, position.batch_index
            learning_rate = self.learning_rate_at(train_state.step)
            self.train_step(train_state.step, step_batch, learning_rate, meter)
            train_state.tokens += step_batch.num_tokens
            yield from self._after_step(step_batch, learning_rate, meter)
            if self.train_step.should_stop and not self.is_done:
                self._interrupt(meter)

    def _opening_notes(self) -> tuple[str, ...]:
        if self.train_state.step:
            return tuple(resume_notes(self, self._change, self._was_finished))
        note = warmup_note(self.recipe.train, self.length)
        return (*(() if note is None else (note,)), *self.workload.data_notes)

    def _interrupt(self, meter: LossMeter) -> None:
        """Write a checkpoint between two steps, and end."""
        step = self.train_state.step
        if step != self._saved_step:
            meter.check_finite(step, self.dist_info)
            check_finite(self.model, step)
            self.train_state.train_seconds += meter.seconds
            self._write_checkpoint()
        raise TrainingInterrupted(step, self.train_step.stop_request.signum or signal.SIGTERM)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        rate = learning_rate_at(
            self.recipe.train.schedule,
            step,
            peak_lr=self.peak_lr,
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
        )
        return rate * restart_factor(self.train_state, step, self.max_steps)

    def batches(self) -> Iterator[StepBatch]:
        """Yield batches from the current position of the data, prepared ahead by `train.num_workers` threads."""
        train_state = self.train_state
        self.train_step.choose_static_shapes()
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
        """Return mean losses, speed, the estimated time left, and model FLOPs utilization (`mfu`) if it is known."""
        step, num_steps = self.train_state.step, meter.steps
        means, seconds = meter.flush(self.dist_info)
        self.train_state.train_seconds += seconds
        eta_seconds = (self.max_steps - step) * seconds / max(num_steps, 1)
        for every, kind in ((self.valid_every, "valid"), (self.save_every, "save")):
            eta_seconds += (self.max_steps // every - step // every) * self.overhead_seconds[kind]
        values = {"learning_rate": learning_rate, "epoch": self.train_state.epoch}
        mfu = self._utilization(means["tokens_per_second"], step_batch)
        values |= ({} if mfu is None else {"mfu": mfu}) | {"eta_seconds": eta_seconds}
        return Record("train", step, means | values)

    def _utilization(self, tokens_per_second: float, step_batch: StepBatch) -> float | None:
        """Return the model FLOPs utilization of all processes together; None where the peak is not known."""
        peak = peak_flops(self.device, self.train_step.use_bf16)
        if peak is None:
            return None
        flops_per_token = flops_per_token_of_batch(self.workload.spec, step_batch.microbatches[0].inputs)
        flops = flops_per_token * step_batch.num_tokens_read * trained_fraction(self.model)
        # per token of the global batch; the number of processes cancels out of FLOPs and peak
        return tokens_per_second * flops / step_batch.num_tokens / peak

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
        self._write_checkpoint()
        for callback in self.callbacks:
            callback.on_checkpoint(self, self.folder)
        self.overhead_seconds["save"] = time.perf_counter() - start_time

    def _write_checkpoint(self) -> None:
        """Write everything that resume needs, without changing the run: lazy embeddings keep their pending updates."""
        if self.is_sharded:
            from qkv.train.distributed.sharded_checkpoint import save_sharded

            save_sharded(self.folder, self.model, self.optimizer, self.train_state, self.dist_info)
        else:
            memory = None if self.train_step.memory is None else self.train_step.memory.state_dict()
            args = self.folder, self.model, self.optimizer, self.train_state, self.ema, memory
            on_main_rank(self.dist_info, partial(save_checkpoint, *args))
        self._saved_step = self.train_state.step

    def save_weights(self, path: Path) -> None:
        """Write the current trainable weights, and their step as metadata, to one safetensors file."""
        if self.is_sharded:
            from qkv.train.distributed.sharded_checkpoint import gather_state_dict

            weights = gather_state_dict(self.model, self.dist_info)
        else:
            weights = trainable_state_dict(self.model)
        metadata = {"step": str(self.train_state.step)}
        on_main_rank(self.dist_info, lambda: save_tensors(path, weights or {}, metadata))

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace the trainable weights."""
        if self.is_sharded:
            from qkv.train.distributed.sharded_checkpoint import load_full_state_dict

            load_full_state_dict(self.model, weights, str(self.folder))
        else:
            load_trainable_state_dict(self.model, weights, str(self.folder))

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
        if self.ema is not None:
            self.ema.observe(self.metric_sign * values[metric])
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
        is_best = best_metric is None or math.isnan(best_metric) or self._is_better(metric, best_metric)
        if is_best or self.recipe.keeps_last_weights:
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
        values = {metric: best_metric or 0.0, "best_step": float(train_state.best_step)}
        num_averaged = 0
        weights, _ = load_tensors(self.folder / BEST_WEIGHTS)
        if len(steps) > 1:
            averaged_weights = average_checkpoints([averaging_path(self.folder, step) for step in steps])
            self.load_weights(averaged_weights)
            with self._eval_mode(), unsharded_copy(self.model) as model:
                scores = self.workload.evaluate(model)
            if best_metric is None or self.metric_sign * scores[metric] <= self.metric_sign * best_metric:
                weights, num_averaged = averaged_weights, len(steps)
                values = {metric: scores[metric]} | scores
        wait_for_all(self.dist_info)  # until all processes have read the weights
        final_state = dataclasses.replace(train_state, averaging_steps=[], best_metric=values[metric])
        on_main_rank(self.dist_info, lambda: self._write_final(weights, final_state))
        values |= {"num_averaged_checkpoints": float(num_averaged), "max_steps": float(self.max_steps)}
        patience = self.recipe.validation.patience
        if patience is not None and train_state.validations_since_best >= patience:
            values["validations_since_best"] = float(train_state.validations_since_best)
        values |= {"seconds": train_state.train_seconds, "tokens": float(train_state.tokens)}
        return Record("final", train_state.step, values)

    def _write_final(self, weights: dict[str, Tensor], final_state: TrainState) -> None:
        """Write the final weights, and remove what only an unfinished run needs."""
        if self.recipe.train.keep_checkpoint:
            save_tensors(self.folder / self._weights_file, weights)
            return
        write_state_file(self.folder, final_state)
        save_tensors(self.folder / self._weights_file, weights)
        remove_training_files(self.folder)
