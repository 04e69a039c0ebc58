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
from qkv.files import write_bytes

_KEEP = 0.9  # of the smoothed loss at each step: an average over about the last ten
_FILLED = round(1 / (1 - _KEEP))  # steps until that average has what it averages over
_DIVERGED = 4.0  # times the best smoothed loss
_CLEAR = 5.0  # standard deviations of the smoothed loss's own noise that a fall must be larger than
_FEWEST = 20  # steps that a slope can be found among


def growing_rate(step: int, *, low: float, high: float, steps: int) -> float:
    """From `low` at step 1 to `high` at the last, by the same factor each step."""
    return float(low * (high / low) ** ((step - 1) / max(1, steps - 1)))


def smoothed(values: Sequence[float], keep: float = _KEEP) -> list[float]:
    """Exponential moving average; divided by the weights so far, so that it does not begin at zero."""
    average, found = 0.0, []
    for count, value in enumerate(values, start=1):
        average = keep * average + (1 - keep) * value
        found.append(average / (1 - keep**count))
    return found


def slopes(x: Sequence[float], y: Sequence[float], reach: int) -> NDArray[np.float64]:
    """Of the straight line through each point and `reach` neighbours on both sides, as far as there are any."""
    at, value = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    found = np.empty(len(at))
    for i in range(len(at)):
        near = slice(max(0, i - reach), i + reach + 1)
        away = at[near] - at[near].mean()
        found[i] = (away @ value[near]) / (away @ away)
    return found


class RangeTest:
    """Says the rate of each step, is told its loss, and in the end suggests a rate.

    The smoothed loss lags behind. It is set against the logarithm of the rate smoothed alike, which lags as much: else
    the suggestion would be several times too large.
    """

    def __init__(self, low: float = 1e-7, high: float = 1.0, steps: int = 100):
        if not 0 < low < high or not math.isfinite(high):
            raise InputError(f"a range test goes from a small learning rate to a larger one, not from {low} to {high}")
        if steps < _FEWEST:
            raise InputError(f"a range test needs at least {_FEWEST} steps to find a slope among, not {steps}")
        self.low, self.high, self.steps = low, high, steps
        self.rates: list[float] = []
        self.losses: list[float] = []

    def rate(self, step: int) -> float:
        """Steps count from 1."""
        return growing_rate(step, low=self.low, high=self.high, steps=self.steps)

    def add(self, step: int, loss: float) -> bool:
        """Takes a step's loss; False: enough was seen, or the loss has left for good."""
        if not math.isfinite(loss):
            return False
        self.rates.append(self.rate(step))
        self.losses.append(loss)
        curve = smoothed(self.losses)
        return step < self.steps and curve[-1] <= _DIVERGED * min(curve)

    def suggestion(self) -> float:
        """The rate at which the smoothed loss falls fastest over the logarithm of the rate, before it is lowest."""
        if len(self.losses) < _FEWEST:
            raise InputError(
                f"the loss left after {len(self.losses)} steps of growing learning rates; begin below {self.low:g}"
            )
        places, curve = smoothed(np.log(self.rates).tolist()), smoothed(self.losses)
        first = min(_FILLED, len(curve) // 4)  # before, the average is little but noise
        lowest = first + int(np.argmin(curve[first:]))
        if curve[first] - curve[lowest] <= _CLEAR * self._noise():
            seen = f"between {self.low:g} and {self.rates[-1]:g}"
            raise InputError(f"no learning rate {seen} made the loss fall clearly; try other bounds or more steps")
        falling = slopes(places, curve, reach=max(1, len(curve) // 20))[first : lowest + 1]
        return math.exp(places[first + int(np.argmin(falling))])

    def _noise(self) -> float:
        """Standard deviation of the smoothed loss where nothing is learnt, from how much neighbouring losses differ."""
        between = float(np.median(np.abs(np.diff(self.losses))))  # the median: a loss that leaves is no noise
        once = between / 0.6745 / math.sqrt(2)  # of normal differences half lie within 0.6745 standard deviations
        return once * math.sqrt((1 - _KEEP) / (1 + _KEEP))

    def tsv(self) -> str:
        """Step, rate, loss and smoothed loss, a line each."""
        rows = zip(self.rates, self.losses, smoothed(self.losses), strict=True)
        lines = [
            f"{step}\t{rate:.6g}\t{loss:.6g}\t{curve:.6g}" for step, (rate, loss, curve) in enumerate(rows, start=1)
        ]
        return "\n".join(["step\trate\tloss\tsmoothed", *lines]) + "\n"

    def plot(self, path: str | Path) -> None:
        """The curve as a PNG, with the suggested rate marked where there is one."""
        from matplotlib.figure import Figure

        if not self.losses:
            raise InputError(f"the loss was not finite at a learning rate of {self.low:g}; there is nothing to plot")
        curve = smoothed(self.losses)
        places = np.exp(smoothed(np.log(self.rates).tolist()))
        figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, ".", markersize=4, color="#b3c6e4", label="loss of a batch")
        axes.plot(places, curve, color="#2b3a5e", label="smoothed")
        axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
        floor, begun = min(self.losses), max(curve[: int(np.argmin(curve)) + 1])
        room = (begun - floor) / 2 or 1.0  # a loss that leaves goes out of the picture, else nothing else could be seen
        axes.set_ylim(floor - room / 3, begun + room)
        try:
            found = self.suggestion()
            axes.axvline(found, color="#c2482d", linestyle="--", label=f"falls fastest: {found:.2g}")
            title = f"Learning-rate range test: {found:.2g} suggested"
        except InputError:
            title = "Learning-rate range test: no clear fall, nothing suggested"
        axes.set_title(title, loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        write_bytes(Path(path), drawn.getvalue())
