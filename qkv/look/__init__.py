"""Watching a model: its attention maps, the alignment plots of them, and what it costs."""

from qkv.look.alignment import plot_alignment, plot_alignments
from qkv.look.bill import render
from qkv.look.capture import Maps, capture
from qkv.look.cost import Cost, cost

__all__ = ["Cost", "Maps", "capture", "cost", "plot_alignment", "plot_alignments", "render"]
