"""Tensors in safetensors files, and files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qkv.errors import InputError


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Writes beside and renames: a kill or a full disk leaves the earlier file as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        kept = "; the earlier file is intact" if path.exists() else ""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path}: cannot be saved: {reason}{kept}; free some space or choose another folder") from None
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    def write(beside: Path) -> None:
        beside.write_text(text, encoding="utf-8")

    write_whole(path, write)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Named tensors and short notes in one safetensors file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, lambda beside: save_file(plain, str(beside), metadata=dict(notes or {})))


def load_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]]:
    """The inverse of `save_tensors`; a missing, damaged or foreign file is refused by name."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; train a model there first, or check the path")
    try:
        with safe_open(str(path), framework="pt", device=device) as file:
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
