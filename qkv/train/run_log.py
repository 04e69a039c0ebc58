"""The log of a run: records, the file they are appended to, and the sums between two records."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.errors import InputError
from qkv.files import atomic_write_text, parse_json
from qkv.train.distributed.processes import DistributedInfo, all_reduce_sum

LOG = "log.jsonl"
_DISPLAY_NAMES = {
    "token_error_rate": "token error rate",
    "sequence_error_rate": "sequence error rate",
    "next_sentence_loss": "next-sentence loss",
}
_PERCENT_METRICS = ("token_error_rate", "sequence_error_rate", "accuracy")


@dataclass(frozen=True)
class Record:
    """An event of a run."""

    kind: str
    """`note` (about the data), `resume`, `train`, `valid` or `final`."""
    step: int
    """Number of optimizer steps so far."""
    values: dict[str, float] = field(default_factory=dict)
    """Losses, metrics, speed and times."""
    samples: tuple[str, ...] = ()
    """Lines of text: notes, or outputs of the model for validation inputs."""


def format_metric(name: str, value: float) -> str:
    """Return a metric for the user: its name and its value; "undefined" for nan, as a correlation with a constant."""
    display_name = _DISPLAY_NAMES.get(name, name)
    if math.isnan(value):
        return f"{display_name} undefined"
    number = f"{100 * value:.2f} %" if name in _PERCENT_METRICS else f"{value:,.4g}"
    return f"{display_name} {number}"


def append_record(path: Path, record: Record) -> None:
    """Append a record to a JSON-lines file."""
    fields: dict[str, Any] = {"kind": record.kind, "step": record.step} | record.values
    if record.samples:
        fields["samples"] = list(record.samples)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}; free some space and run it again") from None


def truncate_log(path: Path, step: int) -> None:
    """Drop the records after the step of a checkpoint, which a killed run logged; all of them without a checkpoint.

    A run that is resumed at a step several times announces it once.
    """
    if path.exists() and not path.is_file():  # writing to a pipe would wait for a reader
        raise InputError(f"{path}: is not a regular file; remove it")
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if step else []
    records = ((line, parse_record(line)) for line in lines)
    kept_lines = [line for line, record in records if record is not None and _precedes(record, step)]
    atomic_write_text(path, "".join(kept_lines))


def _precedes(record: dict[str, Any], step: int) -> bool:
    return bool(record["step"] < step or (record["step"] == step and record["kind"] != "resume"))


def parse_record(line: str) -> dict[str, Any] | None:
    """Return the values of a line of a log; None for a damaged line, such as one that was cut off by a kill."""
    try:
        record = parse_json(line, LOG, allow_nan=True) if line.endswith("\n") else None
    except InputError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    return record if isinstance(record.get("step"), int) else None


class LossMeter:
    """Sums of losses, tokens and time since the last record; losses stay on the device, so that no step waits."""

    def __init__(self, loss_names: Sequence[str], device: torch.device) -> None:
        self.loss_names = loss_names
        self.loss_sums = torch.zeros(len(loss_names), device=device)
        self.target_counts = [0] * len(loss_names)
        self.tokens = self.steps = 0
        self.seconds, self._resumed_at = 0.0, time.perf_counter()

    def add(self, losses: Tensor, target_counts: Sequence[int], tokens: int) -> None:
        """Add the loss sums of a step [losses], their numbers of targets, and its tokens."""
        self.loss_sums += losses
        self.target_counts = [old + new for old, new in zip(self.target_counts, target_counts, strict=True)]
        self.tokens += tokens
        self.steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the block from the training time."""
        if self.loss_sums.device.type == "cuda":
            torch.cuda.synchronize(self.loss_sums.device)
        self.seconds += time.perf_counter() - self._resumed_at
        try:
            yield
        finally:
            self._resumed_at = time.perf_counter()

    def check_finite(self, step: int, dist_info: DistributedInfo) -> None:
        """Stop a diverged run before it overwrites its checkpoint."""
        if not bool(torch.isfinite(all_reduce_sum(self.loss_sums, dist_info)).all()):
            message = f"the loss is not finite by step {step}, and nothing was saved"
            raise InputError(f"{message}; lower train.learning_rate or set train.max_grad_norm, with another --output")

    def flush(self, dist_info: DistributedInfo) -> tuple[dict[str, float], float]:
        """Return means over all processes and training seconds since the last call; to be called while paused."""
        counts = all_reduce_sum(torch.tensor(self.target_counts), dist_info).clamp(min=1)
        means = (all_reduce_sum(self.loss_sums, dist_info).double() / counts).tolist()
        seconds = self.seconds
        values = dict(zip(self.loss_names, means, strict=True)) | {
            "tokens_per_second": self.tokens / max(seconds, 1e-9)
        }
        self.loss_sums.zero_()
        self.target_counts = [0] * len(self.loss_names)
        self.tokens = self.steps = 0
        self.seconds = 0.0
        return values, seconds
