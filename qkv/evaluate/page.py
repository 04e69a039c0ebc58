"""A report as one page that a browser opens from a file: style, pictures and script are inside it, nothing is fetched.

Whatever comes from data (labels, texts, file names, recipes) goes through `html.escape`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from qkv.evaluate.cases import Case, Piece
from qkv.evaluate.drawing import chart, confusion_table, whisker
from qkv.evaluate.metric import Figures
from qkv.evaluate.report import Figure, Report, main_figures

_TABLE = 26  # labels of the table of confusions
_MISTAKES = 15
_ROWS = 24  # of the table of classes, above which it scrolls by itself
_CASES = 15  # examples that are seen at once

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --card: #f6f7f9; --ink: #1c2330; --grey: #626b7a; --line: #dde1e7;
  --blue: #2f66c4; --red: #c43d2f; --green: #1f8a4c; --amber: #b7791f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171d; --card: #1d222b; --ink: #e7eaf0; --grey: #9aa4b5;
  --line: #323a47; --blue: #7ba7f0; --red: #f07b6b; --green: #5fc98b; --amber: #e0b04f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .5rem; }
p { margin: .4rem 0; } .grey, .told { color: var(--grey); } .told { font-size: .88rem; max-width: 46rem; }
.hero { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: baseline; margin: 1rem 0 .4rem; }
.hero b { font-size: 2.6rem; line-height: 1.1; font-variant-numeric: tabular-nums; }
.wide + .wide { margin-top: 1rem; } .tall { max-height: 34rem; overflow-y: auto; }
.tall thead th { position: sticky; top: 0; background: var(--paper); } @media print { .tall { max-height: none; } }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: .92rem; } td, th { padding: .22rem .7rem .22rem 0; text-align: left; }
th { font-weight: 600; border-bottom: 1px solid var(--line); white-space: nowrap; }
td { overflow-wrap: break-word; } td.name { min-width: 8rem; max-width: 26rem; overflow-wrap: anywhere; }
@media (max-width: 34rem) { .scale { display: none; } }
tr + tr td { border-top: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--blue); }
th[aria-sort=ascending] button::after { content: " ▲"; font-size: .7em; }
th[aria-sort=descending] button::after { content: " ▼"; font-size: .7em; }
.bar { display: inline-block; height: .55rem; border-radius: 2px; background: var(--blue); opacity: .75; }
.bars { width: 6rem; }
svg { display: block; font-size: 11px; } svg text { fill: var(--ink); dominant-baseline: middle; }
.end { text-anchor: end; } .middle, .count { text-anchor: middle; } .count.on { fill: var(--paper); }
.empty { fill: var(--card); } .hit { fill: var(--blue); } .miss { fill: var(--red); }
.grid { stroke: var(--line); } .span { stroke: var(--blue); stroke-width: 5; stroke-linecap: round; opacity: .5; }
.value, .point { fill: var(--blue); } .curve { fill: none; stroke: var(--blue); stroke-width: 2; }
.kept { fill: var(--paper); stroke: var(--green); stroke-width: 2.5; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.charts figure { margin: 0; } .charts svg { width: 100%; height: auto; } figcaption { font-size: .88rem; }
.case { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; margin: .6rem 0; }
.case p { margin: .15rem 0; white-space: pre-wrap; } .case .told { white-space: normal; }
.case img { float: left; width: 5rem; margin-right: .8rem; border-radius: .3rem; image-rendering: pixelated; }
.case:has(img) { display: flow-root; }
.verdict { display: flex; flex-wrap: wrap; gap: .1rem .8rem; align-items: baseline; font-size: .92rem; }
.verdict .sure { margin-left: auto; } .is-wrong { color: var(--red); } .is-right { color: var(--green); }
mark { color: inherit; background: none; border-bottom: 3px solid; padding: 0 .05em; }
mark.right { border-color: var(--green); } mark.wrong { border-color: var(--red); }
mark.missed { border-color: var(--amber); border-bottom-style: dashed; }
mark small { color: var(--grey); margin-left: .25em; }
pre { background: var(--card); border-radius: .5rem; padding: .8rem; overflow-x: auto; font-size: .82rem; }
summary { cursor: pointer; font-weight: 600; }
"""

