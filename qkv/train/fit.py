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
from qkv.data.ahead import ahead
from qkv.data.batches import Place
from qkv.errors import InputError
from qkv.files import write_text
from qkv.nn import Ragged
from qkv.nn.ragged import sent
from qkv.nn.stack import recompute
from qkv.objectives.term import to_device
from qkv.train.checkpoint import BEST, check_finite, check_kept, load_last, save_last, snapshot
from qkv.train.claim import RECIPE, claim, hold
from qkv.train.distributed import Ranks, by_first, clip, gathered, join, leave, meeting, spread, total
from qkv.train.duration import in_steps
from qkv.train.frame import Framing
from qkv.train.graph import Graphed
from qkv.train.hardware import compile_blocks, keep_memory, matrix_peak, passes, work_on
from qkv.train.optimiser import optimiser
from qkv.train.range_test import RangeTest
from qkv.train.recipe import peak, to_yaml
from qkv.train.rows import RowAdamW
from qkv.train.schedule import rate
from qkv.train.sections import AnyRecipe, Training
from qkv.train.tally import Record, Tally, forget_after, log
from qkv.train.trailing import Trailing
from qkv.train.work import AnyBatch, Judge, Work, prepare
from qkv.weights.adapters import kept, put
from qkv.weights.file import average, load_tensors, save_tensors
from qkv.weights.folder import ADAPTER, SPEC, WEIGHTS, finished

LOG = "log.jsonl"


def fit(recipe: AnyRecipe, folder: str | Path, *, device: str | None = None) -> Iterator[Record]:
    """Trains what a recipe describes in `folder`, from its last checkpoint if it has one; by torchrun with others."""
    folder, held = Path(folder), None
    ranks = join(device)
    try:
        claim(folder, recipe)
        if finished(folder):
            return
        work = prepare(recipe, folder)
        with _in_memory():
            run = Run(in_steps(recipe, work), folder, work, ranks)
            held = by_first(ranks, partial(hold, folder))
            by_first(ranks, partial(run.write_down, work.recipe))
            for record in run.train():
                if ranks.first:
                    log(folder / LOG, record)
                yield record
    finally:
        leave(ranks)
        if ranks.first and held is not None:
            os.close(held)


@contextmanager
def _in_memory() -> Iterator[None]:
    """Where memory ends, that is said in one line; the last checkpoint is whole."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own is one of the latter; on a CPU it is not named
        if isinstance(error, RuntimeError) and not any(said in str(error) for said in _NO_MEMORY):
            raise
        remedy = "raise train.accumulate (the gradient stays the same), set train.recompute, or lower data.length"
        raise InputError(f"out of memory; {remedy}, and run it again to go on from the last checkpoint") from None


_NO_MEMORY = ("can't allocate memory", "out of memory")


def find_rate(recipe: AnyRecipe, *, device: str | None = None, steps: int = 200) -> RangeTest:
    """A learning-rate range test of a fresh model on the recipe's batches (Smith 2017); no folder is touched."""
    ranks = join(device)
    if not ranks.alone:
        raise InputError("--find-lr: one process is enough; start it without torchrun")
    nowhere = Path(os.devnull) / "nothing"
    work = prepare(recipe, nowhere)
    run, test = Run(in_steps(recipe, work), nowhere, work, ranks), RangeTest(steps=steps)
    run.model.train()
    batches = run.batches()
    for step in range(1, steps + 1):
        tally = Tally(run.work.kinds, run.device)
        run.progress.step = step
        run.step(next(batches), test.rate(step), tally)
        with tally.paused():
            if not test.add(step, tally.take(ranks)[0][run.work.kinds[0]]):
                break
    return test


class Ready(NamedTuple):
    """A batch as this process takes it."""

    place: Place  # behind it
    parts: list[tuple[int, Any]]  # each with its number in the whole batch
    real: list[bool]  # False: only there so that all processes have as many; it counts for nothing
    tokens: int  # of the whole batch

    @property
    def read(self) -> int:
        """Tokens that the model reads here: also special ones, and those of a target that is its own source's text."""
        fields = [field for _, part in self.parts for field in part]
        return sum(field.layout.total for field in fields if isinstance(field, Ragged))


