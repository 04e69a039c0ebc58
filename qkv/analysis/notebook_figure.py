"""A matplotlib figure that a notebook shows. Importing this module imports matplotlib."""

from __future__ import annotations

import io

from matplotlib import rc_context
from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure without a window; as the last expression of a notebook cell it is shown, with or without pyplot."""

    def to_bytes(self, file_format: str) -> bytes:
        """Return the figure as a file of the format png, svg or pdf; equal figures give equal files."""
        buffer = io.BytesIO()
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_format)  # no timestamps
        with rc_context({"svg.hashsalt": "qkv"}):
            self.savefig(buffer, format=file_format, metadata=metadata)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.to_bytes("png")
