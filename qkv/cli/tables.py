"""Tables of figures: with lines on a terminal, plain columns elsewhere, for files and other programs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
    """Prints a table whose first so many columns hold words, and the others numbers."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True, pad_edge=False)
        for index, title in enumerate(header):
            table.add_column(title, justify="left" if index < text_columns else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))  # a label may look like rich's own marks
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    for line in [header, *rows]:
        cells = [c.ljust(w) if i < text_columns else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip())


def format_number(value: float, digits: int, sign: str = "") -> str:
    """A figure."""
    return "undefined" if math.isnan(value) else f"{value:{sign},.{digits}f}"


def format_interval(low: float, high: float, digits: int, sign: str = "") -> str:
    """An interval."""
    return f"{format_number(low, digits, sign)} … {format_number(high, digits, sign)}"
