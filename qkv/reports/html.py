"""A report as one self-contained HTML page: style, charts and script are inline, and nothing is downloaded.

All data (labels, texts, file names, recipes) is escaped with `html.escape`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from qkv.metrics.metric import Scores
from qkv.reports.error_analysis import ErrorCase, Highlight
from qkv.reports.numbers import format_interval, format_number
from qkv.reports.report import MetricEstimate, Report, headline_metrics
from qkv.reports.svg import confusion_svg, curve_svg, interval_svg

_MAX_MATRIX_LABELS = 26  # labels of the shown confusion matrix
_MAX_CONFUSIONS = 15
_MAX_UNSCROLLED_ROWS = 24  # a longer table of classes has its own scroll bar
_MAX_OPEN_CASES = 15  # examples that are not folded

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --card: #f6f7f9; --ink: #1c2330; --grey: #626b7a; --line: #dde1e7;
  --blue: #2f66c4; --red: #c43d2f; --green: #1f8a4c; --amber: #b7791f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171d; --card: #1d222b; --ink: #e7eaf0; --grey: #9aa4b5;
  --line: #323a47; --blue: #7ba7f0; --red: #f07b6b; --green: #5fc98b; --amber: #e0b04f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .5rem; }
p { margin: .4rem 0; } .grey, .caption { color: var(--grey); } .caption { font-size: .88rem; max-width: 46rem; }
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
.best { fill: var(--paper); stroke: var(--green); stroke-width: 2.5; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.charts figure { margin: 0; } .charts svg { width: 100%; height: auto; } figcaption { font-size: .88rem; }
.case { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; margin: .6rem 0; }
.case p { margin: .15rem 0; white-space: pre-wrap; } .case .caption { white-space: normal; }
.case img { float: left; width: 5rem; margin-right: .8rem; border-radius: .3rem; image-rendering: pixelated; }
.case:has(img) { display: flow-root; }
.verdict { display: flex; flex-wrap: wrap; gap: .1rem .8rem; align-items: baseline; font-size: .92rem; }
.verdict .confidence { margin-left: auto; } .is-wrong { color: var(--red); } .is-gold { color: var(--green); }
mark { color: inherit; background: none; border-bottom: 3px solid; padding: 0 .05em; }
mark.correct { border-color: var(--green); } mark.wrong { border-color: var(--red); }
mark.missed { border-color: var(--amber); border-bottom-style: dashed; }
mark small { color: var(--grey); margin-left: .25em; }
pre { background: var(--card); border-radius: .5rem; padding: .8rem; overflow-x: auto; font-size: .82rem; }
summary { cursor: pointer; font-weight: 600; }
"""