class Run:
    """One run's living parts. The loop is `train`; the rest is what it calls."""

    def __init__(self, recipe: AnyRecipe, folder: Path, work: Work, ranks: Ranks):
        how = recipe.train
        self.recipe, self.folder, self.work, self.ranks = recipe, folder, work, ranks
        self.device, self.sharded = ranks.device, how.spread == "fsdp"
        self.half = _prepare_torch(how, self.device)
        torch.manual_seed(recipe.seed)
        self.model = work.model().to(self.device)
        if how.recompute:
            recompute(self.model)
        if how.compile:
            compile_blocks(self.model, self.half)
        self.judge = spread(Judge(self.model, work), self.model, how.spread, self.half, ranks)
        tune = getattr(recipe, "tune", None)
        # sums over parts, processes and kinds of loss, and averages, are those of whole embeddings
        alone = self.device.type == "cpu" and ranks.alone and how.accumulate == len(work.kinds) == 1 and not how.ema
        self.optimiser = optimiser(self.model, how, tune, by_rows=tune is not None and alone)
        self.trailing = self._trailing()
        self.progress = self._load()
        digest = work.digest()
        if self.progress.step and self.progress.data != digest:
            raise InputError(
                f"{folder}: was begun with other training data; bring that back, or choose another --output"
            )
        self.progress.data = digest
        work.check()  # a budget that fits no batch is said before anything is written
        self.peak = peak(recipe, work.spec)
        self.sign = -1 if work.more_is_better else 1  # of a score, so that less is better
        self.scale = torch.ones(len(work.kinds), device=self.device)  # of each kind of loss, in the batch at hand
        # exact kernels and recomputing cannot be recorded; a second loss asks every token, also those of a frame
        frame = None if how.deterministic or how.recompute or len(work.kinds) > 1 else Framing()
        self.backward = Graphed(self._backward, self.model.parameters(), frame, every=how.compile)
        self.backward.on = how.graph and ranks.alone and self.device.type == "cuda"
        self.pauses = {"valid": 0.0, "save": 0.0}  # seconds of the last one

    def _trailing(self) -> Trailing | None:
        if not self.recipe.train.ema:
            return None
        if self.sharded:
            raise InputError("train.ema: a model in shards has no averaged weights; set it to 0, or spread: ddp")
        return Trailing(self.model, self.recipe.train.ema)

    def _load(self) -> Any:
        if self.sharded:
            from qkv.train.sharded import load_sharded  # takes a while to import

            found = load_sharded(self.folder, self.model, self.optimiser, self.ranks)
        else:
            found = load_last(self.folder, self.model, self.optimiser, self.trailing)
        if found.best is not None:
            check_kept(self.folder)  # now, and not at the end of the run
        return found

    def write_down(self, recipe: AnyRecipe) -> None:
        """The run's folder becomes a model folder; what a killed run logged past its checkpoint is dropped."""
        write_text(self.folder / RECIPE, to_yaml(recipe))
        write_text(self.folder / SPEC, spec.to_json(self.work.spec))
        self.work.write_down(self.folder)
        forget_after(self.folder / LOG, self.progress.step)

    # ---- the loop

    def train(self) -> Iterator[Record]:
        how, progress = self.recipe.train, self.progress
        save_every = how.save_every or self.recipe.valid.every
        tally = Tally(self.work.kinds, self.device)
        if self.work.notes:
            yield Record("note", progress.step, {"steps": how.steps}, () if progress.step else self.work.notes)
        self.model.train()
        batches = self.batches()
        while progress.step < how.steps and not progress.finished:
            ready = next(batches)
            progress.step += 1
            progress.epoch, progress.index = ready.place.epoch, ready.place.index
            learning_rate = rate(how.schedule, progress.step, peak=self.peak, warmup=how.warmup, steps=how.steps)
            self.step(ready, learning_rate, tally)
            progress.tokens += ready.tokens
            last = progress.step == how.steps
            if progress.step % how.log_every == 0 or last:
                with tally.paused():
                    tally.check(progress.step, self.ranks)
                    work = work_on(self.work.spec, ready.parts[0][1]) * passes(self.model) * ready.read
                    work *= self.ranks.size / ready.tokens
                    yield self.report(tally, work, {"learning_rate": learning_rate, "epoch": progress.epoch})
            if progress.step % self.recipe.valid.every == 0 or last:
                with tally.paused():
                    tally.check(progress.step, self.ranks)
                    yield self.validate()
            if progress.step % save_every == 0 or last or progress.finished:
                with tally.paused():
                    tally.check(progress.step, self.ranks)
                    self.save()
        yield self.finish()

    def batches(self) -> Iterator[Ready]:
        """From where the run stands, made ready by as many threads as the recipe asks for."""
        progress = self.progress
        placed = self.work.from_place(progress.epoch, progress.index)
        return ahead(self._ready, enumerate(placed, progress.step + 1), self.recipe.train.workers, "prepare")

    def _ready(self, numbered: tuple[int, tuple[Place, AnyBatch]]) -> Ready:
        """This process's parts. All have as many: gradients, and shards of weights, are exchanged part by part."""
        step, (place, batch) = numbered
        size, rank = self.ranks.size, self.ranks.rank
        parts = batch.split(self.recipe.train.accumulate * size)
        own = range(rank, -(-len(parts) // size) * size, size)
        mine = [(number, self.work.prepare(parts[number % len(parts)], step)) for number in own]
        return Ready(place, mine, [number < len(parts) for number in own], batch.tokens)

    def step(self, ready: Ready, learning_rate: float, tally: Tally) -> None:
        """One optimiser step: for each kind of loss the sum over all parts, over the number of all their targets."""
        counts = self._set_scale(ready)
        self.optimiser.zero_grad(set_to_none=True)
        totals = torch.zeros(len(counts), device=self.device)
        for turn, ((number, part), real) in enumerate(zip(ready.parts, ready.real, strict=True)):
            if not real:
                self.scale.zero_()
            # what dropout does is a function of the step and the part: not of what was drawn before, nor of processes
            torch.manual_seed(_seed(self.recipe.seed, self.progress.step, number))
            with meeting(self.judge, last=turn == len(ready.parts) - 1):
                found = self.backward(to_device(self.backward.framed(part), self.device))
            totals += torch.stack(found) * real
        if self.recipe.train.clip is not None:
            clip(self.model.parameters(), self.recipe.train.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate * group.get("share", 1.0)
        self.optimiser.step()
        if self.trailing is not None:
            self.trailing.update(self.model, self.progress.step)
        tally.add(totals, counts, ready.tokens)

    def _set_scale(self, ready: Ready) -> list[int]:
        """One over the number of the whole batch's targets, by kind; gives this process's own numbers."""
        kinds = len(self.work.kinds)
        rows = [part.targets[:kinds] for (_, part), real in zip(ready.parts, ready.real, strict=True) if real]
        counts = np.sum([np.zeros(kinds, np.int64), *rows], axis=0)
        size = self.ranks.size  # gradients become means over processes
        sums = total(torch.from_numpy(counts), self.ranks).clamp(min=1)
        self.scale.copy_(sent(size / sums, self.device))
        return counts.tolist()

    def _backward(self, part: Any) -> tuple[Tensor, ...]:
        context: AbstractContextManager[Any] = nullcontext()
        if self.half:
            context = torch.autocast(self.device.type, torch.bfloat16)
        with context:
            terms = self.judge(part)
        totals = torch.stack([term.total for term in terms])  # [kinds]
        (totals * self.scale).sum().backward()
        return tuple(totals.detach())

    def report(self, tally: Tally, work: float, values: dict[str, float]) -> Record:
        """Losses, speed, its share of the hardware's measured peak at so much work a token, the time left."""
        step, how = self.progress.step, self.recipe.train
        steps = tally.steps
        found, seconds = tally.take(self.ranks)
        self.progress.seconds += seconds
        share = found["tokens_per_second"] * work / matrix_peak(self.device, self.half)
        valid, save = self.recipe.valid.every, how.save_every or self.recipe.valid.every
        left = (how.steps - step) * seconds / max(steps, 1)
        left += (how.steps // valid - step // valid) * self.pauses["valid"]
        left += (how.steps // save - step // save) * self.pauses["save"]
        return Record("train", step, found | values | {"share": share / self.ranks.size, "seconds_left": left})

    # ---- what is kept

    def check(self) -> None:
        """Before weights are read: all are as the steps have left them, and are numbers."""
        if isinstance(self.optimiser, RowAdamW):
            self.optimiser.settle()
        check_finite(self.model, self.progress.step)

    def save(self) -> None:
        began = time.perf_counter()
        self.check()
        if self.sharded:
            from qkv.train.sharded import save_sharded

            save_sharded(self.folder, self.model, self.optimiser, self.progress, self.ranks)
        else:
            given = self.folder, self.model, self.optimiser, self.progress, self.trailing
            by_first(self.ranks, partial(save_last, *given))
        self.pauses["save"] = time.perf_counter() - began

    def keep(self, path: Path) -> None:
        """The weights as they are now, in one plain file."""
        if self.sharded:
            from qkv.train.sharded import whole

            weights = whole(self.model, self.ranks)
        else:
            weights = kept(self.model)
        by_first(self.ranks, lambda: save_tensors(path, weights or {}))

    def put(self, weights: dict[str, Tensor]) -> None:
        if self.sharded:
            from qkv.train.sharded import refill

            refill(self.model, weights, "average")
        else:
            put(self.model, weights, "average")

    def validate(self) -> Record:
        """The score on held-out data; keeps the best weights and those to be averaged."""
        progress, recipe = self.progress, self.recipe
        began = time.perf_counter()
        self.check()
        with self.trailing.standing_in(self.model) if self.trailing else nullcontext():
            with gathered(self.model) as model:
                values, samples = self.work.score(model), tuple(self.work.say(model))
            self._rank(values[self.work.metric])
        if recipe.valid.patience is not None and progress.stale >= recipe.valid.patience:
            progress.finished = True
        self.pauses["valid"] = time.perf_counter() - began
        decides = {self.work.metric: values[self.work.metric]}  # comes first, for people
        return Record("valid", progress.step, decides | values | {"seconds": self.pauses["valid"]}, samples)

    def _rank(self, metric: float) -> None:
        progress, count = self.progress, self.recipe.train.average
        progress.stale += 1
        # a correlation of constant predictions is no number: anything is better
        if progress.best is None or math.isnan(progress.best) or self.sign * metric < self.sign * progress.best:
            progress.best, progress.best_step, progress.stale = metric, progress.step, 0
            self.keep(self.folder / BEST)
        if count > 1:
            self.keep(snapshot(self.folder, progress.step))
            progress.snapshots = [*progress.snapshots, progress.step][-count:]

    def finish(self) -> Record:
        """The finished weights: the best ones, or the mean of the last few where that does better on held-out data."""
        progress, metric = self.progress, self.work.metric
        values = {"best_step": float(progress.best_step), "averaged": 0.0, metric: progress.best or 0.0}
        weights, _ = load_tensors(self.folder / BEST)
        if len(progress.snapshots) > 1:
            mean = average([snapshot(self.folder, step) for step in progress.snapshots])
            self.put(mean)
            with gathered(self.model) as model:
                scores = self.work.score(model)
            if progress.best is None or self.sign * scores[metric] <= self.sign * progress.best:
                weights, values = mean, {"averaged": float(len(progress.snapshots))} | scores
        file = WEIGHTS if self.work.spec.adapters is None else ADAPTER
        by_first(self.ranks, lambda: save_tensors(self.folder / file, weights))
        return Record("finish", progress.step, values | {"seconds": progress.seconds, "tokens": float(progress.tokens)})


def _prepare_torch(how: Training, device: torch.device) -> bool:
    """Sets what torch computes in; whether that is half precision."""
    if how.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cpu":
        keep_memory()
    torch.set_float32_matmul_precision("high" if how.precision == "tf32" else "highest")
    can = device.type == "cuda" and torch.cuda.is_bf16_supported()
    half = how.precision == "bf16" or (how.precision == "auto" and can)
    if half and not can:
        # on a CPU it is slower than float32, and its kernels crash where the instructions are named but not there
        raise InputError("train.precision: bf16 needs a GPU that has it; choose float32")
    return half


def _seed(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))
