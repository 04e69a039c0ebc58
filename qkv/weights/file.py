"""Tensors in safetensors files."""

from __future__ import annotations

import os
import pickle
import shutil
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
        rights = beside.stat().st_mode
        # the library writes under a random name first, which a kill leaves behind: in a folder that the next try clears
        own = beside.with_name(f"{beside.name}s")
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        try:
            save_file(plain, str(own / path.name), metadata=dict(notes or {}))
            os.replace(own / path.name, beside)
            beside.chmod(rights)
        except SafetensorError as error:  # it wraps what the system said
            raise OSError(str(error)) from None
        finally:
            shutil.rmtree(own, ignore_errors=True)

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


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of an old `.bin`; one that holds anything but tensors is refused, for it could run code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # files from before torch 1.6 cannot be mapped
        found = _unmapped(path)
    except (pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise _refused(path, error) from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"{path}: holds more than named tensors; convert it to safetensors where it came from")
    return found


def _unmapped(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, OSError, ValueError, RuntimeError) as error:
        raise _refused(path, error) from None


def _refused(path: Path, error: Exception) -> InputError:
    if isinstance(error, pickle.UnpicklingError):
        return InputError(f"{path}: not loaded: a pickle that holds more than tensors can run code; use safetensors")
    return InputError(f"{path}: damaged, or no torch file; restore it from where the checkpoint came from")


def average(paths: list[Path]) -> dict[str, Tensor]:
    """The mean of several checkpoints of one model (Vaswani et al. 2017, 6.1)."""
    total: dict[str, Tensor] = {}
    for path in paths:
        tensors, _ = load_tensors(path)
        for name, tensor in tensors.items():
            total[name] = tensor.double() + total[name] if name in total else tensor.double()
    return {name: (tensor / len(paths)).to(torch.float32) for name, tensor in total.items()}
