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
from qkv.files import atomic_write_text
from qkv.train.distributed.processes import DistributedInfo, all_reduce_sum


@dataclass(frozen=True)
class Record:
    """What happened: kind is `train`, `valid` or `final`."""

    kind: str
    step: int
    values: dict[str, float] = field(default_factory=dict)
    samples: tuple[str, ...] = ()  # what the model says


def append_record(path: Path, record: Record) -> None:
    """Adds a record to a JSON-lines file."""
    fields = {"kind": record.kind, "step": record.step} | record.values
    if record.samples:
        fields["samples"] = list(record.samples)  # type: ignore[assignment]
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}; free some space and run it again") from None


def truncate_log(path: Path, step: int) -> None:
    """Drops what a killed run logged past its checkpoint."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        atomic_write_text(path, "".join(line for line in lines if _step_of_line(line) <= step))


def _step_of_line(line: str) -> float:
    """The step of a log line; what a kill cut short belongs to none."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


class LossMeter:
    """Losses, tokens and time since the last record; losses stay on the device so that no step waits for them."""

    def __init__(self, loss_names: Sequence[str], device: torch.device):
        self.loss_names = loss_names
        self.loss_sums = torch.zeros(len(loss_names), device=device)
        self.target_counts = [0] * len(loss_names)
        self.tokens = self.steps = 0
        self.seconds, self._resumed_at = 0.0, time.perf_counter()

    def add(self, losses: Tensor, target_counts: Sequence[int], tokens: int) -> None:
        """One step's losses [kinds], their targets, and its real tokens."""
        self.loss_sums += losses
        self.target_counts = [old + new for old, new in zip(self.target_counts, target_counts, strict=True)]
        self.tokens += tokens
        self.steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is not training."""
        if self.loss_sums.device.type == "cuda":
            torch.cuda.synchronize(self.loss_sums.device)
        self.seconds += time.perf_counter() - self._resumed_at
        try:
            yield
        finally:
            self._resumed_at = time.perf_counter()

    def check_finite(self, step: int, dist_info: DistributedInfo) -> None:
        """A run that has diverged stops here, before anything good is overwritten."""
        if not bool(torch.isfinite(all_reduce_sum(self.loss_sums, dist_info)).all()):
            message = f"the loss is not finite by step {step}, and nothing was saved"
            raise InputError(f"{message}; lower train.learning_rate or set train.max_grad_norm, with another --output")

    def flush(self, dist_info: DistributedInfo) -> tuple[dict[str, float], float]:
        """Means since the last time over all processes, and the seconds of training; while paused."""
        counts = all_reduce_sum(torch.tensor(self.target_counts), dist_info).clamp(min=1)
        means = dict(zip(self.loss_names, (all_reduce_sum(self.loss_sums, dist_info).double() / counts).tolist(), strict=True))
        seconds = self.seconds
        values = means | {"tokens_per_second": self.tokens / max(seconds, 1e-9)}
        self.loss_sums.zero_()
        self.target_counts = [0] * len(self.loss_names)
        self.tokens = self.steps = 0
        self.seconds = 0.0
        return values, seconds
