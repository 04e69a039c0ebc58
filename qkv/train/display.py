"""Display a run: a progress bar in a terminal, plain lines elsewhere, TensorBoard events on request."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkv.errors import InputError
from qkv.reports.report import headline_metrics
from qkv.train.interruption import TrainingInterrupted
from qkv.train.run_log import Record, format_metric

_TIME_KEYS = ("seconds", "eta_seconds")


def format_record(record: Record) -> str:
    """Return a record as text; "" if there is nothing to show."""
    values = record.values
    if record.kind in ("note", "resume"):
        return "\n".join(record.samples)
    if record.kind == "train":
        mfu = f" (MFU {100 * values['mfu']:.0f} %)" if "mfu" in values else ""
        speed = f"{values['tokens_per_second']:,.0f} tokens/s{mfu}"
        return f"step {record.step}: loss {values['loss']:.4f}, {speed}, {format_duration(values['eta_seconds'])} left"
    if record.kind == "valid":
        names = headline_metrics([name for name in values if name not in _TIME_KEYS])
        scores = [format_metric(name, values[name]) for name in names]
        return "\n  ".join([f"step {record.step}: held-out {', '.join(scores)}", *record.samples])
    return _format_final(record)


def _format_final(record: Record) -> str:
    """Return the reason why a run ended, and which weights were saved."""
    values, (metric, value) = record.values, next(iter(record.values.items()))
    count = values.get("validations_since_best", 0)
    end = f"finished at step {record.step} after {format_duration(values['seconds'])} of training"
    if count:
        validations = f"{count:.0f} validation{'s' if count > 1 else ''}"
        end = f"stopped early at step {record.step}: no improvement for {validations}"
    elif record.step < values["max_steps"]:
        end = f"stopped by a callback at step {record.step}"
    weights = f"step {values['best_step']:.0f}" if "best_step" in values else ""
    if values["num_averaged_checkpoints"]:
        weights = f"the mean of the last {values['num_averaged_checkpoints']:.0f} checkpoints"
    return f"{end}; saved {weights}, {format_metric(metric, value)}"


def format_duration(seconds: float) -> str:
    """Return a duration as hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def is_main_rank() -> bool:
    """Return whether this is the first or only process; torchrun sets RANK."""
    return os.environ.get("RANK", "0") == "0"


def print_on_main(text: str) -> None:
    """Print in the main process only."""
    if is_main_rank():
        print(text, flush=True)


def display(records: Iterable[Record], steps: int | None) -> bool:
    """Show the records of a run as they come; return False if there were none.

    Args:
        records: the records of `qkv.fit`.
        steps: number of steps of the run; None: as in the first record, a note.
    """
    if not is_main_rank() or not sys.stderr.isatty():
        return _display_lines(records, overwrite=_in_notebook())
    return _display_progress_bar(records, steps)


def _display_lines(records: Iterable[Record], overwrite: bool) -> bool:
    """Print one line per record; with `overwrite`, training records share one line, which a notebook updates."""
    any_records, width = False, 0  # characters of the line that will be overwritten
    for record in records:
        any_records, text = True, format_record(record)
        is_temporary = overwrite and record.kind == "train"
        if text and is_main_rank():
            print(f"\r{text:<{width}}" if width else text, end="" if is_temporary else "\n", flush=True)
            width = len(text) if is_temporary else 0
    return any_records


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def _display_progress_bar(records: Iterable[Record], steps: int | None) -> bool:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s "),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]} left"),  # the run's own estimate, which includes validations and checkpoints
    )
    iterator = iter(records)
    with console.status("reading the data"):
        first_record = next(iterator, None)
    if first_record is None:
        return False
    with Progress(*columns, console=console) as bar:
        total = steps or first_record.values.get("max_steps", 1)
        task = bar.add_task("", total=total, completed=first_record.step, loss=float("nan"), speed=0, left="?")
        for record in itertools.chain([first_record], iterator):
            if record.kind == "train":
                values = record.values
                fields: dict[str, Any] = {"loss": values["loss"], "speed": values["tokens_per_second"]}
                fields["left"] = format_duration(values["eta_seconds"])
                bar.update(task, completed=record.step, **fields)
            elif format_record(record):
                bar.console.print(format_record(record), highlight=False, markup=False)
    return True


@contextmanager
def exit_if_interrupted() -> Iterator[None]:
    """End the program with one line and the exit code of the signal if a run is interrupted inside the block."""
    try:
        yield
    except TrainingInterrupted as error:
        if is_main_rank():
            print(f"qkv: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def log_tensorboard(records: Iterable[Record], folder: Path) -> Iterator[Record]:
    """Pass records on and write their values as TensorBoard events to the run folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs the package: pip install 'qkv[tensorboard]'") from None
    writer: Any = None
    if not is_main_rank():
        yield from records
        return
    for record in records:
        writer = writer or SummaryWriter(str(folder / "tensorboard"))  # only after the run has locked its folder
        for name, value in record.values.items():
            writer.add_scalar(f"{record.kind}/{name}", value, record.step)
        writer.flush()
        yield record
    if writer is not None:
        writer.close()
