"""Charts of a report as SVG text: the confusion matrix, learning curves, intervals.

Colors are CSS classes that the style of the page defines for light and dark mode.
"""

from __future__ import annotations

import math
from html import escape

from qkv.reports.report import ConfusionMatrix, Curve, MetricEstimate

_MAX_LABEL_CHARS = 30  # shown characters of a label
_CHAR_WIDTH = 6.7  # approximate width of a character
_MAX_POINTS = 400  # points of a curve; a screen resolves no more
_WIDTH, _HEIGHT = 460, 230
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 52, 14, 12, 34


def confusion_svg(matrix: ConfusionMatrix) -> str:
    """Draw gold labels as rows and predicted ones as columns; a cell is as dark as its fraction of the row."""
    cell = 56 if len(matrix.labels) <= 4 else 34 if len(matrix.labels) <= 12 else 24
    names = [_shorten_label(label) for label in matrix.labels]
    label_width = max((len(name) for name in names), default=1) * _CHAR_WIDTH + 12
    # column labels are rotated by 55 degrees: their height is the sine, and the last one extends by the cosine
    header_height, overhang = label_width * math.sin(math.radians(55)) + 10, label_width * math.cos(math.radians(55))
    width, height = label_width + cell * len(names) + overhang, header_height + cell * len(names) + 4
    elements = [
        _open_svg(width, height, "confusion", "counts of each gold label (rows) predicted as each label (columns)")
    ]
    for i, name in enumerate(names):
        middle = header_height + cell * (i + 0.5)
        full_label = escape(matrix.labels[i])
        text = f"{escape(name)}<title>{full_label}</title></text>"
        elements.append(f'<text x="{label_width - 6:.1f}" y="{middle:.1f}" class="end">{text}')
        x = label_width + cell * (i + 0.5)
        transform = f'transform="translate({x:.1f} {header_height - 5:.1f}) rotate(-55)"'
        elements.append(f"<text {transform}>{text}")
    for i in range(len(names)):
        elements += _row_cells(matrix, i, (label_width, header_height + cell * i, cell))
    return "".join([*elements, "</svg>"])


def _row_cells(matrix: ConfusionMatrix, i: int, geometry: tuple[float, float, int]) -> list[str]:
    row_x, top, cell = geometry
    total, elements = matrix.support[i], []
    for j, count in enumerate(matrix.counts[i]):
        x = row_x + cell * j
        square = f'x="{x:.1f}" y="{top:.1f}" width="{cell - 1}" height="{cell - 1}"'
        elements.append(f'<rect {square} class="empty"/>')
        if not count:
            continue
        fraction = count / total if total else 0.0
        tooltip = f"{matrix.labels[i]} → {matrix.labels[j]}: {count:,} ({fraction:.0%} of {total:,})"
        css_class, shade = "hit" if i == j else "miss", " on" if fraction > 0.55 else ""
        # a single mistake among thousands must stay visible
        elements.append(f"<g><title>{escape(tooltip)}</title>")
        elements.append(f'<rect {square} class="{css_class}" fill-opacity="{max(fraction, 0.08):.2f}"/>')
        x, y = x + (cell - 1) / 2, top + (cell - 1) / 2
        elements.append(f'<text x="{x:.1f}" y="{y:.1f}" class="count{shade}">{_format_count(count)}</text></g>')
    return elements


def _format_count(count: int) -> str:
    return str(count) if count < 1000 else f"{count / 1000:.3g}k"


def curve_svg(curve: Curve, name: str, best_step: int | None = None) -> str:
    """Draw a curve over steps; `best_step` marks the step of the best checkpoint."""
    visible_points = _downsample(curve)
    steps, values = [step for step, _ in visible_points], [value for _, value in visible_points]
    low, high, ticks = _axis_scale(min(values), max(values))
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def to_xy(step: float, value: float) -> tuple[float, float]:
        x = _MARGIN_LEFT + (step - first) / (last - first) * (_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT)
        return x, _MARGIN_TOP + (high - value) / (high - low) * (_HEIGHT - _MARGIN_TOP - _MARGIN_BOTTOM)

    elements = [_open_svg(_WIDTH, _HEIGHT, "chart", f"{name} over steps")]
    for tick in ticks:
        _, y = to_xy(first, tick)
        elements.append(
            f'<line x1="{_MARGIN_LEFT}" x2="{_WIDTH - _MARGIN_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        )
        elements.append(f'<text x="{_MARGIN_LEFT - 6}" y="{y:.1f}" class="end">{tick:.4g}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        x, _ = to_xy(step, low)
        elements.append(f'<text x="{x:.1f}" y="{_HEIGHT - 14}" class="{anchor}">{step:,}</text>')
    elements.append(
        f'<text x="{(_MARGIN_LEFT + _WIDTH - _MARGIN_RIGHT) / 2:.0f}" y="{_HEIGHT - 14}" class="middle">steps</text>'
    )
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (to_xy(*point) for point in visible_points))
    elements.append(f'<polyline points="{points}" class="curve"/>')
    for step, value in visible_points if len(visible_points) <= 40 else []:
        x, y = to_xy(step, value)
        is_best = step == best_step
        tooltip = f"step {step:,}: {value:.4g}{' (best)' if is_best else ''}"
        ring = ' class="best" r="5.5"' if is_best else ' class="point" r="2.6"'
        elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}"{ring}><title>{tooltip}</title></circle>')
    return "".join([*elements, "</svg>"])


def _downsample(curve: Curve) -> Curve:
    """Average neighboring points if there are more than `_MAX_POINTS`."""
    group_size = -(-len(curve) // _MAX_POINTS)
    groups = [curve[start : start + group_size] for start in range(0, len(curve), group_size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _axis_scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Return rounded ends just outside the values, and the ticks between them."""
    if high <= low:
        low, high = low - abs(low) * 0.1 - 1e-6, high + abs(high) * 0.1 + 1e-6
    rough_step = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough_step))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough_step)
    first_tick, last_tick = math.floor(low / step), math.ceil(high / step)
    return first_tick * step, last_tick * step, [tick * step for tick in range(first_tick, last_tick + 1)]


def interval_svg(estimate: MetricEstimate) -> str:
    """Draw a score with its interval, on a scale from 0 to 1 or to 100."""
    max_value = 1.0 if estimate.decimals > 2 else 100.0
    if (
        estimate.ci_low is None
        or estimate.ci_high is None
        or not all(map(math.isfinite, (estimate.ci_low, estimate.ci_high)))
    ):
        return ""
    x_positions = [
        min(max(value / max_value, 0.0), 1.0) * 116 + 2 for value in (estimate.ci_low, estimate.value, estimate.ci_high)
    ]
    low, middle, high = x_positions
    elements = [_open_svg(120, 14, "whisker", "the value and its interval")]
    elements.append('<line x1="2" x2="118" y1="7" y2="7" class="grid"/>')
    elements.append(f'<line x1="{low:.1f}" x2="{max(high, low + 1):.1f}" y1="7" y2="7" class="span"/>')
    elements.append(f'<circle cx="{middle:.1f}" cy="7" r="3.4" class="value"/></svg>')
    return "".join(elements)


def _open_svg(width: float, height: float, css_class: str, aria_label: str) -> str:
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {box} class="{css_class}" role="img" aria-label="{escape(aria_label)}">'


def _shorten_label(label: str) -> str:
    """Remove the middle of a long label: labels with a common prefix differ at the end."""
    return (
        label
        if len(label) <= _MAX_LABEL_CHARS
        else f"{label[: _MAX_LABEL_CHARS // 2]}…{label[-_MAX_LABEL_CHARS // 2 + 1 :]}"
    )
