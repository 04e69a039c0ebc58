"""What the commands share: their options, and how a folder, a device and a choice are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.errors import InputError

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A trained run's folder.")]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run, a checkpoint folder, or a name in the Hugging Face cache.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]
Beams = Annotated[int, typer.Option(help="Beam width; 1 is greedy.")]
Penalty = Annotated[float, typer.Option(help="Beams are ranked by log-probability / length^penalty.")]
Limit = Annotated[int | None, typer.Option(help="Longest output in tokens; by default twice the input and 16 more.")]
TooLong = Annotated[str, typer.Option(help="An input over the model's length: refuse or truncate.")]
Unknown = Annotated[str, typer.Option(help="A token that was never seen in training: refuse or replace.")]


def one_of(option: str, value: str, *known: str) -> Any:
    if value not in known:
        raise InputError(f"{option} is {' or '.join(known)}, not '{value}'")
    return value


def check_device(device: str | None) -> None:
    import torch

    if device is None:
        return
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"--device is cpu or cuda, not '{device}'")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no GPU that torch can use; leave the option out")


def load_model(run: str | Path, device: str | None) -> Any:
    import torch

    from qkv.weights import load

    check_device(device)
    return load(run, device or ("cuda" if torch.cuda.is_available() else "cpu"))
