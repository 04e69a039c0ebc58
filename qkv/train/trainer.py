"""Training, as a loop you can read. It yields a record now and then, and can be killed at any moment."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv import spec
from qkv.checkpoints.lora import load_trainable_state_dict, trainable_state_dict
from qkv.checkpoints.model_folder import LORA_FILE, SPEC_FILE, WEIGHTS_FILE, is_finished
from qkv.checkpoints.safetensors_io import average_checkpoints, load_tensors, save_tensors
from qkv.data.batching import DataPosition
from qkv.data.prefetch import prefetch_map
from qkv.errors import InputError
from qkv.files import atomic_write_text
from qkv.nn import Ragged
from qkv.nn.ragged import to_device_async
from qkv.nn.stack import enable_activation_checkpointing
from qkv.objectives.loss import to_device
from qkv.recipe.parse import peak_learning_rate, recipe_to_yaml
from qkv.recipe.schema import Recipe, TrainConfig
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
    all_reduce_sum,
    clip_grad_norm,
    destroy_process_group,
    init_distributed,
    maybe_no_sync,
    on_main_rank,
    unsharded_copy,
    wrap_model,
)
from qkv.train.duration import resolve_steps
from qkv.train.ema import EMA
from qkv.train.optimizer import build_optimizer
from qkv.train.perf.cuda_graphs import CudaGraphRunner
from qkv.train.perf.lazy_adamw import LazyEmbeddingAdamW
from qkv.train.perf.lr_range_test import RangeTest
from qkv.train.perf.mfu import (
    compile_blocks,
    flops_per_token_of_batch,
    matmul_peak_flops,
    trained_fraction,
    tune_malloc,
)
from qkv.train.perf.static_batch import StaticShapePadder
from qkv.train.run_folder import RECIPE, check_same_recipe, lock_run_folder
from qkv.train.run_log import LossMeter, Record, append_record, truncate_log
from qkv.train.schedule import learning_rate_at
from qkv.train.workload import AnyBatch, LossModule, Workload, build_workload

LOG = "log.jsonl"


def fit(recipe: Recipe, folder: str | Path, *, device: str | None = None) -> Iterator[Record]:
    """Trains what a recipe describes in `folder`, from its last checkpoint if it has one; by torchrun with others."""
    folder, lock_fd = Path(folder), None
    dist_info = init_distributed(device)
    try:
        check_same_recipe(folder, recipe)
        if is_finished(folder):
            return
        workload = build_workload(recipe, folder)
        with _report_out_of_memory():
            trainer = Trainer(resolve_steps(recipe, workload), folder, workload, dist_info)
            lock_fd = on_main_rank(dist_info, partial(lock_run_folder, folder))
            on_main_rank(dist_info, partial(trainer.save_run_files, workload.recipe))
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
    """Where memory ends, that is said in one line; the last checkpoint is whole."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own is one of the latter; on a CPU it is not named
        if isinstance(error, RuntimeError) and not any(phrase in str(error) for phrase in _OUT_OF_MEMORY_PHRASES):
            raise
        remedy = "raise train.gradient_accumulation_steps (the gradient stays the same), set train.activation_checkpointing, or lower data.max_length"
        raise InputError(f"out of memory; {remedy}, and run it again to go on from the last checkpoint") from None


_OUT_OF_MEMORY_PHRASES = ("can't allocate memory", "out of memory")


def lr_range_test(recipe: Recipe, *, device: str | None = None, steps: int = 200) -> RangeTest:
    """A learning-rate range test of a fresh model on the recipe's batches (Smith 2017); no folder is touched."""
    dist_info = init_distributed(device)
    if not dist_info.is_single:
        raise InputError("--find-lr: one process is enough; start it without torchrun")
    unused_folder = Path(os.devnull) / "nothing"
    workload = build_workload(recipe, unused_folder)
    trainer, range_test = Trainer(resolve_steps(recipe, workload), unused_folder, workload, dist_info), RangeTest(steps=steps)
    trainer.model.train()
    batches = trainer.batches()
    for step in range(1, steps + 1):
        meter = LossMeter(trainer.workload.loss_names, trainer.device)
        trainer.train_state.step = step
        trainer.step(next(batches), range_test.learning_rate_at(step), meter)
        with meter.paused():
            if not range_test.add(step, meter.flush(dist_info)[0][trainer.workload.loss_names[0]]):
                break
    return range_test


