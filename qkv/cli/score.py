"""The command that scores files from anywhere: score."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.options import Device, Json, TooLong, load_model, one_of
from qkv.cli.tables import number, show, span
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.evaluate.confidence import Comparison, Interval
    from qkv.evaluate.files import Sides
    from qkv.evaluate.known import AnyMetric

Metrics = Annotated[
    list[str],
    typer.Option("--metric", "-m", help="bleu, f1, rouge …: see docs/metrics.md. May be given several times."),
]
Hypotheses = Annotated[Path, typer.Option("--hyp", metavar="FILE", help="What a system said.")]
References = Annotated[
    list[Path], typer.Option("--ref", metavar="FILE", help="What is right; for texts several files may be given.")
]
Other = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What another system said: the two are compared, with paired tests.")
]
Bootstrap = Annotated[int, typer.Option(help="How many resamples the intervals and tests rest on; 0: none.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same resamples.")]
Level = Annotated[float, typer.Option(help="The share of resampled figures that lies within an interval.")]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="bleu, chrf, wer, cer: without regard to case.")]
Tokenize = Annotated[str, typer.Option(help="bleu: 13a, intl, char, zh; none for text that is tokenised.")]
Several = Annotated[str, typer.Option("--references", help="rouge: the best of several references, or their mean.")]
Stem = Annotated[bool, typer.Option("--stem", help="rouge: compare Porter's stems.")]
Newline = Annotated[
    str,
    typer.Option(
        help="rouge: what stands between the sentences of a line, such as <q>; for Lsum.", show_default="a line's end"
    ),
]
Scheme = Annotated[str, typer.Option(help="entity_f1: lenient (conlleval), or strict bio or bioes.")]
Positive = Annotated[str | None, typer.Option(metavar="LABEL", help="f1 of this label only, as for MRPC and QQP.")]
Ignore = Annotated[
    list[str] | None, typer.Option(metavar="LABEL", help="f1: a label that does not count, such as O. May be repeated.")
]
Column = Annotated[str | None, typer.Option(metavar="COLUMN", help="Of a table: a name from its first line, or 1, 2 …")]
Separator = Annotated[str, typer.Option(help="What stands between the labels of one example (multilabel_f1).")]
ByLabel = Annotated[bool, typer.Option("--by-label", help="Also precision, recall and F1 of each label or type.")]
Each = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every example's own figures here, as TSV.")]
Encoder = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="bertscore: the encoder.")]
Layer = Annotated[int | None, typer.Option(help="bertscore: whose vectors; 0 goes into the first block.")]
Idf = Annotated[bool, typer.Option("--idf", help="bertscore: weigh rare tokens more.")]


def score(
    metric: Metrics,
    hyp: Hypotheses,
    ref: References,
    other: Other = None,
    bootstrap: Bootstrap = 1000,
    seed: Seed = 0,
    level: Level = 0.95,
    as_json: Json = False,
    lowercase: Lowercase = False,
    tokenize: Tokenize = "13a",
    references: Several = "best",
    stem: Stem = False,
    newline: Newline = "\n",
    scheme: Scheme = "lenient",
    positive: Positive = None,
    ignore: Ignore = None,
    hyp_column: Column = None,
    ref_column: Column = None,
    separator: Separator = ",",
    by_label: ByLabel = False,
    each: Each = None,
    model: Encoder = None,
    layer: Layer = None,
    idf: Idf = False,
    too_long: TooLong = "refuse",
    device: Device = None,
) -> None:
    """Score --hyp against --ref, line by line: texts, labels, numbers, tagged words (CoNLL), answers (SQuAD's JSON)."""
    from qkv.evaluate.entities import SCHEMES
    from qkv.evaluate.files import Files
    from qkv.evaluate.known import Choices

    how = Choices(
        lowercase=lowercase,
        tokenize=tokenize,
        references=one_of("--references", references, "best", "mean"),
        stem=stem,
        newline=newline,
        scheme=one_of("--scheme", scheme, *SCHEMES),
        positive=positive,
        ignore=tuple(ignore or ()),
        layer=layer,
        idf=idf,
        too_long=one_of("--too-long", too_long, "refuse", "truncate"),
    )
    metrics = list(dict.fromkeys(metric))
    _check_choices(
        metrics, how, {"separator": separator != ",", "model": model is not None, "device": device is not None}
    )
    if bootstrap < 0 or not 0 < level < 1:
        raise InputError("--bootstrap is 0 or more and --level lies between 0 and 1")
    tags = how.scheme if "entity_f1" in metrics else None
    files = Files(hyp, tuple(ref), other, hyp_column, ref_column, separator, tags)
    found = _score_all(metrics, files, how, (model, device), _Draws(bootstrap, seed, level))
    if each is not None:
        _write_each(each, found)
    (_print_json if as_json else _print_table)(found, by_label)


@dataclass(frozen=True)
class _Draws:
    resamples: int
    seed: int
    level: float

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Scored:
    """One metric's figures, with what is known about each."""

    name: str
    metric: Any  # an AnyMetric; those of labels have a table by label too
    signature: str
    rows: Any  # [examples, k]
    figures: dict[str, float]
    intervals: dict[str, Interval]
    other: dict[str, float] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    scored: list[_Scored]
    examples: int
    draws: _Draws
    notes: list[str]


def _check_choices(metrics: list[str], how: Any, further: dict[str, bool]) -> None:
    """Refuses a choice that none of the metrics takes: it would look as if it had been followed."""
    from qkv.evaluate.known import METRICS, Choices, known

    taken = {choice for name in metrics for choice in known(name).takes}
    usual = Choices()
    made = [name for name in vars(usual) if getattr(how, name) != getattr(usual, name)]
    for name in [*made, *(name for name, chosen in further.items() if chosen)]:
        if name not in taken:
            users = ", ".join(metric for metric, one in METRICS.items() if name in one.takes)
            raise InputError(f"--{name.replace('_', '-')} changes nothing of {', '.join(metrics)}; it is for {users}")


def _score_all(
    metrics: list[str], files: Any, how: Any, encoder: tuple[str | None, str | None], draws: _Draws
) -> _Found:
    import dataclasses

    from qkv.evaluate.files import read_sides
    from qkv.evaluate.known import known

    sides: dict[str, Sides] = {}
    scored = []
    for name in metrics:  # all files are read before anything is computed: a bad one is found at once
        kind = known(name).kind
        if kind not in sides:
            sides[kind] = read_sides(kind, files)
    model, device = encoder
    if model is not None:
        how = dataclasses.replace(how, model=load_model(model, device), called=model)
    for name in metrics:
        side = sides[known(name).kind]
        seen = (side.hypotheses, side.references, *([side.other] if side.other is not None else []))
        scored.append(_score(name, known(name).make(how, seen), side, draws))
    notes = list(dict.fromkeys(note for side in sides.values() for note in side.notes))
    return _Found(scored, len(next(iter(sides.values())).hypotheses), draws, notes)


def _score(name: str, metric: AnyMetric, side: Sides, draws: _Draws) -> _Scored:
    from qkv.evaluate.confidence import bootstrap, compare

    rows = metric.statistics(side.hypotheses, side.references)
    signature = metric.signature(side.references)
    figures = metric.of(rows)
    intervals = bootstrap(metric, rows, **draws.options) if draws.resamples else {}
    if side.other is None:
        return _Scored(name, metric, signature, rows, figures, intervals)
    others = metric.statistics(side.other, side.references)
    compared = compare(metric, rows, others, **draws.options) if draws.resamples else {}
    return _Scored(name, metric, signature, rows, figures, intervals, metric.of(others), compared)


def _write_each(path: Path, found: _Found) -> None:
    from qkv.files import write_text

    columns: dict[str, list[str]] = {}
    for one in found.scored:
        own = one.metric.each(one.rows)
        for figure in dict.fromkeys(figure for row in own for figure in row):
            title = figure if figure == one.name else f"{one.name}.{figure}"
            columns[title] = [number(row.get(figure, math.nan), one.metric.digits) for row in own]
    lines = zip(*columns.values(), strict=True)
    write_text(path, "".join("\t".join(line) + "\n" for line in [tuple(columns), *lines]))


def _print_json(found: _Found, by_label: bool) -> None:
    metrics: dict[str, Any] = {}
    for one in found.scored:
        figures = {figure: _figure(one, figure) for figure in one.figures}
        metrics[one.name] = {"signature": one.signature, "figures": figures}
        if by_label and hasattr(one.metric, "by_label"):
            metrics[one.name]["labels"] = one.metric.by_label(one.rows)
    drawn = asdict(found.draws) if found.draws.resamples else None
    print(json.dumps({"examples": found.examples, "metrics": metrics, "bootstrap": drawn, "notes": found.notes}))


def _figure(one: _Scored, figure: str) -> dict[str, Any]:
    out: dict[str, float] = {"value": one.figures[figure]}
    if figure in one.intervals:
        out |= asdict(one.intervals[figure])
    if one.other:
        out["other"] = one.other.get(figure, math.nan)
    if figure in one.comparisons:
        compared = asdict(one.comparisons[figure])
        interval = compared.pop("interval")
        out |= {**compared, "difference_low": interval["low"], "difference_high": interval["high"]}
    # JSON has no word for infinite and not-a-number
    return {key: value if math.isfinite(value) else None for key, value in out.items()}


def _print_table(found: _Found, by_label: bool) -> None:
    paired = any(one.other for one in found.scored)
    head = [
        "metric",
        "figure",
        "value",
        *(["interval"] if found.draws.resamples else []),
        *(["other"] if paired else []),
    ]
    show(head, [_row(one, figure) for one in found.scored for figure in one.figures], words=2)
    if any(one.comparisons for one in found.scored):  # a table of its own: both fit into eighty columns
        print()
        head = ["metric", "figure", "difference", "interval", "p boot", "p swaps"]
        show(head, [_compared(one, figure) for one in found.scored for figure in one.comparisons], words=2)
    for one in found.scored if by_label else []:
        if hasattr(one.metric, "by_label"):
            print()
            show([one.name, "precision", "recall", "f1", "support"], _labels(one))
    print()
    said = f"{found.examples:,} examples"
    if found.draws.resamples:
        said += f"; {found.draws.level:.0%} intervals from {found.draws.resamples:,} resamples, seed {found.draws.seed}"
    print(said)
    if any(one.comparisons for one in found.scored):
        print("p boot: paired bootstrap (Koehn 2004); p swaps: approximate randomisation (Riezler & Maxwell 2005)")
    for line in [*(f"{one.name}: {one.signature}" for one in found.scored if one.signature), *found.notes]:
        print(line)


def _row(one: _Scored, figure: str) -> list[str]:
    digits = one.metric.digits
    row = [one.name, figure, number(one.figures[figure], digits)]
    row += [span(one.intervals[figure].low, one.intervals[figure].high, digits)] if one.intervals else []
    return [*row, number(one.other.get(figure, math.nan), digits)] if one.other else row


def _compared(one: _Scored, figure: str) -> list[str]:
    digits, found = one.metric.digits, one.comparisons[figure]
    spread = span(found.interval.low, found.interval.high, digits, sign="+")
    chances = (f"{chance:.4f}" for chance in (found.p_bootstrap, found.p_randomisation))
    return [one.name, figure, number(found.difference, digits, sign="+"), spread, *chances]


def _labels(one: _Scored) -> list[list[str]]:
    return [
        [str(label), *(number(line[f], 4) for f in ("precision", "recall", "f1")), f"{line['support']:,.0f}"]
        for label, line in one.metric.by_label(one.rows).items()
    ]