_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentNode, row = head.parentNode, body = head.closest("table").tBodies[0];
  const column = [...row.children].indexOf(head), isText = !head.classList.contains("number");
  const down = head.ariaSort ? head.ariaSort === "ascending" : !isText;
  for (const other of row.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = line => line.children[column].dataset.key ?? line.children[column].textContent;
  const order = (a, b) => isText ? key(a).localeCompare(key(b)) : key(a) - key(b);
  body.append(...[...body.rows].sort((a, b) => down ? order(b, a) : order(a, b)));
};
"""


def render_html(report: Report) -> str:
    """Return the HTML page of a report."""
    title = f"{report.task}: {report.run or 'report'}"
    sections = [
        _render_header(report),
        _render_metrics(report),
        _render_curves(report),
        _render_confusion(report),
        _render_classes(report),
        _render_worst_examples(report),
    ]
    body = "\n".join(section for section in [*sections, _render_recipe(report)] if section)
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{viewport}\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _render_header(report: Report) -> str:
    examples = f"{report.num_examples:,} example{'' if report.num_examples == 1 else 's'}"
    details = [detail for detail in (report.run, report.task, report.data, examples) if detail]
    name = Path(report.run).name or report.task
    lines = [f"<h1>{escape(name)}</h1>", f'<p class="grey">{escape(" · ".join(details))}</p>']
    if report.primary_metric in report.metrics:
        estimate = report.metrics[report.primary_metric]
        interval = f"{_format_interval(estimate)} (95 % interval)" if estimate.ci_low is not None else ""
        value = f"<b>{format_number(estimate.value, estimate.decimals)}</b>"
        lines.append(
            f'<div class="hero">{value}<span>{escape(report.primary_metric)}</span><span class="grey">{interval}</span>'
        )
        lines.append("</div>")
    if report.num_unlabeled:
        lines.append(f"<p>{report.num_unlabeled:,} further examples have no label and were predicted only.</p>")
    return "\n".join([*lines, *(f'<p class="caption">{escape(note)}</p>' for note in report.notes)])


def _format_interval(estimate: MetricEstimate) -> str:
    return format_interval(estimate.ci_low, estimate.ci_high, estimate.decimals)


def _render_metrics(report: Report) -> str:
    if not report.metrics:
        return ""
    headline_names = headline_metrics(list(report.metrics))
    remaining_names = [name for name in report.metrics if name not in headline_names]
    sections = [f"<h2>Metrics</h2>\n{_metric_table(report, headline_names)}"]
    if remaining_names:
        sections.append(
            f"<details><summary>{len(remaining_names)} more</summary>{_metric_table(report, remaining_names)}</details>"
        )
    if report.resamples:
        sections.append(
            f'<p class="caption">95 % intervals of {report.resamples:,} bootstrap resamples of the examples.</p>'
        )
    return "\n".join(sections)


def _metric_table(report: Report, names: Sequence[str]) -> str:
    rows = []
    for name in names:
        estimate = report.metrics[name]
        cells = f'<td>{escape(name)}</td><td class="number">{format_number(estimate.value, estimate.decimals)}</td>'
        if report.resamples:
            cells += (
                f'<td class="number">{_format_interval(estimate)}</td><td class="scale">{interval_svg(estimate)}</td>'
            )
        rows.append(f"<tr>{cells}</tr>")
    head = '<th>metric</th><th class="number">value</th>'
    head += '<th class="number">95 % interval</th><th class="scale"></th>' if report.resamples else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _render_confusion(report: Report) -> str:
    if report.confusion_matrix is None:
        return ""
    is_small = len(report.confusion_matrix.labels) <= 12
    matrix = report.confusion_matrix if is_small else report.confusion_matrix.most_confused(_MAX_MATRIX_LABELS)
    caption = "Rows: gold labels; columns: predicted labels. The color is the fraction of the gold label."
    if not matrix.labels:
        caption = f"None: all {len(report.confusion_matrix.labels)} classes are predicted correctly."
        return f'<h2>Confusions</h2>\n<p class="caption">{caption}</p>'
    if len(matrix.labels) < len(report.confusion_matrix.labels):
        caption += (
            f" {len(matrix.labels)} of the {len(report.confusion_matrix.labels)} classes, those with most mistakes."
        )
    mistakes = report.confusion_matrix.mistakes()
    rows = []
    for gold, predicted, count in mistakes[:_MAX_CONFUSIONS]:
        names = f'<td class="name">{escape(gold)}</td><td class="name">{escape(predicted)}</td>'
        rows.append(f'<tr>{names}<td class="number">{count:,}</td></tr>')
    head = '<tr><th>gold</th><th>predicted</th><th class="number">times</th></tr>'
    mistake_table = f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    if len(mistakes) > _MAX_CONFUSIONS:
        mistake_table += f'<p class="caption">The {_MAX_CONFUSIONS} most frequent of {len(mistakes):,} confusions.</p>'
    if is_small and len(report.confusion_matrix.labels) == 2:  # the matrix of two classes shows all confusions
        mistake_table = ""
    matrix_svg = f'<div class="wide">{confusion_svg(matrix)}</div>'
    return f'<h2>Confusions</h2>\n<p class="caption">{caption}</p>\n{matrix_svg}\n{mistake_table}'


def _render_classes(report: Report) -> str:
    if not report.classes:
        return ""
    names = ("class", "precision", "recall", "F1", "support")
    attributes = ["", *[' class="number"'] * 4]
    head = "".join(
        f"<th{attribute}><button>{name}</button></th>" for attribute, name in zip(attributes, names, strict=True)
    )
    rows = [_class_row(label, values) for label, values in report.worst_classes()]
    table = f'<table><thead><tr>{head}<th class="bars"></th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    caption = "Lowest F1 first; click a column name to sort. Support: number of examples of the class."
    tall = " tall" if len(rows) > _MAX_UNSCROLLED_ROWS else ""
    return f'<h2>Classes</h2>\n<p class="caption">{caption}</p>\n<div class="wide{tall}">{table}</div>'


def _class_row(label: str, values: Scores) -> str:
    rate_cells = "".join(
        f'<td class="number" data-key="{values[name]}">{values[name]:.3f}</td>'
        for name in ("precision", "recall", "f1")
    )
    support = f'<td class="number" data-key="{values["support"]}">{values["support"]:,.0f}</td>'
    bar = f'<td><span class="bar" style="width:{100 * values["f1"]:.0f}%"></span></td>'
    return f'<tr><td class="name">{escape(label)}</td>{rate_cells}{support}{bar}</tr>'


def _render_worst_examples(report: Report) -> str:
    if not report.num_examples:
        return ""
    if not report.worst_examples:
        return '<h2>Worst examples</h2>\n<p class="caption">None: all predictions are correct.</p>'
    is_subset = len(report.worst_examples) < report.num_wrong
    caption = f"{report.num_wrong:,} of {report.num_examples:,} examples are not entirely correct"
    caption += (
        f"; {len(report.worst_examples)} of them, most confident first." if is_subset else ", most confident first."
    )
    if any(highlight.kind for error_case in report.worst_examples for line in error_case.lines for highlight in line):
        legend = [("correct", "correct"), ("wrong", "predicted wrongly"), ("missed", "missed")]
        caption += " Underlined: " + ", ".join(f'<mark class="{kind}">{name}</mark>' for kind, name in legend) + "."
    cases = [_render_case(error_case) for error_case in report.worst_examples]
    more = ""
    if len(cases) > _MAX_OPEN_CASES:
        hidden = "".join(cases[_MAX_OPEN_CASES:])
        more = f"<details><summary>{len(cases) - _MAX_OPEN_CASES} more</summary>{hidden}</details>"
    return f'<h2>Worst examples</h2>\n<p class="caption">{caption}</p>\n{"".join(cases[:_MAX_OPEN_CASES])}\n{more}'


def _render_case(error_case: ErrorCase) -> str:
    verdict = ""
    if error_case.predicted or error_case.gold:
        verdict = f'<span>predicted <b class="is-wrong">{escape(error_case.predicted)}</b></span>'
        verdict += f'<span>gold <b class="is-gold">{escape(error_case.gold)}</b></span>'
    confidence = (
        f'<span class="confidence">{error_case.confidence:.1%} confident</span>'
        if error_case.confidence is not None
        else ""
    )
    lines = "".join(f"<p>{''.join(map(_render_highlight, line))}</p>" for line in error_case.lines)
    location = f'<p class="caption">{escape(error_case.location)}</p>' if error_case.location else ""
    image = f'<img src="{escape(error_case.image)}" alt="{escape(error_case.location)}">' if error_case.image else ""
    return f'<div class="case">{image}<div class="verdict">{verdict}{confidence}</div>{lines}{location}</div>'


def _render_highlight(highlight: Highlight) -> str:
    if not highlight.kind:
        return escape(highlight.text)
    note = f"<small>{escape(highlight.note)}</small>" if highlight.note else ""
    return f'<mark class="{highlight.kind}">{escape(highlight.text)}{note}</mark>'


def _render_curves(report: Report) -> str:
    if not report.learning_curves:
        return ""
    charts = []
    for name, curve in report.learning_curves.items():
        split_text = "in training" if name == "loss" else "on held-out examples"
        best = None if name == "loss" else max(curve, key=lambda point: point[1])[0]
        ring_text = "" if best is None else "; the ring marks the best checkpoint"
        caption = f'<figcaption>{escape(name)} <span class="grey">{split_text}{ring_text}</span></figcaption>'
        charts.append(f"<figure>{caption}{curve_svg(curve, name, best)}</figure>")
    return f'<h2>Learning curves</h2>\n<div class="charts">{"".join(charts)}</div>'


def _render_recipe(report: Report) -> str:
    if not report.recipe:
        return ""
    return f"<h2>Recipe</h2>\n<details><summary>recipe.yaml</summary><pre>{escape(report.recipe)}</pre></details>"
