"""Learning-rate range test (Smith 2017, section 3.3): the rate grows while a model trains.

The suggested rate is the one at which the loss falls fastest.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import InputError
from qkv.files import atomic_write_bytes
from qkv.recipe.schema import Recipe
from qkv.train.distributed.processes import init_distributed
from qkv.train.run_log import LossMeter
from qkv.train.trainer import Trainer
from qkv.train.workload import workload_class

_EMA_DECAY = 0.9  # decay of the smoothed loss: an average of about the last ten steps
_EMA_WARMUP_STEPS = round(1 / (1 - _EMA_DECAY))  # steps until the average covers its window
_DIVERGENCE_FACTOR = 4.0  # a smoothed loss above this multiple of the best one has diverged
_MIN_SIGNIFICANCE = 5.0  # minimum fall of the smoothed loss, in standard deviations of its noise
_MIN_STEPS = 20  # minimum number of steps to estimate slopes


def exponential_lr(step: int, *, min_lr: float, max_lr: float, steps: int) -> float:
    """Return the rate of a step, from `min_lr` at step 1 to `max_lr` at the last, with a constant factor per step."""
    return float(min_lr * (max_lr / min_lr) ** ((step - 1) / max(1, steps - 1)))


def exponential_average(values: Sequence[float], decay: float = _EMA_DECAY) -> list[float]:
    """Return the exponential moving average, corrected for its start at zero."""
    average, averages = 0.0, []
    for count, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        averages.append(average / (1 - decay**count))
    return averages


def local_slopes(x: Sequence[float], y: Sequence[float], radius: int) -> NDArray[np.float64]:
    """Return the slope of a line fitted to each point and up to `radius` neighbors on both sides."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    result = np.empty(len(xs))
    for i in range(len(xs)):
        window = slice(max(0, i - radius), i + radius + 1)
        centered = xs[window] - xs[window].mean()
        result[i] = (centered @ ys[window]) / (centered @ centered)
    return result


