"""Read the tensors of pickled checkpoints (`.bin`): no code is executed, and no stated size is trusted."""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.errors import InputError, quote
from qkv.files import os_error, read_file

# opcodes of a pickled list of strings, in all protocols
STRING_OPCODES = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
PUT_OPCODES, GET_OPCODES = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
_LIST_OPCODES = ("PROTO", "FRAME", "EMPTY_LIST", "LIST", "MARK", "APPEND", "APPENDS", "STOP")
_MAX_TIED_COPIES = 8  # names of one tensor: the embedding of a BART has four


def load_pickle(path: Path, *, key: str | None = None) -> dict[str, Tensor]:
    """Read the tensors of a `.bin` file; one that holds anything but tensors is refused, since it could run code.

    Args:
        path: the file.
        key: the name under which the tensors may be, beside others such as the state of an optimizer.
    """
    try:
        file_size = path.stat().st_size
        is_archive = zipfile.is_zipfile(path)
    except OSError as error:
        raise os_error(path, error) from None
    except zipfile.BadZipFile as error:  # of an archive that claims to span several disks
        raise _damaged(path, error) from None
    if is_archive:
        _check_archive(path, file_size)
    state_dict = _load(path, mmap=is_archive)  # files from before torch 1.6 are no archives and cannot be mapped
    if key is not None and isinstance(state_dict, dict) and isinstance(state_dict.get(key), dict):
        state_dict = state_dict[key]
    if not isinstance(state_dict, dict) or not all(isinstance(value, Tensor) for value in state_dict.values()):
        raise InputError(f"{path}: holds more than named tensors; convert it to safetensors where it came from")
    for name, tensor in state_dict.items():
        if not isinstance(name, str):
            raise InputError(f"{path}: {quote(name)} is no name of a tensor; convert it to safetensors")
        _check_tensor(tensor, f"{path}: {quote(name)}")
    if sum(tensor.numel() * tensor.element_size() for tensor in state_dict.values()) > _MAX_TIED_COPIES * file_size:
        raise InputError(f"{path}: its tensors are larger than the file; restore it from where it came from")
    return _unshare(state_dict)


def _unshare(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with an earlier one: parameters of ours that are equal need not be tied."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in state_dict.items():
        address = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if address in seen and address else tensor
        seen.add(address)
    return separate


def load_string_list(path: Path) -> list[str]:
    """Read a pickled list of strings without unpickling it: its opcodes are read, and none but those of such a list."""
    content, strings, num_lists = read_file(path), [], 0
    memo: dict[Any, str | None] = {}
    last_string: str | None = None
    try:
        for opcode, argument, _ in pickletools.genops(content):
            num_lists += opcode.name in ("EMPTY_LIST", "LIST")
            if opcode.name in STRING_OPCODES:
                last_string = str(argument)
                strings.append(last_string)
            elif opcode.name in PUT_OPCODES:
                memo[len(memo) if argument is None else argument] = last_string
            elif opcode.name in GET_OPCODES and memo.get(argument) is not None:
                strings.append(str(memo[argument]))
            elif opcode.name not in _LIST_OPCODES or num_lists > 1:
                raise InputError(f"{path}: holds more than a list of words; it was not loaded")
    except InputError:
        raise
    except Exception as error:  # a damaged pickle raises many types
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise InputError(f"{path}: damaged, or no pickled list of words ({quote(reason)}); restore it") from None
    return strings


def _check_archive(path: Path, file_size: int) -> None:
    """Refuse an archive that unpacks to more bytes than it has: torch stores its entries as they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked_size = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # a damaged archive raises many types
        raise _damaged(path, error) from None
    if unpacked_size > file_size:
        raise InputError(
            f"{path}: unpacks to {unpacked_size:,} bytes, more than torch saves in {file_size:,}; not loaded"
        )


def _load(path: Path, *, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "GLOBAL" in str(error):
            reason = "a pickle that holds more than tensors can run code; use safetensors"
            raise InputError(f"{path}: not loaded: {reason}") from None
        raise _damaged(path, error) from None
    except (Exception, RecursionError, MemoryError) as error:  # a changed pickle can raise anything
        raise _damaged(path, error) from None


def _damaged(path: Path, error: BaseException) -> InputError:
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    return InputError(
        f"{path}: damaged, or no torch file ({quote(reason)}); restore it from where the checkpoint came from"
    )


def _check_tensor(tensor: Tensor, location: str) -> None:
    """Refuse a tensor that is not plain: dense numbers in memory, as many as its shape states."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise InputError(f"{location} is not a dense tensor of numbers; convert it to safetensors where it came from")
    if tensor.is_complex():
        raise InputError(f"{location} holds complex numbers; qkv reads weights in floating point only")
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes > tensor.untyped_storage().nbytes():
        shape, stored = list(tensor.shape), tensor.untyped_storage().nbytes()
        raise InputError(f"{location} has shape {shape}, and the file only {stored:,} bytes of it")