_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentNode, row = head.parentNode, body = head.closest("table").tBodies[0];
  const place = [...row.children].indexOf(head), words = !head.classList.contains("number");
  const down = head.ariaSort ? head.ariaSort === "ascending" : !words;
  for (const other of row.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = line => line.children[place].dataset.key ?? line.children[place].textContent;
  const order = (a, b) => words ? key(a).localeCompare(key(b)) : key(a) - key(b);
  body.append(...[...body.rows].sort((a, b) => down ? order(b, a) : order(a, b)));
};
"""


def page(found: Report) -> str:
    """The whole page."""
    title = f"{found.task}: {found.run or 'report'}"
    parts = [_head(found), _figures(found), _curves(found), _confusion(found), _classes(found), _worst(found)]
    body = "\n".join(part for part in [*parts, _recipe(found)] if part)
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{view}\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def number(value: float | None, digits: int = 4) -> str:
    """A figure as it is written in tables."""
    return "undefined" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _head(found: Report) -> str:
    examples = f"{found.examples:,} example{'' if found.examples == 1 else 's'}"
    told = [part for part in (found.run, found.task, found.data, examples) if part]
    name = Path(found.run).name or found.task
    lines = [f"<h1>{escape(name)}</h1>", f'<p class="grey">{escape(" · ".join(told))}</p>']
    if found.deciding in found.figures:
        figure = found.figures[found.deciding]
        between = f"{_between(figure)} (95 % interval)" if figure.low is not None else ""
        value = f"<b>{number(figure.value, figure.digits)}</b>"
        lines.append(
            f'<div class="hero">{value}<span>{escape(found.deciding)}</span><span class="grey">{between}</span>'
        )
        lines.append("</div>")
    if found.unlabelled:
        lines.append(f"<p>{found.unlabelled:,} further examples have no label and were predicted only.</p>")
    return "\n".join([*lines, *(f'<p class="told">{escape(note)}</p>' for note in found.notes)])


def _between(figure: Figure) -> str:
    return f"{number(figure.low, figure.digits)} … {number(figure.high, figure.digits)}"


def _figures(found: Report) -> str:
    if not found.figures:
        return ""
    first = main_figures(list(found.figures))
    others = [name for name in found.figures if name not in first]
    parts = [f"<h2>Figures</h2>\n{_figure_table(found, first)}"]
    if others:
        parts.append(f"<details><summary>{len(others)} more</summary>{_figure_table(found, others)}</details>")
    if found.resamples:
        parts.append(f'<p class="told">Intervals hold 95 % of {found.resamples:,} resamples of the examples.</p>')
    return "\n".join(parts)


def _figure_table(found: Report, names: Sequence[str]) -> str:
    rows = []
    for name in names:
        figure = found.figures[name]
        cells = f'<td>{escape(name)}</td><td class="number">{number(figure.value, figure.digits)}</td>'
        if found.resamples:
            cells += f'<td class="number">{_between(figure)}</td><td class="scale">{whisker(figure)}</td>'
        rows.append(f"<tr>{cells}</tr>")
    head = '<th>figure</th><th class="number">value</th>'
    head += '<th class="number">95 % interval</th><th class="scale"></th>' if found.resamples else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _confusion(found: Report) -> str:
    if found.confusion is None:
        return ""
    few = len(found.confusion.labels) <= 12
    shown = found.confusion if few else found.confusion.hardest(_TABLE)
    told = "True labels down, predicted ones across; colour is the share of the true label."
    if not shown.labels:
        return f'<h2>Confusions</h2>\n<p class="told">None: all {len(found.confusion.labels)} classes are right.</p>'
    if len(shown.labels) < len(found.confusion.labels):
        told += f" {len(shown.labels)} of the {len(found.confusion.labels)} classes: those with most mistakes."
    mistakes = found.confusion.mistakes()
    rows = []
    for right, said, count in mistakes[:_MISTAKES]:
        names = f'<td class="name">{escape(right)}</td><td class="name">{escape(said)}</td>'
        rows.append(f'<tr>{names}<td class="number">{count:,}</td></tr>')
    head = '<tr><th>right</th><th>was taken for</th><th class="number">times</th></tr>'
    most = f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    if len(mistakes) > _MISTAKES:
        most += f'<p class="told">The {_MISTAKES} most frequent of {len(mistakes):,} kinds of mistake.</p>'
    if few and len(found.confusion.labels) == 2:  # the table of two says it all
        most = ""
    return f'<h2>Confusions</h2>\n<p class="told">{told}</p>\n<div class="wide">{confusion_table(shown)}</div>\n{most}'


def _classes(found: Report) -> str:
    if not found.classes:
        return ""
    names = ("class", "precision", "recall", "F1", "support")
    kinds = ["", *[' class="number"'] * 4]
    head = "".join(f"<th{kind}><button>{name}</button></th>" for kind, name in zip(kinds, names, strict=True))
    rows = [_class(label, values) for label, values in found.hardest_classes()]
    table = f'<table><thead><tr>{head}<th class="bars"></th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    told = "Lowest F1 first; a column's name sorts by it. Support: how many examples are of the class."
    tall = " tall" if len(rows) > _ROWS else ""
    return f'<h2>Classes</h2>\n<p class="told">{told}</p>\n<div class="wide{tall}">{table}</div>'


def _class(label: str, values: Figures) -> str:
    figures = "".join(
        f'<td class="number" data-key="{values[name]}">{values[name]:.3f}</td>'
        for name in ("precision", "recall", "f1")
    )
    support = f'<td class="number" data-key="{values["support"]}">{values["support"]:,.0f}</td>'
    bar = f'<td><span class="bar" style="width:{100 * values["f1"]:.0f}%"></span></td>'
    return f'<tr><td class="name">{escape(label)}</td>{figures}{support}{bar}</tr>'


def _worst(found: Report) -> str:
    if not found.examples:
        return ""
    if not found.worst:
        return '<h2>Worst examples</h2>\n<p class="told">None: all are right.</p>'
    few = len(found.worst) < found.wrong
    told = f"{found.wrong:,} of {found.examples:,} examples are not wholly right"
    told += f"; {len(found.worst)} of them, the surest first." if few else ", the surest first."
    if any(piece.mark for one in found.worst for line in one.lines for piece in line):
        key = [("right", "right"), ("wrong", "said wrongly"), ("missed", "missed")]
        told += " Underlined: " + ", ".join(f'<mark class="{mark}">{name}</mark>' for mark, name in key) + "."
    cases = [_case(one) for one in found.worst]
    more = ""
    if len(cases) > _CASES:
        hidden = "".join(cases[_CASES:])
        more = f"<details><summary>{len(cases) - _CASES} more</summary>{hidden}</details>"
    return f'<h2>Worst examples</h2>\n<p class="told">{told}</p>\n{"".join(cases[:_CASES])}\n{more}'


def _case(one: Case) -> str:
    verdict = ""
    if one.predicted or one.right:
        verdict = f'<span>said <b class="is-wrong">{escape(one.predicted)}</b></span>'
        verdict += f'<span>right <b class="is-right">{escape(one.right)}</b></span>'
    sure = f'<span class="sure">{one.confidence:.1%} sure</span>' if one.confidence is not None else ""
    lines = "".join(f"<p>{''.join(map(_piece, line))}</p>" for line in one.lines)
    place = f'<p class="told">{escape(one.where)}</p>' if one.where else ""
    shown = f'<img src="{escape(one.picture)}" alt="{escape(one.where)}">' if one.picture else ""
    return f'<div class="case">{shown}<div class="verdict">{verdict}{sure}</div>{lines}{place}</div>'


def _piece(piece: Piece) -> str:
    if not piece.mark:
        return escape(piece.text)
    note = f"<small>{escape(piece.note)}</small>" if piece.note else ""
    return f'<mark class="{piece.mark}">{escape(piece.text)}{note}</mark>'


def _curves(found: Report) -> str:
    if not found.curves:
        return ""
    drawn = []
    for name, curve in found.curves.items():
        where = "in training" if name == "loss" else "on held-out examples"
        best = None if name == "loss" else max(curve, key=lambda point: point[1])[0]
        ring = "" if best is None else "; the ring is the best"
        told = f'<figcaption>{escape(name)} <span class="grey">{where}{ring}</span></figcaption>'
        drawn.append(f"<figure>{told}{chart(curve, name, best)}</figure>")
    return f'<h2>Learning curves</h2>\n<div class="charts">{"".join(drawn)}</div>'


def _recipe(found: Report) -> str:
    if not found.recipe:
        return ""
    return f"<h2>Recipe</h2>\n<details><summary>recipe.yaml</summary><pre>{escape(found.recipe)}</pre></details>"
