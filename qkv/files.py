"""Open, read and write files: every failure is one line with the path, and a written file is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from qkv.errors import InputError
from qkv.json_reader import decode_utf8, parse_json
from qkv.limits import limit, raise_hint

__all__ = [
    "atomic_write",
    "atomic_write_bytes",
    "atomic_write_text",
    "open_file",
    "os_error",
    "parse_json",
    "parse_yaml",
    "read_file",
    "read_json",
    "read_text_file",
    "read_yaml",
]

_FIFO_SECONDS = 5  # how long a named pipe may stay without a writer
_MAX_PATH_CHARS = 200


def os_error(path: Path | str, error: OSError | ValueError) -> InputError:
    """Return the one-line error for a file that the operating system does not open, read or write."""
    name = _printable_path(path)
    if isinstance(error, FileNotFoundError):
        return InputError(f"{name}: no such file or folder; check the path")
    if isinstance(error, PermissionError):
        return InputError(f"{name}: no permission to open it; change its permissions or choose another path")
    if isinstance(error, IsADirectoryError):
        return InputError(f"{name}: is a folder; give a file")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InputError(f"{name}: cannot be opened or read: {reason[:1].lower()}{reason[1:]}; choose another path")


def open_file(path: Path | str) -> BinaryIO:
    """Open a regular file, a pipe or a terminal for reading; anything else, such as /dev/zero, is refused.

    A named pipe must have a writer within a few seconds.
    """
    try:
        # without O_NONBLOCK, opening a named pipe waits for a writer, perhaps forever
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise os_error(path, error) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise InputError(f"{_printable_path(path)}: is a folder; give a file")
        if stat.S_ISFIFO(mode) and not _has_writer(path, descriptor):
            raise InputError(f"{_printable_path(path)}: a named pipe that nobody writes to; start its writer first")
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not _is_harmless_device(descriptor)):
            raise InputError(f"{_printable_path(path)}: is a device; give a file or a pipe")
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        os.close(descriptor)
        raise os_error(path, error) from None
    except InputError:
        os.close(descriptor)
        raise


def _has_writer(path: Path | str, descriptor: int) -> bool:
    """Tell whether something writes to a pipe; one without a name, such as a process substitution, has always had one.

    The pipe is open without blocking: reading fails if a writer has nothing to say yet, and is empty without a writer.
    """
    has_name = os.path.exists(os.path.realpath(path))
    if not has_name or select.select([descriptor], [], [], _FIFO_SECONDS)[0]:
        return True
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return True


def _is_harmless_device(descriptor: int) -> bool:
    """Tell whether a character device is a terminal or /dev/null, which do not produce endless bytes."""
    return os.isatty(descriptor) or os.fstat(descriptor).st_rdev == os.stat(os.devnull).st_rdev


def read_file(path: Path | str, limit_name: str = "config_bytes") -> bytes:
    """Return the content of a file of at most so many bytes as a limit of `qkv.limits` allows."""
    max_bytes = limit(limit_name)
    with open_file(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            content = file.read(max_bytes + 1) if size <= max_bytes else b""
        except OSError as error:
            raise os_error(path, error) from None
    if size > max_bytes or len(content) > max_bytes:
        raise InputError(f"{_printable_path(path)}: the file has too many bytes; {raise_hint(limit_name)}")
    return content


def read_text_file(path: Path | str, max_bytes_limit: str = "config_bytes") -> str:
    """Return the text of a UTF-8 file; a byte order mark is removed."""
    return decode_utf8(read_file(path, max_bytes_limit), _printable_path(path))


def read_json(path: Path | str, limit_name: str = "config_bytes") -> Any:
    """Return the value of a JSON file."""
    return parse_json(read_file(path, limit_name), _printable_path(path))


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text; `where` is what the error message starts with."""
    from qkv import yaml_reader  # most commands read no YAML

    return yaml_reader.parse_yaml(text, where)


def read_yaml(path: Path | str, limit_name: str = "recipe_bytes") -> Any:
    """Return the value of a YAML file."""
    return parse_yaml(read_text_file(path, limit_name), _printable_path(path))


def _printable_path(path: Path | str) -> str:
    """Return a path for an error message; a very long one is cut in the middle."""
    name = str(path).encode("utf-8", "replace").decode().replace("\0", "\\0")
    if len(name) <= _MAX_PATH_CHARS:
        return name
    return f"{name[: _MAX_PATH_CHARS // 2]}…{name[-_MAX_PATH_CHARS // 2 :]}"


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary path and rename the result, so that a failure leaves an earlier file unchanged."""
    tmp_path = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path)
        with open(tmp_path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(tmp_path, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            tmp_path.unlink()
        intact_note = "; the earlier file is intact" if path.is_file() else ""
        reason = error.strerror or str(error)
        space_hint = "free some space or " if error.errno in (None, errno.ENOSPC, errno.EDQUOT) else ""
        raise InputError(f"{path}: cannot be saved: {reason}{intact_note}; {space_hint}choose another folder") from None
    except BaseException:
        with contextlib.suppress(OSError):
            tmp_path.unlink()
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, atomically."""
    atomic_write(path, lambda tmp_path: _write(tmp_path, text.encode()))


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file, atomically."""
    atomic_write(path, lambda tmp_path: _write(tmp_path, content))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
