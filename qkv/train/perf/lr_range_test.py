"""A learning-rate range test (Smith 2017, section 3.3): the rate grows while a model trains, and the loss says which
rates make it learn. The rate to begin with is where the loss falls fastest.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkv.errors import InputError
from qkv.files import atomic_write_bytes

_EMA_DECAY = 0.9  # of the smoothed loss at each step: an average over about the last ten
_EMA_WARMUP_STEPS = round(1 / (1 - _EMA_DECAY))  # steps until that average has what it averages over
_DIVERGENCE_FACTOR = 4.0  # times the best smoothed loss
_MIN_SIGNIFICANCE = 5.0  # standard deviations of the smoothed loss's own noise that a fall must be larger than
_MIN_STEPS = 20  # steps that a slope can be found among


def exponential_lr(step: int, *, min_lr: float, max_lr: float, steps: int) -> float:
    """From `min_lr` at step 1 to `max_lr` at the last, by the same factor each step."""
    return float(min_lr * (max_lr / min_lr) ** ((step - 1) / max(1, steps - 1)))


def exponential_average(values: Sequence[float], decay: float = _EMA_DECAY) -> list[float]:
    """Exponential moving average; divided by the weights so far, so that it does not begin at zero."""
    average, averages = 0.0, []
    for count, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        averages.append(average / (1 - decay**count))
    return averages


def local_slopes(x: Sequence[float], y: Sequence[float], radius: int) -> NDArray[np.float64]:
    """Of the straight line through each point and `radius` neighbours on both sides, as far as there are any."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    result = np.empty(len(xs))
    for i in range(len(xs)):
        window = slice(max(0, i - radius), i + radius + 1)
        centered = xs[window] - xs[window].mean()
        result[i] = (centered @ ys[window]) / (centered @ centered)
    return result


class RangeTest:
    """Says the rate of each step, is told its loss, and in the end suggests a rate.

    The smoothed loss lags behind. It is set against the logarithm of the rate smoothed alike, which lags as much: else
    the suggestion would be several times too large.
    """

    def __init__(self, min_lr: float = 1e-7, max_lr: float = 1.0, steps: int = 100):
        if not 0 < min_lr < max_lr or not math.isfinite(max_lr):
            raise InputError(f"a range test goes from a small learning rate to a larger one, not from {min_lr} to {max_lr}")
        if steps < _MIN_STEPS:
            raise InputError(f"a range test needs at least {_MIN_STEPS} steps to find a slope among, not {steps}")
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps
        self.learning_rates: list[float] = []
        self.losses: list[float] = []

    def learning_rate_at(self, step: int) -> float:
        """Steps count from 1."""
        return exponential_lr(step, min_lr=self.min_lr, max_lr=self.max_lr, steps=self.steps)

    def add(self, step: int, loss: float) -> bool:
        """Takes a step's loss; False: enough was seen, or the loss has left for good."""
        if not math.isfinite(loss):
            return False
        self.learning_rates.append(self.learning_rate_at(step))
        self.losses.append(loss)
        curve = exponential_average(self.losses)
        return step < self.steps and curve[-1] <= _DIVERGENCE_FACTOR * min(curve)

    def suggested_lr(self) -> float:
        """The rate at which the smoothed loss falls fastest over the logarithm of the rate, before it is lowest."""
        if len(self.losses) < _MIN_STEPS:
            raise InputError(
                f"the loss left after {len(self.losses)} steps of growing learning rates; begin below {self.min_lr:g}"
            )
        log_rates, curve = exponential_average(np.log(self.learning_rates).tolist()), exponential_average(self.losses)
        start = min(_EMA_WARMUP_STEPS, len(curve) // 4)  # before, the average is little but noise
        lowest = start + int(np.argmin(curve[start:]))
        if curve[start] - curve[lowest] <= _MIN_SIGNIFICANCE * self._noise_std():
            bounds = f"between {self.min_lr:g} and {self.learning_rates[-1]:g}"
            raise InputError(f"no learning rate {bounds} made the loss fall clearly; try other bounds or more steps")
        descent = local_slopes(log_rates, curve, radius=max(1, len(curve) // 20))[start : lowest + 1]
        return math.exp(log_rates[start + int(np.argmin(descent))])

    def _noise_std(self) -> float:
        """Standard deviation of the smoothed loss where nothing is learnt, from how much neighbouring losses differ."""
        median_difference = float(np.median(np.abs(np.diff(self.losses))))  # the median: a loss that leaves is no noise
        loss_std = median_difference / 0.6745 / math.sqrt(2)  # of normal differences half lie within 0.6745 standard deviations
        return loss_std * math.sqrt((1 - _EMA_DECAY) / (1 + _EMA_DECAY))

    def tsv(self) -> str:
        """Step, rate, loss and smoothed loss, a line each."""
        rows = zip(self.learning_rates, self.losses, exponential_average(self.losses), strict=True)
        lines = [
            f"{step}\t{rate:.6g}\t{loss:.6g}\t{smoothed_loss:.6g}" for step, (rate, loss, smoothed_loss) in enumerate(rows, start=1)
        ]
        return "\n".join(["step\trate\tloss\tsmoothed", *lines]) + "\n"

    def plot(self, path: str | Path) -> None:
        """The curve as a PNG, with the suggested rate marked where there is one."""
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
        margin = (highest - lowest) / 2 or 1.0  # a loss that leaves goes out of the picture, else nothing else could be seen
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