class StepBatch(NamedTuple):
    """A batch as this process takes it."""

    next_position: DataPosition  # behind it
    microbatches: list[tuple[int, Any]]  # each with its number in the whole batch
    is_real: list[bool]  # False: only there so that all processes have as many; it counts for nothing
    num_tokens: int  # of the whole batch

    @property
    def num_tokens_read(self) -> int:
        """Tokens that the model reads here: also special ones, and those of a target that is its own source's text."""
        fields = [field for _, inputs in self.microbatches for field in inputs]
        return sum(field.layout.num_tokens for field in fields if isinstance(field, Ragged))


class Trainer:
    """One run's living parts. The loop is `train`; the rest is what it calls."""

    def __init__(self, recipe: Recipe, folder: Path, workload: Workload, dist_info: DistributedInfo):
        train_config = recipe.train
        max_steps, warmup_steps, valid_every = train_config.max_steps, train_config.warmup_steps, recipe.validation.every_steps
        assert max_steps is not None  # `resolve_steps` made numbers of them
        assert warmup_steps is not None
        assert valid_every is not None
        self.max_steps, self.warmup_steps, self.valid_every = max_steps, warmup_steps, valid_every
        self.recipe, self.folder, self.workload, self.dist_info = recipe, folder, workload, dist_info
        self.device, self.sharded = dist_info.device, train_config.strategy == "fsdp"
        self.use_bf16 = _configure_torch(train_config, self.device)
        torch.manual_seed(recipe.seed)
        self.model = workload.model().to(self.device)
        if train_config.activation_checkpointing:
            enable_activation_checkpointing(self.model)
        if train_config.compile:
            compile_blocks(self.model, self.use_bf16)
        self.loss_module = wrap_model(LossModule(self.model, workload), self.model, train_config.strategy, self.use_bf16, dist_info)
        finetune = getattr(recipe, "finetune", None)
        # sums over parts, processes and kinds of loss, and averages, are those of whole embeddings
        use_lazy_embeddings = self.device.type == "cpu" and dist_info.is_single and train_config.gradient_accumulation_steps == len(workload.loss_names) == 1 and not train_config.ema_decay
        self.optimizer = build_optimizer(self.model, train_config, finetune, lazy_embeddings=finetune is not None and use_lazy_embeddings)
        self.ema = self._make_ema()
        self.train_state = self._load_checkpoint()
        fingerprint = workload.fingerprint()
        if self.train_state.step and self.train_state.data_fingerprint != fingerprint:
            raise InputError(
                f"{folder}: was begun with other training data; bring that back, or choose another --output"
            )
        self.train_state.data_fingerprint = fingerprint
        workload.check()  # a budget that fits no batch is said before anything is written
        self.peak_lr = peak_learning_rate(recipe, workload.spec)
        self.metric_sign = -1 if workload.higher_is_better else 1  # of a score, so that less is better
        self.loss_scale = torch.ones(len(workload.loss_names), device=self.device)  # of each kind of loss, in the batch at hand
        # exact kernels and recomputing cannot be recorded; a second loss asks every token, also those of a frame
        padder = None if train_config.deterministic or train_config.activation_checkpointing or len(workload.loss_names) > 1 else StaticShapePadder()
        self.backward = CudaGraphRunner(self._backward, self.model.parameters(), padder, capture_all=train_config.compile)
        self.backward.enabled = train_config.cuda_graphs and dist_info.is_single and self.device.type == "cuda"
        self.overhead_seconds = {"valid": 0.0, "save": 0.0}  # seconds of the last one

    def _make_ema(self) -> EMA | None:
        if not self.recipe.train.ema_decay:
            return None
        if self.sharded:
            raise InputError("train.ema_decay: a model in shards has no averaged weights; set it to 0, or strategy: ddp")
        return EMA(self.model, self.recipe.train.ema_decay)

    def _load_checkpoint(self) -> TrainState:
        if self.sharded:
            from qkv.train.distributed.sharded_checkpoint import load_sharded  # takes a while to import

            train_state = load_sharded(self.folder, self.model, self.optimizer, self.dist_info)
        else:
            train_state = load_checkpoint(self.folder, self.model, self.optimizer, self.ema)
        if train_state.best_metric is not None:
            check_best_exists(self.folder)  # now, and not at the end of the run
        return train_state

    def save_run_files(self, recipe: Recipe) -> None:
        """The run's folder becomes a model folder; what a killed run logged past its checkpoint is dropped."""
        atomic_write_text(self.folder / RECIPE, recipe_to_yaml(recipe))
        atomic_write_text(self.folder / SPEC_FILE, spec.to_json(self.workload.spec))
        self.workload.save_assets(self.folder)
        truncate_log(self.folder / LOG, self.train_state.step)

    # ---- the loop

    def train(self) -> Iterator[Record]:
        train_config, train_state = self.recipe.train, self.train_state
        save_every = train_config.save_every or self.valid_every
        meter = LossMeter(self.workload.loss_names, self.device)
        if self.workload.data_notes:
            yield Record("note", train_state.step, {"max_steps": self.max_steps}, () if train_state.step else self.workload.data_notes)
        self.model.train()
        batches = self.batches()
        while train_state.step < self.max_steps and not train_state.finished:
            step_batch = next(batches)
            train_state.step += 1
            train_state.epoch, train_state.batch_index = step_batch.next_position.epoch, step_batch.next_position.batch_index
            learning_rate = learning_rate_at(train_config.schedule, train_state.step, peak_lr=self.peak_lr, warmup_steps=self.warmup_steps, max_steps=self.max_steps)
            self.step(step_batch, learning_rate, meter)
            train_state.tokens += step_batch.num_tokens
            is_last = train_state.step == self.max_steps
            if train_state.step % train_config.log_every == 0 or is_last:
                with meter.paused():
                    meter.check_finite(train_state.step, self.dist_info)
                    flops_per_token = flops_per_token_of_batch(self.workload.spec, step_batch.microbatches[0][1]) * trained_fraction(self.model) * step_batch.num_tokens_read
                    flops_per_token *= self.dist_info.world_size / step_batch.num_tokens
                    yield self.report(meter, flops_per_token, {"learning_rate": learning_rate, "epoch": train_state.epoch})
            if train_state.step % self.valid_every == 0 or is_last:
                with meter.paused():
                    meter.check_finite(train_state.step, self.dist_info)
                    yield self.validate()
            if train_state.step % save_every == 0 or is_last or train_state.finished:
                with meter.paused():
                    meter.check_finite(train_state.step, self.dist_info)
                    self.save()
        yield self.finish()

    def batches(self) -> Iterator[StepBatch]:
        """From where the run stands, made ready by as many threads as the recipe asks for."""
        train_state = self.train_state
        positioned_batches = self.workload.batches_from(train_state.epoch, train_state.batch_index)
        return prefetch_map(self._prepare_step, enumerate(positioned_batches, train_state.step + 1), self.recipe.train.num_workers, "prepare")

    def _prepare_step(self, numbered_batch: tuple[int, tuple[DataPosition, AnyBatch]]) -> StepBatch:
        """This process's parts. All have as many: gradients, and shards of weights, are exchanged part by part."""
        step, (next_position, batch) = numbered_batch
        world_size, rank = self.dist_info.world_size, self.dist_info.rank
        microbatches = batch.split(self.recipe.train.gradient_accumulation_steps * world_size)
        indices = range(rank, -(-len(microbatches) // world_size) * world_size, world_size)
        local_inputs = [(index, self.workload.collate(microbatches[index % len(microbatches)], step)) for index in indices]
        return StepBatch(next_position, local_inputs, [index < len(microbatches) for index in indices], batch.tokens)

    def step(self, step_batch: StepBatch, learning_rate: float, meter: LossMeter) -> None:
        """One optimiser step: for each kind of loss the sum over all parts, over the number of all their targets."""
        counts = self._set_loss_scale(step_batch)
        self.optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(len(counts), device=self.device)
        for local_index, ((global_index, inputs), is_real) in enumerate(zip(step_batch.microbatches, step_batch.is_real, strict=True)):
            if not is_real:
                self.loss_scale.zero_()
            # what dropout does is a function of the step and the part: not of what was drawn before, nor of processes
            torch.manual_seed(_derive_seed(self.recipe.seed, self.train_state.step, global_index))
            with maybe_no_sync(self.loss_module, is_last=local_index == len(step_batch.microbatches) - 1):
                losses = self.backward(to_device(self.backward.pad(inputs), self.device))
            totals += torch.stack(losses) * is_real
        if self.recipe.train.max_grad_norm is not None:
            clip_grad_norm(self.model.parameters(), self.recipe.train.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model, self.train_state.step)
        meter.add(totals, counts, step_batch.num_tokens)

    def _set_loss_scale(self, step_batch: StepBatch) -> list[int]:
        """One over the number of the whole batch's targets, by kind; gives this process's own numbers."""
        num_losses = len(self.workload.loss_names)
        target_counts = [inputs.num_targets[:num_losses] for (_, inputs), is_real in zip(step_batch.microbatches, step_batch.is_real, strict=True) if is_real]
        counts = np.sum([np.zeros(num_losses, np.int64), *target_counts], axis=0)
        world_size = self.dist_info.world_size  # gradients become means over processes
        global_counts = all_reduce_sum(torch.from_numpy(counts), self.dist_info).clamp(min=1)
        self.loss_scale.copy_(to_device_async(world_size / global_counts, self.device))
        return counts.tolist()

    def _backward(self, inputs: Any) -> tuple[Tensor, ...]:
        context: AbstractContextManager[Any] = nullcontext()
        if self.use_bf16:
            context = torch.autocast(self.device.type, torch.bfloat16)
        with context:
            losses = self.loss_module(inputs)
        totals = torch.stack([loss.total for loss in losses])  # [kinds]
        (totals * self.loss_scale).sum().backward()
        return tuple(totals.detach())

    def report(self, meter: LossMeter, flops_per_token: float, values: dict[str, float]) -> Record:
        """Losses, speed, its share of the hardware's measured peak at so much work a token, the time left."""
        step, train_config = self.train_state.step, self.recipe.train
        num_steps = meter.steps
        means, seconds = meter.flush(self.dist_info)
        self.train_state.train_seconds += seconds
        mfu = means["tokens_per_second"] * flops_per_token / matmul_peak_flops(self.device, self.use_bf16)
        save_every = train_config.save_every or self.valid_every
        eta_seconds = (self.max_steps - step) * seconds / max(num_steps, 1)
        eta_seconds += (self.max_steps // self.valid_every - step // self.valid_every) * self.overhead_seconds["valid"]
        eta_seconds += (self.max_steps // save_every - step // save_every) * self.overhead_seconds["save"]
        return Record("train", step, means | values | {"mfu": mfu / self.dist_info.world_size, "eta_seconds": eta_seconds})

    # ---- what is kept

    def check_finite(self) -> None:
        """Before weights are read: all are as the steps have left them, and are numbers."""
        if isinstance(self.optimizer, LazyEmbeddingAdamW):
            self.optimizer.flush()
        check_finite(self.model, self.train_state.step)

    def save(self) -> None:
        start_time = time.perf_counter()
        self.check_finite()
        if self.sharded:
            from qkv.train.distributed.sharded_checkpoint import save_sharded

            save_sharded(self.folder, self.model, self.optimizer, self.train_state, self.dist_info)
        else:
            args = self.folder, self.model, self.optimizer, self.train_state, self.ema
            on_main_rank(self.dist_info, partial(save_checkpoint, *args))
        self.overhead_seconds["save"] = time.perf_counter() - start_time

    def save_weights(self, path: Path) -> None:
        """The weights as they are now, in one plain file."""
        if self.sharded:
            from qkv.train.distributed.sharded_checkpoint import gather_state_dict

            weights = gather_state_dict(self.model, self.dist_info)
        else:
            weights = trainable_state_dict(self.model)
        on_main_rank(self.dist_info, lambda: save_tensors(path, weights or {}))

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        if self.sharded:
            from qkv.train.distributed.sharded_checkpoint import load_full_state_dict

            load_full_state_dict(self.model, weights, "average")
        else:
            load_trainable_state_dict(self.model, weights, "average")

    def validate(self) -> Record:
        """The score on held-out data; keeps the best weights and those to be averaged."""
        train_state, recipe = self.train_state, self.recipe
        start_time = time.perf_counter()
        self.check_finite()
        with self.ema.applied_to(self.model) if self.ema else nullcontext():
            with unsharded_copy(self.model) as model:
                values, samples = self.workload.evaluate(model), tuple(self.workload.sample_outputs(model))
            self._track_best(values[self.workload.metric])
        if recipe.validation.patience is not None and train_state.validations_since_best >= recipe.validation.patience:
            train_state.finished = True
        self.overhead_seconds["valid"] = time.perf_counter() - start_time
        primary_metric = {self.workload.metric: values[self.workload.metric]}  # comes first, for people
        return Record("valid", train_state.step, primary_metric | values | {"seconds": self.overhead_seconds["valid"]}, samples)

    def _track_best(self, metric: float) -> None:
        train_state, num_averaged = self.train_state, self.recipe.train.average_checkpoints
        train_state.validations_since_best += 1
        # a correlation of constant predictions is no number: anything is better
        if train_state.best_metric is None or math.isnan(train_state.best_metric) or self.metric_sign * metric < self.metric_sign * train_state.best_metric:
            train_state.best_metric, train_state.best_step, train_state.validations_since_best = metric, train_state.step, 0
            self.save_weights(self.folder / BEST_WEIGHTS)
        if num_averaged > 1:
            self.save_weights(averaging_path(self.folder, train_state.step))
            train_state.averaging_steps = [*train_state.averaging_steps, train_state.step][-num_averaged:]

    def finish(self) -> Record:
        """The finished weights: the best ones, or the mean of the last few where that does better on held-out data."""
        train_state, metric = self.train_state, self.workload.metric
        values = {"best_step": float(train_state.best_step), "num_averaged_checkpoints": 0.0, metric: train_state.best_metric or 0.0}
        weights, _ = load_tensors(self.folder / BEST_WEIGHTS)
        if len(train_state.averaging_steps) > 1:
            averaged_weights = average_checkpoints([averaging_path(self.folder, step) for step in train_state.averaging_steps])
            self.load_weights(averaged_weights)
            with unsharded_copy(self.model) as model:
                scores = self.workload.evaluate(model)
            if train_state.best_metric is None or self.metric_sign * scores[metric] <= self.metric_sign * train_state.best_metric:
                weights, values = averaged_weights, {"num_averaged_checkpoints": float(len(train_state.averaging_steps))} | scores
        file = WEIGHTS_FILE if self.workload.spec.lora is None else LORA_FILE
        on_main_rank(self.dist_info, lambda: save_tensors(self.folder / file, weights))
        return Record("final", train_state.step, values | {"seconds": train_state.train_seconds, "tokens": float(train_state.tokens)})


def _configure_torch(train_config: TrainConfig, device: torch.device) -> bool:
    """Sets what torch computes in; whether that is half precision."""
    if train_config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cpu":
        tune_malloc()
    torch.set_float32_matmul_precision("high" if train_config.precision == "tf32" else "highest")
    bf16_supported = device.type == "cuda" and torch.cuda.is_bf16_supported()
    use_bf16 = train_config.precision == "bf16" or (train_config.precision == "auto" and bf16_supported)
    if use_bf16 and not bf16_supported:
        # on a CPU it is slower than float32, and its kernels crash where the instructions are named but not there
        raise InputError("train.precision: bf16 needs a GPU that has it; choose float32")
    return use_bf16


def _derive_seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
