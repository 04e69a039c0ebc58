"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from qkv.errors import InputError


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Writes beside and renames: a kill or a full disk leaves the earlier file as it was."""
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        kept = "; the earlier file is intact" if path.is_file() else ""
        reason = error.strerror or str(error)
        full = "free some space or " if error.errno in (None, errno.ENOSPC, errno.EDQUOT) else ""
        raise InputError(f"{path}: cannot be saved: {reason}{kept}; {full}choose another folder") from None
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda beside: _put(beside, text.encode()))


def write_bytes(path: Path, content: bytes) -> None:
    write_whole(path, lambda beside: _put(beside, content))


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
