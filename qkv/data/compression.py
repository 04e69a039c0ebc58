"""Read lines of plain, gzip and zstd files without holding the file in memory."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from qkv.errors import InputError

_READ_SIZE = 2**18
INSTALL_HINT = "pip install 'qkv[corpora]'"


def decompressed_lines(file: BinaryIO, name: str) -> Iterable[bytes]:
    """Return the lines of a file, decompressed if its name ends in .gz or .zst."""
    suffix = Path(name).suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    return file if suffix != ".zst" else _split_lines(_decompress_zst(file, name))


def _decompress_zst(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the content of a zst file.

    A truncated file raises EOFError, as gzip does; the reader of `zstandard` would take it for the end of the text.
    """
    try:
        import zstandard
    except ImportError:
        raise InputError(f"{name}: .zst needs the package zstandard: {INSTALL_HINT}") from None
    decompressor = None
    while compressed := file.read(_READ_SIZE):
        while compressed:
            decompressor = decompressor or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield decompressor.decompress(compressed)
            except zstandard.ZstdError:
                raise EOFError from None
            compressed = decompressor.unused_data if decompressor.eof else b""
            decompressor = None if decompressor.eof else decompressor
    if decompressor is not None:
        raise EOFError


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a byte stream, each with its line end."""
    rest: list[bytes] = []
    for chunk in chunks:
        *complete_lines, partial_line = chunk.split(b"\n")
        for line in complete_lines:
            yield b"".join((*rest, line, b"\n"))
            rest = []
        rest.append(partial_line)
    if any(rest):
        yield b"".join(rest)
