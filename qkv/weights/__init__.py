"""Weights as files and as tables with an inverse."""