class RangeTest:
    """The learning rates and losses of a range test, and the rate that they suggest.

    The smoothed loss lags. It is compared with the logarithm of the rate, smoothed in the same way and
    hence with the same lag; otherwise the suggestion would be several times too large.
    """

    def __init__(self, min_lr: float = 1e-7, max_lr: float = 1.0, steps: int = 100) -> None:
        if not 0 < min_lr < max_lr or not math.isfinite(max_lr):
            raise InputError(f"a range test needs 0 < min_lr < max_lr, not {min_lr} and {max_lr}")
        if steps < _MIN_STEPS:
            raise InputError(f"a range test needs at least {_MIN_STEPS} steps, not {steps}")
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps
        self.learning_rates: list[float] = []
        self.losses: list[float] = []

    def learning_rate_at(self, step: int) -> float:
        """Return the rate of a step (1, 2, …)."""
        return exponential_lr(step, min_lr=self.min_lr, max_lr=self.max_lr, steps=self.steps)

    def add(self, step: int, loss: float) -> bool:
        """Add the loss of a step; return False if the test is complete or the loss has diverged."""
        if not math.isfinite(loss):
            return False
        self.learning_rates.append(self.learning_rate_at(step))
        self.losses.append(loss)
        curve = exponential_average(self.losses)
        return step < self.steps and curve[-1] <= _DIVERGENCE_FACTOR * min(curve)

    def suggested_lr(self) -> float:
        """Return the rate at which the smoothed loss falls fastest, before its minimum."""
        if len(self.losses) < _MIN_STEPS:
            raise InputError(
                f"the loss diverged after {len(self.losses)} steps of growing rates; start below {self.min_lr:g}"
            )
        log_rates, curve = exponential_average(np.log(self.learning_rates).tolist()), exponential_average(self.losses)
        start = min(_EMA_WARMUP_STEPS, len(curve) // 4)  # the first averages are mostly noise
        lowest = start + int(np.argmin(curve[start:]))
        if curve[start] - curve[lowest] <= _MIN_SIGNIFICANCE * self._noise_std():
            bounds = f"between {self.min_lr:g} and {self.learning_rates[-1]:g}"
            raise InputError(f"no learning rate {bounds} made the loss fall clearly; try other bounds or more steps")
        descent = local_slopes(log_rates, curve, radius=max(1, len(curve) // 20))[start : lowest + 1]
        return math.exp(log_rates[start + int(np.argmin(descent))])

    def _noise_std(self) -> float:
        """Estimate the noise of the smoothed loss (standard deviation) from differences of adjacent losses."""
        median_difference = float(
            np.median(np.abs(np.diff(self.losses)))
        )  # the median ignores the divergence at the end
        loss_std = median_difference / 0.6745 / math.sqrt(2)  # half of all normal deviates are within 0.6745 std
        return loss_std * math.sqrt((1 - _EMA_DECAY) / (1 + _EMA_DECAY))

    def tsv(self) -> str:
        """Return a table with one line per step: step, rate, loss and smoothed loss."""
        rows = zip(self.learning_rates, self.losses, exponential_average(self.losses), strict=True)
        lines = [
            f"{step}\t{rate:.6g}\t{loss:.6g}\t{smoothed_loss:.6g}"
            for step, (rate, loss, smoothed_loss) in enumerate(rows, start=1)
        ]
        return "\n".join(["step\trate\tloss\tsmoothed", *lines]) + "\n"

    def plot(self, path: str | Path) -> None:
        """Write the curve as a PNG, with the suggested rate marked if there is one."""
        from matplotlib.figure import Figure

        if not self.losses:
            raise InputError(f"the loss was not finite at a learning rate of {self.min_lr:g}; there is nothing to plot")
        curve = exponential_average(self.losses)
        smoothed_rates = np.exp(exponential_average(np.log(self.learning_rates).tolist()))
        figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        axes.plot(self.learning_rates, self.losses, ".", markersize=4, color="#b3c6e4", label="loss of a batch")
        axes.plot(smoothed_rates, curve, color="#2b3a5e", label="smoothed")
        axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
        lowest, highest = min(self.losses), max(curve[: int(np.argmin(curve)) + 1])
        margin = (highest - lowest) / 2 or 1.0  # a diverged loss leaves the plot, so that the rest stays visible
        axes.set_ylim(lowest - margin / 3, highest + margin)
        try:
            suggested = self.suggested_lr()
            axes.axvline(suggested, color="#c2482d", linestyle="--", label=f"falls fastest: {suggested:.2g}")
            title = f"Learning-rate range test: {suggested:.2g} suggested"
        except InputError:
            title = "Learning-rate range test: no clear fall, nothing suggested"
        axes.set_title(title, loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        atomic_write_bytes(Path(path), buffer.getvalue())


def lr_range_test(recipe: Recipe, *, device: str | None = None, steps: int = 200, data: Any = None) -> RangeTest:
    """Run a range test of a recipe's model on its batches, without writing to any folder.

    Args:
        recipe: the recipe; its learning rate and schedule are not used.
        device: such as "cpu" or "cuda"; None: a GPU if there is one.
        steps: number of training steps.
        data: the recipe's data if it was already read.
    """
    dist_info = init_distributed(device)
    if not dist_info.is_single:
        raise InputError("--find-lr: runs in one process; start it without torchrun")
    unused_folder = Path(os.devnull) / "nothing"
    workload = workload_class(recipe).build(recipe, unused_folder, data)
    trainer, range_test = Trainer(recipe, unused_folder, workload, dist_info), RangeTest(steps=steps)
    trainer.model.train()
    batches = trainer.batches()
    for step in range(1, steps + 1):
        meter = LossMeter(workload.loss_names, trainer.device)
        trainer.train_step(step, next(batches), range_test.learning_rate_at(step), meter)
        with meter.paused():
            losses, _ = meter.flush(dist_info)
        if not range_test.add(step, losses[workload.loss_names[0]]):
            break
    return range_test
