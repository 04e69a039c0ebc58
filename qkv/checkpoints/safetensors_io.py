"""Read and write tensors in safetensors files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qkv.errors import InputError
from qkv.files import atomic_write, os_error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors and string metadata to a safetensors file."""
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(tmp_path: Path) -> None:
        tmp_path.touch()  # the file gets the permissions of the user's new files
        mode = tmp_path.stat().st_mode
        # safetensors writes to a random name first; a kill would leave it there, so it gets a folder that is cleared
        tmp_folder = tmp_path.with_name(f"{tmp_path.name}s")
        shutil.rmtree(tmp_folder, ignore_errors=True)
        tmp_folder.mkdir()
        try:
            save_file(cpu_tensors, str(tmp_folder / path.name), metadata=dict(metadata or {}))
            os.replace(tmp_folder / path.name, tmp_path)
            tmp_path.chmod(mode)
        except SafetensorError as error:  # it wraps the operating system's error
            raise OSError(str(error)) from None
        finally:
            shutil.rmtree(tmp_folder, ignore_errors=True)

    atomic_write(path, write)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and metadata of a safetensors file; a missing or damaged one is refused by name."""
    try:
        is_file = path.is_file()
    except OSError as error:
        raise os_error(path, error) from None
    if not is_file:
        raise InputError(f"{path}: no such file; train a model there first, or check the path")
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except PermissionError as error:
        raise os_error(path, error) from None
    except Exception as error:  # besides its own error, that of a number format that torch does not have
        raise InputError(
            f"{path}: damaged, or not a safetensors file ({str(error)[:200].splitlines()[0]}); "
            "restore it from a copy, or remove it and train again"
        ) from None


def average_checkpoints(paths: list[Path]) -> dict[str, Tensor]:
    """Return the mean of several checkpoints of one model (Vaswani et al. 2017, 6.1)."""
    total: dict[str, Tensor] = {}
    for path in paths:
        tensors, _ = load_tensors(path)
        for name, tensor in tensors.items():
            total[name] = tensor.double() + total[name] if name in total else tensor.double()
    return {name: (tensor / len(paths)).to(torch.float32) for name, tensor in total.items()}
