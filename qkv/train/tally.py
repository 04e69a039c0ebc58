"""What a run tells: records, the log, and the sums between two records."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from qkv.errors import InputError
from qkv.files import write_text
from qkv.train.distributed import Ranks, total


@dataclass(frozen=True)
class Record:
    """What happened: kind is `train`, `valid` or `finish`."""

    kind: str
    step: int
    values: dict[str, float] = field(default_factory=dict)
    samples: tuple[str, ...] = ()  # what the model says


def log(path: Path, record: Record) -> None:
    """Adds a record to a JSON-lines file."""
    told = {"kind": record.kind, "step": record.step} | record.values
    if record.samples:
        told["samples"] = list(record.samples)  # type: ignore[assignment]
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(told, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}; free some space and run it again") from None


def forget_after(path: Path, step: int) -> None:
    """Drops what a killed run logged past its checkpoint."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_text(path, "".join(line for line in lines if _step(line) <= step))


def _step(line: str) -> float:
    """The step of a log line; what a kill cut short belongs to none."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


class Tally:
    """Losses, tokens and time since the last record; losses stay on the device so that no step waits for them."""

    def __init__(self, kinds: Sequence[str], device: torch.device):
        self.kinds = kinds
        self.sums = torch.zeros(len(kinds), device=device)
        self.targets = [0] * len(kinds)
        self.tokens = self.steps = 0
        self.seconds, self._since = 0.0, time.perf_counter()

    def add(self, totals: Tensor, targets: Sequence[int], tokens: int) -> None:
        """One step's losses [kinds], their targets, and its real tokens."""
        self.sums += totals
        self.targets = [had + more for had, more in zip(self.targets, targets, strict=True)]
        self.tokens += tokens
        self.steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is not training."""
        if self.sums.device.type == "cuda":
            torch.cuda.synchronize(self.sums.device)
        self.seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def check(self, step: int, ranks: Ranks) -> None:
        """A run that has diverged stops here, before anything good is overwritten."""
        if not bool(torch.isfinite(total(self.sums, ranks)).all()):
            said = f"the loss is not finite by step {step}, and nothing was saved"
            raise InputError(f"{said}; lower train.learning_rate or set train.clip, with another --output")

    def take(self, ranks: Ranks) -> tuple[dict[str, float], float]:
        """Means since the last time over all processes, and the seconds of training; while paused."""
        counts = total(torch.tensor(self.targets), ranks).clamp(min=1)
        means = dict(zip(self.kinds, (total(self.sums, ranks).double() / counts).tolist(), strict=True))
        seconds = self.seconds
        values = means | {"tokens_per_second": self.tokens / max(seconds, 1e-9)}
        self.sums.zero_()
        self.targets = [0] * len(self.kinds)
        self.tokens = self.steps = 0
        self.seconds = 0.0
        return values, seconds
