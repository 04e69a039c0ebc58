"""Pictures on a report's page, as SVG text: a table of confusions, curves over steps, an interval on a scale.

Colours are classes that the page's style fills in, light or dark; nothing is fetched.
"""

from __future__ import annotations

import math
from html import escape

from qkv.evaluate.report import Confusion, Curve, Figure

_NAME = 30  # characters of a label beside the table
_LETTER = 6.7  # about how wide one is
_POINTS = 400  # of a curve; more than a screen shows
_WIDTH, _HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 34


def confusion_table(found: Confusion) -> str:
    """True labels down, predicted ones across; a cell is as dark as its share of its row."""
    cell = 56 if len(found.labels) <= 4 else 34 if len(found.labels) <= 12 else 24
    names = [_short(label) for label in found.labels]
    side = max((len(name) for name in names), default=1) * _LETTER + 12
    # names across are tilted by 55 degrees: that high, and the last one hangs over by the cosine's part
    above, over = side * math.sin(math.radians(55)) + 10, side * math.cos(math.radians(55))
    width, height = side + cell * len(names) + over, above + cell * len(names) + 4
    parts = [_open(width, height, "confusion", "how often each true label, down, was taken for each other, across")]
    for i, name in enumerate(names):
        middle = above + cell * (i + 0.5)
        full = escape(found.labels[i])
        parts.append(
            f'<text x="{side - 6:.1f}" y="{middle:.1f}" class="end">{escape(name)}<title>{full}</title></text>'
        )
        x = side + cell * (i + 0.5)
        turned = f'transform="translate({x:.1f} {above - 5:.1f}) rotate(-55)"'
        parts.append(f"<text {turned}>{escape(name)}<title>{full}</title></text>")
    for i in range(len(names)):
        parts += _cells(found, i, (side, above + cell * i, cell))
    return "".join([*parts, "</svg>"])


def _cells(found: Confusion, i: int, place: tuple[float, float, int]) -> list[str]:
    left, top, cell = place
    total, out = found.totals[i], []
    for j, count in enumerate(found.table[i]):
        x = left + cell * j
        square = f'x="{x:.1f}" y="{top:.1f}" width="{cell - 1}" height="{cell - 1}"'
        out.append(f'<rect {square} class="empty"/>')
        if not count:
            continue
        share = count / total if total else 0.0
        told = f"{found.labels[i]} → {found.labels[j]}: {count:,} ({share:.0%} of {total:,})"
        kind, shade = "hit" if i == j else "miss", " on" if share > 0.55 else ""
        # a single mistake among thousands must still be seen
        out.append(f"<g><title>{escape(told)}</title>")
        out.append(f'<rect {square} class="{kind}" fill-opacity="{max(share, 0.08):.2f}"/>')
        x, y = x + (cell - 1) / 2, top + (cell - 1) / 2
        out.append(f'<text x="{x:.1f}" y="{y:.1f}" class="count{shade}">{_count(count)}</text></g>')
    return out


def _count(count: int) -> str:
    return str(count) if count < 1000 else f"{count / 1000:.3g}k"


def chart(curve: Curve, name: str, best: int | None = None) -> str:
    """A curve over steps; `best` marks the step whose weights were kept."""
    shown = _thinned(curve)
    steps, values = [step for step, _ in shown], [value for _, value in shown]
    low, high, ticks = _scale(min(values), max(values))
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def at(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
        return x, _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_open(_WIDTH, _HEIGHT, "chart", f"{name} over steps")]
    for tick in ticks:
        _, y = at(first, tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" class="end">{tick:.4g}</text>')
    for step, side in ((first, "start"), (last, "end")):
        x, _ = at(step, low)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 14}" class="{side}">{step:,}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 14}" class="middle">steps</text>')
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in shown))
    parts.append(f'<polyline points="{points}" class="curve"/>')
    for step, value in shown if len(shown) <= 40 else []:
        x, y = at(step, value)
        kept = step == best
        told = f"step {step:,}: {value:.4g}{' (kept)' if kept else ''}"
        ring = ' class="kept" r="5.5"' if kept else ' class="point" r="2.6"'
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}"{ring}><title>{told}</title></circle>')
    return "".join([*parts, "</svg>"])


def _thinned(curve: Curve) -> Curve:
    """Means of neighbours, where there are more points than can be seen."""
    each = -(-len(curve) // _POINTS)
    groups = [curve[begin : begin + each] for begin in range(0, len(curve), each)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Round ends a little outside of the values, and round places between."""
    if high <= low:
        low, high = low - abs(low) * 0.1 - 1e-6, high + abs(high) * 0.1 + 1e-6
    rough = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    begin, end = math.floor(low / step), math.ceil(high / step)
    return begin * step, end * step, [number * step for number in range(begin, end + 1)]


def whisker(figure: Figure) -> str:
    """A value with its interval, on the scale of its kind."""
    most = 1.0 if figure.digits > 2 else 100.0
    if figure.low is None or figure.high is None or not all(map(math.isfinite, (figure.low, figure.high))):
        return ""
    places = [min(max(part / most, 0.0), 1.0) * 116 + 2 for part in (figure.low, figure.value, figure.high)]
    low, middle, high = places
    parts = [_open(120, 14, "whisker", "the value and its interval")]
    parts.append('<line x1="2" x2="118" y1="7" y2="7" class="grid"/>')
    parts.append(f'<line x1="{low:.1f}" x2="{max(high, low + 1):.1f}" y1="7" y2="7" class="span"/>')
    parts.append(f'<circle cx="{middle:.1f}" cy="7" r="3.4" class="value"/></svg>')
    return "".join(parts)


def _open(width: float, height: float, kind: str, told: str) -> str:
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {box} class="{kind}" role="img" aria-label="{escape(told)}">'


def _short(label: str) -> str:
    """Without its middle, if it is long: labels that begin alike differ in how they end."""
    return label if len(label) <= _NAME else f"{label[: _NAME // 2]}…{label[-_NAME // 2 + 1 :]}"
