"""Read plain, gzip and zstd files in blocks, by lines of a limited length."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from qkv.errors import InputError
from qkv.limits import limit, raise_hint

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_READ_SIZE = 2**18
_ZST_READ_SIZE = 2**11  # a block of a few bytes can become 128 KiB, and the library gives all of them at once
INSTALL_HINT = "pip install 'qkv[corpora]'"


def decompressed_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends, decompressed if its name ends in .gz or .zst.

    A line over the limit, or more empty lines in succession than the limit, is refused before it is in memory.
    """
    return limited_lines(open_decompressed(file, name), name)


def open_decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """Return a file, or a reader of its decompressed content if its name ends in .gz or .zst."""
    suffix = Path(name).suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    return file if suffix != ".zst" else stream_of(_decompress_zst(file, name))


def stream_of(blocks: Iterable[bytes]) -> BinaryIO:
    """Return a reader of a sequence of byte blocks."""
    return cast(BinaryIO, io.BufferedReader(_BlockReader(iter(blocks)), _READ_SIZE))


def limited_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the lines of a stream with their line ends; `name` is the file's in messages."""
    max_bytes, max_empty = limit("line_bytes"), limit("empty_lines")
    number = num_empty = 0
    while line := stream.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise InputError(f"{name}:{number}: the line has too many bytes; {raise_hint('line_bytes')}")
        num_empty = num_empty + 1 if line in (b"\n", b"\r\n") else 0
        if num_empty > max_empty:
            raise InputError(f"{name}:{number}: too many empty lines in succession; {raise_hint('empty_lines')}")
        yield line


class _BlockReader(io.RawIOBase):
    """The bytes of a sequence of blocks as a raw stream."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        super().__init__()
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _decompress_zst(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the content of a zst file.

    A truncated file raises EOFError, as gzip does; the reader of `zstandard` would take it for the end of the text.
    """
    try:
        import zstandard
    except ImportError:
        raise InputError(f"{name}: .zst needs the package zstandard: {INSTALL_HINT}") from None
    decompressor = None
    while compressed := file.read(_ZST_READ_SIZE):
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
