"""Atomic writing: a file is either complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from qkv.errors import InputError


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
