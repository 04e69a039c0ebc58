"""The device that a caller names: "cpu", "cuda", "cuda:1", "mps" or a torch.device."""

from __future__ import annotations

import torch

from qkv.errors import InputError, check_type, quote

_TYPES = ("cpu", "cuda", "mps")


def find_device(device: str | torch.device | None, name: str = "device") -> torch.device:
    """Return a device that this machine has; None: the GPU if there is one, else the CPU.

    Args:
        device: the name of a device, or a torch.device.
        name: the option in error messages.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_type(device, (str, torch.device), name, 'a device such as "cpu" or "cuda"')
    kind, separator, number = str(device).partition(":")
    if kind not in _TYPES or (separator and not (number.isascii() and number.isdigit() and len(number) < 4)):
        raise InputError(f"{name}: must be cpu, cuda, cuda:NUMBER or mps, not {quote(str(device))}")
    index = int(number or 0)
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if index >= counts[kind]:
        available = "no GPU that torch can use" if not counts[kind] else f"{counts[kind]} device of this kind"
        raise InputError(f"{name} {device}: this machine has {available}; leave it out, or choose another")
    return torch.device(str(device))
