"""Inspection of models: attention maps, alignment plots, cost."""

from qkv.analysis.capture import AttentionMaps, capture_attention
from qkv.analysis.cost import Cost, cost
from qkv.analysis.cost_table import render_cost_table
from qkv.analysis.plot import plot_alignment, plot_alignments

__all__ = [
    "AttentionMaps",
    "Cost",
    "capture_attention",
    "cost",
    "plot_alignment",
    "plot_alignments",
    "render_cost_table",
]
