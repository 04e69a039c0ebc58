"""Search spaces of `qkv sweep`: which values each recipe key may take.

train.learning_rate=1e-5..1e-3:log      a float, on a logarithmic scale
train.warmup_ratio=0..0.2               a float
train.epochs=2..10                      a whole number
train.batch_tokens=1024..8192:step=1024 a whole number, in steps
finetune.pooling=first,mean             one of several values
train.schedule=linear                   a fixed value: an ordinary override
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qkv.errors import InputError
from qkv.files import parse_yaml

_RANGE = re.compile(r"(?P<low>[^:,]+?)\.\.(?P<high>[^:,]+?)(?P<options>(:[^:]*)*)")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    key: str
    """Recipe key, such as train.learning_rate."""
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    log: bool = False
    """Draw on a logarithmic scale."""
    step: float | None = None
    """Distance between two values; None: any value, for whole numbers 1."""

    @property
    def is_integer(self) -> bool:
        """True if only whole numbers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int) and isinstance(self.step, int | None)


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    key: str
    """Recipe key."""
    values: tuple[Any, ...]
    """The values, as YAML reads them."""


Dimension = Range | Choice


@dataclass(frozen=True)
class SearchSpace:
    """The keys that a sweep varies, and those that it sets once."""

    dimensions: tuple[Dimension, ...]
    """Keys with several values."""
    overrides: tuple[str, ...]
    """`key=value` for all trials."""


def parse_search_space(arguments: Iterable[str]) -> SearchSpace:
    """Parse `key=low..high[:log|:step=N]`, `key=a,b,c` and `key=value`."""
    dimensions: list[Dimension] = []
    overrides: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key or not value:
            raise InputError(f"'{argument[:60]}': give key=low..high, key=a,b,c or key=value")
        dimension = _parse_dimension(key, value, argument)
        if dimension is None:
            overrides.append(argument)
        else:
            dimensions.append(dimension)
    keys = [dimension.key for dimension in dimensions] + [override.partition("=")[0] for override in overrides]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise InputError(f"{repeated} is set twice; set it once")
    if not dimensions:
        raise InputError("nothing to search; give a range or choices, such as train.learning_rate=1e-5..1e-3:log")
    return SearchSpace(tuple(dimensions), tuple(overrides))


def _parse_dimension(key: str, value: str, argument: str) -> Dimension | None:
    range_match = _RANGE.fullmatch(value)
    if range_match is not None:
        low, high = (_parse_number(range_match[bound], argument) for bound in ("low", "high"))
        return _make_range(key, low, high, range_match["options"], argument)
    if "," not in value or value.startswith(("[", "{", '"', "'")):
        return None
    values = tuple(parse_yaml(item, argument[:60]) for item in value.split(","))
    if len({repr(item) for item in values}) < len(values):
        raise InputError(f"'{argument[:60]}': a value occurs twice; give each once")
    return Choice(key, values)


def _make_range(key: str, low: float, high: float, options: str, argument: str) -> Range:
    log, step = False, None
    for option in options.split(":")[1:]:
        name, _, value = option.partition("=")
        if option == "log":
            log = True
        elif name == "step" and value:
            step = _parse_number(value, argument)
        else:
            raise InputError(f"'{argument[:60]}': a range ends in :log or :step=N, not ':{option[:20]}'")
    if not low < high:
        raise InputError(f"'{argument[:60]}': the range is empty; the first number must be the smaller one")
    if log and (low <= 0 or step is not None):
        raise InputError(f"'{argument[:60]}': a logarithmic range starts above 0 and has no step")
    if step is not None and not 0 < step <= high - low:
        raise InputError(f"'{argument[:60]}': the step must be above 0 and fit into the range")
    return Range(key, low, high, log, step)


def _parse_number(text: str, argument: str) -> float:
    try:
        number = int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"'{argument[:60]}': '{text[:20]}' is not a number")
    return number
