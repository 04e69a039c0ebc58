"""Tensors in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qkv.errors import InputError
from qkv.files import write_whole


def save_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Named tensors and short notes in one safetensors file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(beside: Path) -> None:
        beside.touch()  # so that the file has the rights that the user gives new files
        try:
            save_file(plain, str(beside), metadata=dict(notes or {}))
        except SafetensorError as error:  # it wraps what the system said
            raise OSError(str(error)) from None

    write_whole(path, write)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The inverse of `save_tensors`; a missing, damaged or foreign file is refused by name."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; train a model there first, or check the path")
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"{path}: damaged, or not a safetensors file ({str(error).splitlines()[0]}); "
            "restore it from a copy, or remove it and train again"
        ) from None


def average(paths: list[Path]) -> dict[str, Tensor]:
    """The mean of several checkpoints of one model (Vaswani et al. 2017, 6.1)."""
    total: dict[str, Tensor] = {}
    for path in paths:
        tensors, _ = load_tensors(path)
        for name, tensor in tensors.items():
            total[name] = tensor.double() + total[name] if name in total else tensor.double()
    return {name: (tensor / len(paths)).to(torch.float32) for name, tensor in total.items()}
