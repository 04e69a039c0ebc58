"""Tables of numbers: with rules on a terminal, as plain columns in files and pipes."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
    """Print a table; the first `text_columns` columns are aligned left, the others, which hold numbers, right."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True, pad_edge=False)
        for index, title in enumerate(header):
            table.add_column(title, justify="left" if index < text_columns else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))  # not parsed as markup, which a label may resemble
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    for line in [header, *rows]:
        cells = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
