"""A run as people watch it: a bar in the terminal, plain lines elsewhere, TensorBoard on request."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from qkv.errors import InputError
from qkv.evaluate.report import main_figures
from qkv.train.tally import Record

_NAMES = {"per": "token error rate", "wer": "sequence error rate", "next_sentence_loss": "next-sentence loss"}
_SHARES = ("per", "wer", "accuracy")
_TIMES = ("seconds", "seconds_left")


def line(record: Record) -> str:
    """A record in words."""
    v = record.values
    if record.kind == "note":
        return "\n".join(record.samples)
    if record.kind == "train":
        speed = f"{v['tokens_per_second']:,.0f} tokens/s ({v['share']:.0%} of the matrix peak)"
        return f"step {record.step}: loss {v['loss']:.4f}, {speed}, {duration(v['seconds_left'])} left"
    if record.kind == "valid":
        shown = main_figures([name for name in v if name not in _TIMES])
        scores = [f"{_NAMES.get(name, name)} {_number(name, v[name])}" for name in shown]
        return "\n  ".join([f"step {record.step}: held-out {', '.join(scores)}", *record.samples])
    kept = f"the mean of the last {v['averaged']:.0f} checkpoints" if v["averaged"] else f"step {v['best_step']:.0f}"
    return f"finished at step {record.step} after {duration(v['seconds'])} of training; kept {kept}"


def _number(name: str, value: float) -> str:
    return f"{value:.2%}" if name in _SHARES else f"{value:,.4g}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _speaks() -> bool:
    """Of several processes only the first one does; torchrun tells each its number."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    if _speaks():
        print(text, flush=True)


def show(records: Iterable[Record], steps: int | None) -> bool:
    """Draws the records; False where there were none. Who does not know the steps is told by a note."""
    if not _speaks() or not sys.stderr.isatty():
        seen = False
        for record in records:
            seen = True
            if line(record):
                say(line(record))
        return seen
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s "),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]} left"),  # the run's own estimate, which knows of validations and checkpoints
    )
    iterator = iter(records)
    with console.status("reading the data"):
        first = next(iterator, None)
    if first is None:
        return False
    with Progress(*columns, console=console) as bar:
        total = steps or first.values.get("steps", 1)
        task = bar.add_task("", total=total, loss=float("nan"), speed=0, left="?")
        for record in itertools.chain([first], iterator):
            v = record.values
            if record.kind == "train":
                told = {"loss": v["loss"], "speed": v["tokens_per_second"], "left": duration(v["seconds_left"])}
                bar.update(task, completed=record.step, **told)
            elif line(record):
                bar.console.print(line(record), highlight=False, markup=False)
    return True


def events(records: Iterable[Record], folder: Path) -> Iterator[Record]:
    """Passes records on and writes them as TensorBoard events beside the run."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs the package: pip install 'qkv[tensorboard]'") from None
    writer = None
    if not _speaks():
        yield from records
        return
    for record in records:
        writer = writer or SummaryWriter(str(folder / "tensorboard"))  # not before the run has claimed its folder
        for name, value in record.values.items():
            writer.add_scalar(f"{record.kind}/{name}", value, record.step)
        writer.flush()
        yield record
    if writer is not None:
        writer.close()
