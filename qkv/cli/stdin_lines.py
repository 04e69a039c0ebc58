"""Lines of stdin as they arrive: a slow pipe gives one at a time, a fast one many."""

from __future__ import annotations

import os
import select
import sys
from collections import deque

from qkv.errors import InputError
from qkv.limits import limit, raise_hint

_BLOCK = 1 << 16  # bytes per read, the size of a pipe's buffer
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class StdinLines:
    """The lines of stdin without their ends. `take` waits for the first line only."""

    def __init__(self) -> None:
        self.count = 0  # lines that were taken
        self._lines: deque[bytes] = deque()  # complete lines
        self._rest = b""  # the beginning of a line whose end has not arrived
        self._has_ended = False
        try:
            self._file_number: int | None = sys.stdin.fileno()
        except (OSError, ValueError, AttributeError):  # not a file: in a notebook or a test
            self._file_number = None

    def take(self, size: int) -> list[tuple[str, bytes]]:
        """Return the location and the bytes of at most `size` lines that have arrived; [] at the end of the input."""
        while not self._has_ended and len(self._lines) < size and (not self._lines or self._is_readable()):
            self._read_block()
        taken = [self._lines.popleft() for _ in range(min(size, len(self._lines)))]
        first = self.count + 1
        self.count += len(taken)
        return [(f"stdin:{first + index}", line) for index, line in enumerate(taken)]

    def _is_readable(self) -> bool:
        """Return whether a read would not wait."""
        return self._file_number is None or bool(select.select([self._file_number], [], [], 0)[0])

    def _read_block(self) -> None:
        block = sys.stdin.read().encode() if self._file_number is None else os.read(self._file_number, _BLOCK)
        self._has_ended = not block
        *lines, self._rest = (self._rest + block).split(b"\n")
        if self._has_ended and self._rest:
            lines, self._rest = [self._rest], b""
        if lines and not self.count and not self._lines:
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        for index, line in enumerate([*lines, self._rest], self.count + len(self._lines) + 1):
            if len(line) > limit("line_bytes"):
                raise InputError(f"stdin:{index}: the line has too many bytes; {raise_hint('line_bytes')}")
        self._lines.extend(lines)
