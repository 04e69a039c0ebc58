"""Numbers and intervals as text, in tables of the command line and on the page of a report."""

from __future__ import annotations

import math


def format_number(value: float | None, decimals: int = 4, sign: str = "") -> str:
    """Format a score; a missing value or NaN is "undefined". `sign` "+" writes the sign of positive numbers."""
    return "undefined" if value is None or math.isnan(value) else f"{value:{sign},.{decimals}f}"


def format_interval(low: float | None, high: float | None, decimals: int = 4, sign: str = "") -> str:
    """Format the two ends of an interval."""
    return f"{format_number(low, decimals, sign)} … {format_number(high, decimals, sign)}"
