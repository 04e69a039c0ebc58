"""Training, as a loop you can read. It yields a record now and then, and can be killed at any moment."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qkv import spec
from qkv.data.batches import Batch, Batches
from qkv.decode import Decoding
from qkv.errors import InputError
from qkv.evaluate import evaluate
from qkv.files import write_text
from qkv.nn import EncoderDecoder, build
from qkv.nn.block import Block
from qkv.objectives.seq2seq import inputs, loss
from qkv.train.checkpoint import BEST, LAST, load_last, save_last, save_weights, snapshot
from qkv.train.optimiser import optimiser
from qkv.train.recipe import Recipe, peak, read_recipe, to_yaml
from qkv.train.schedule import rate
from qkv.train.task import Task, prepare
from qkv.weights.file import average, load_tensors, save_tensors
from qkv.weights.folder import SOURCE, SPEC, TARGET, WEIGHTS, Loaded, fill

LOG, RECIPE = "log.jsonl", "recipe.yaml"


@dataclass(frozen=True)
class Record:
    """What happened: kind is `train`, `valid` or `finish`."""

    kind: str
    step: int
    values: dict[str, float] = field(default_factory=dict)


def fit(recipe: Recipe, folder: str | Path, *, device: str | None = None) -> Iterator[Record]:
    """Trains what a recipe describes in `folder`, from its last checkpoint if it has one."""
    folder = Path(folder)
    _claim(folder, recipe)
    if (folder / WEIGHTS).is_file():
        return
    task = prepare(recipe, folder)
    run = _Run(recipe, folder, task, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    run.write_down()
    for record in run.train():
        _log(folder / LOG, record)
        yield record


def _log(path: Path, record: Record) -> None:
    try:
        with open(path, "a", encoding="utf-8") as log:
            log.write(json.dumps({"kind": record.kind, "step": record.step} | record.values) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}; free some space and run it again") from None


class _Run:
    """One run's living parts. The loop is `train`; the rest is what it calls."""

    def __init__(self, recipe: Recipe, folder: Path, task: Task, device: torch.device):
        self.recipe, self.folder, self.task, self.device = recipe, folder, task, device
        if recipe.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("high" if recipe.train.precision == "tf32" else "highest")
        torch.manual_seed(recipe.seed)
        model = build(task.spec)
        if not isinstance(model, EncoderDecoder):
            raise InputError(f"model.family: {task.spec.family} is no encoder-decoder; pairs need one")
        if recipe.train.own and not isinstance(task.spec.decoder, spec.RecurrentDecoder):
            raise InputError("train.own: only a recurrent decoder can read its own outputs in training; set it to 0")
        self.model = model.to(device)
        self.optimiser = optimiser(self.model, recipe.train)
        self.progress = load_last(folder, self.model, self.optimiser)
        digest = task.pairs.digest()
        if self.progress.step and self.progress.data != digest:
            raise InputError(
                f"{folder}: was begun with other training data; bring that back, or choose another --output"
            )
        self.progress.data = digest
        self.peak = peak(recipe, task.spec)
        self.batches = Batches(task.pairs, recipe.train.batch_tokens, recipe.seed, recipe.train.workers)
        self.batches.in_epoch(self.progress.epoch)  # a budget that fits no batch is said before anything is written
        if recipe.train.compile:
            _compile(self.model)
        can = device.type == "cuda" and torch.cuda.is_bf16_supported()
        half = recipe.train.precision == "bf16" or (recipe.train.precision == "auto" and can)
        if half and not can:
            # on a CPU it is slower than float32, and its kernels crash where the instructions are named but not there
            raise InputError("train.precision: bf16 needs a GPU that has it; choose float32")
        self.autocast = (lambda: torch.autocast(device.type, torch.bfloat16)) if half else nullcontext

    def write_down(self) -> None:
        """The run's folder becomes a model folder; what a killed run logged past its checkpoint is dropped."""
        write_text(self.folder / RECIPE, to_yaml(self.recipe))
        write_text(self.folder / SPEC, spec.to_json(self.task.spec))
        self.task.source.save(self.folder / SOURCE)
        self.task.target.save(self.folder / TARGET)
        log = self.folder / LOG
        if log.is_file():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _step(line) <= self.progress.step]
            write_text(log, "".join(kept))

    def train(self) -> Iterator[Record]:
        recipe, progress = self.recipe.train, self.progress
        save_every = recipe.save_every or self.recipe.valid.every
        summed = _Sums(self.device)
        self.model.train()
        stream = self.batches.from_place(progress.epoch, progress.index)
        while progress.step < recipe.steps and not progress.finished:
            place, batch = next(stream)
            progress.step += 1
            progress.epoch, progress.index = place.epoch, place.index
            learning_rate = self.step(batch, summed)
            progress.tokens += batch.tokens
            last = progress.step == recipe.steps
            if progress.step % recipe.log_every == 0 or last:
                summed.check(progress.step)
                values, seconds = summed.take()
                progress.seconds += seconds
                yield Record("train", progress.step, values | {"learning_rate": learning_rate, "epoch": place.epoch})
                summed.go_on()
            if progress.step % self.recipe.valid.every == 0 or last:
                summed.pause()
                summed.check(progress.step)
                yield self.validate()
                summed.go_on()
            if progress.step % save_every == 0 or last or progress.finished:
                summed.pause()
                save_last(self.folder, self.model, self.optimiser, progress)
                summed.go_on()
        yield self.finish()

    def step(self, batch: Batch, summed: _Sums) -> float:
        """One optimiser step: the sum of all parts' losses over the number of all their targets."""
        recipe, end = self.recipe.train, self.task.spec.end
        targets = len(batch.target) + len(batch)  # the end token counts
        self.optimiser.zero_grad(set_to_none=True)
        for part in batch.split(recipe.accumulate):
            ids = inputs(part, start=self.task.spec.start, end=end, device=self.device)
            context: AbstractContextManager[Any] = self.autocast()
            with context:
                total = loss(self.model, ids, smoothing=recipe.smoothing, own=recipe.own, agree=recipe.agree)
            (total / targets).backward()
            summed.add(total.detach(), len(ids.labels), part.tokens)
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        now = rate(recipe.schedule, self.progress.step, peak=self.peak, warmup=recipe.warmup, steps=recipe.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = now
        self.optimiser.step()
        return now

    def validate(self) -> Record:
        """Real decoding and the real metric; keeps the best weights and those to be averaged."""
        progress, recipe = self.progress, self.recipe
        began = time.perf_counter()
        values = self.score()
        metric = values[recipe.valid.metric]
        progress.stale += 1
        if progress.best is None or metric < progress.best:
            progress.best, progress.best_step, progress.stale = metric, progress.step, 0
            save_weights(self.folder / BEST, self.model)
        if recipe.train.average > 1:
            save_weights(snapshot(self.folder, progress.step), self.model)
            progress.snapshots = [*progress.snapshots, progress.step][-recipe.train.average :]
        if recipe.valid.patience is not None and progress.stale >= recipe.valid.patience:
            progress.finished = True
        return Record("valid", progress.step, values | {"seconds": time.perf_counter() - began})

    def score(self) -> dict[str, float]:
        how = Decoding(beams=self.recipe.valid.beams, unknown=self.recipe.data.unknown)
        found = evaluate(Loaded(self.model, self.task.source, self.task.target), self.task.valid, how)
        return {"per": found.per, "wer": found.wer}

    def finish(self) -> Record:
        """The finished weights: the best ones, or the mean of the last few where that does better on held-out data."""
        progress, chosen = self.progress, self.folder / BEST
        metric = self.recipe.valid.metric
        values = {"best_step": float(progress.best_step), "averaged": 0.0, metric: progress.best or 0.0}
        weights, _ = load_tensors(chosen)
        if len(progress.snapshots) > 1:
            mean = average([snapshot(self.folder, step) for step in progress.snapshots])
            fill(self.model, mean, "average", assign=False)
            scores = self.score()
            if progress.best is None or scores[metric] <= progress.best:
                weights, values = mean, {"averaged": float(len(progress.snapshots))} | scores
        save_tensors(self.folder / WEIGHTS, weights)
        return Record("finish", progress.step, values | {"seconds": progress.seconds, "tokens": float(progress.tokens)})


class _Sums:
    """Loss, tokens and time since the last record; the loss stays on the device so that no step waits for it."""

    def __init__(self, device: torch.device):
        self.loss = torch.zeros((), device=device)
        self.targets = self.tokens = 0
        self.seconds, self.since = 0.0, time.perf_counter()

    def pause(self) -> None:
        """What comes now is not training."""
        if self.loss.device.type == "cuda":
            torch.cuda.synchronize(self.loss.device)
        self.seconds += time.perf_counter() - self.since

    def check(self, step: int) -> None:
        """A run that has diverged stops here, before anything good is overwritten."""
        if not math.isfinite(float(self.loss)):
            raise InputError(f"the loss is not finite by step {step}; lower train.learning_rate or set train.clip")

    def go_on(self) -> None:
        self.since = time.perf_counter()

    def add(self, total: torch.Tensor, targets: int, tokens: int) -> None:
        self.loss += total
        self.targets += targets
        self.tokens += tokens

    def take(self) -> tuple[dict[str, float], float]:
        """The values since the last time, and the seconds of training; the clock stands until it is told to go on."""
        self.pause()
        seconds = self.seconds
        values = {"loss": float(self.loss) / self.targets, "tokens_per_second": self.tokens / seconds}
        self.loss.zero_()
        self.targets = self.tokens = 0
        self.seconds = 0.0
        return values, seconds


def _compile(model: torch.nn.Module) -> None:
    """Compiles what works token by token, once for any number of them; attention has its own kernels."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    if not blocks:
        raise InputError("train.compile: this model has no Transformer blocks to compile; leave it out")
    for block in blocks:
        block.compile_parts()


def _step(line: str) -> float:
    """The step of a log line; what a kill cut short belongs to none."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _claim(folder: Path, recipe: Recipe) -> None:
    """A folder holds one run: another recipe is refused before anything is touched."""
    path = folder / RECIPE
    if not path.is_file() or not any((folder / name).is_file() for name in (LAST, WEIGHTS)):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; choose another output folder")
        return
    earlier, now = _flat(asdict(read_recipe(path))), _flat(asdict(recipe))
    for key in sorted(earlier.keys() | now.keys()):
        if earlier.get(key) != now.get(key) and not key.startswith(_FREE):
            was = f"{key} was {earlier.get(key)}, is {now.get(key)}"
            raise InputError(f"{folder}: holds a run of another recipe ({was}); choose another --output, or remove it")


_FREE = ("name", "test.", "data.test", "train.workers", "train.log_every")  # may change without changing the numbers


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found
