"""A run as people watch it: a bar in the terminal, plain lines elsewhere, TensorBoard on request."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from qkv.errors import InputError
from qkv.train.fit import Record


def line(record: Record) -> str:
    """A record in words."""
    v = record.values
    if record.kind == "train":
        return f"step {record.step}: loss {v['loss']:.4f}, {v['tokens_per_second']:,.0f} tokens/s"
    if record.kind == "valid":
        return f"step {record.step}: held-out token error rate {v['per']:.2%}, sequence error rate {v['wer']:.2%}"
    kept = f"the mean of the last {v['averaged']:.0f} checkpoints" if v["averaged"] else f"step {v['best_step']:.0f}"
    return f"finished at step {record.step} after {v['seconds']:.0f} s of training; kept {kept}"


def show(records: Iterable[Record], steps: int) -> bool:
    """Draws the records; False where there were none."""
    if not sys.stderr.isatty():
        seen = False
        for record in records:
            seen = True
            print(line(record), flush=True)
        return seen
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s "),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    iterator = iter(records)
    with console.status("reading the data"):
        first = next(iterator, None)
    if first is None:
        return False
    with Progress(*columns, console=console, speed_estimate_period=120) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"), speed=0)
        for record in itertools.chain([first], iterator):
            if record.kind == "train":
                loss, speed = record.values["loss"], record.values["tokens_per_second"]
                bar.update(task, completed=record.step, loss=loss, speed=speed)
            else:
                bar.console.print(line(record), highlight=False)
    return True


def events(records: Iterable[Record], folder: Path) -> Iterator[Record]:
    """Passes records on and writes them as TensorBoard events beside the run."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs the package: pip install 'qkv[tensorboard]'") from None
    writer = None
    for record in records:
        writer = writer or SummaryWriter(str(folder / "tensorboard"))  # not before the run has claimed its folder
        for name, value in record.values.items():
            writer.add_scalar(f"{record.kind}/{name}", value, record.step)
        writer.flush()
        yield record
    if writer is not None:
        writer.close()
