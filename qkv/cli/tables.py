"""Tables of figures: with lines on a terminal, plain columns elsewhere, for files and other programs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence


def show(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> None:
    """Prints a table whose first so many columns hold words, and the others numbers."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True, pad_edge=False)
        for number, title in enumerate(head):
            table.add_column(title, justify="left" if number < words else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))  # a label may look like rich's own marks
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    for line in [head, *rows]:
        cells = [c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip())


def number(value: float, digits: int, sign: str = "") -> str:
    """A figure."""
    return "undefined" if math.isnan(value) else f"{value:{sign},.{digits}f}"


def span(low: float, high: float, digits: int, sign: str = "") -> str:
    """An interval."""
    return f"{number(low, digits, sign)} … {number(high, digits, sign)}"
