"""The command that scores files from anywhere: score."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.options import Device, Json, OnTooLong, check_choice, load_model
from qkv.cli.tables import format_interval, format_number, print_table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.metrics.registry import AnyMetric
    from qkv.metrics.score_files import ScoringData
    from qkv.metrics.significance import Comparison, Interval

Metrics = Annotated[
    list[str],
    typer.Option("--metric", "-m", help="bleu, f1, rouge …: see docs/metrics.md. May be given several times."),
]
Hypotheses = Annotated[Path, typer.Option("--hyp", metavar="FILE", help="What a system said.")]
References = Annotated[
    list[Path], typer.Option("--ref", metavar="FILE", help="What is right; for texts several files may be given.")
]
Baseline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What another system said: the two are compared, with paired tests.")
]
NumResamples = Annotated[int, typer.Option(help="How many resamples the intervals and tests rest on; 0: none.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same resamples.")]
Confidence = Annotated[float, typer.Option(help="The share of resampled figures that lies within an interval.")]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="bleu, chrf, wer, cer: without regard to case.")]
Tokenize = Annotated[str, typer.Option(help="bleu: 13a, intl, char, zh; none for text that is tokenised.")]
MultiReference = Annotated[
    str, typer.Option("--multi-reference", help="rouge: the best of several references, or their mean.")
]
UseStemmer = Annotated[bool, typer.Option("--use-stemmer", help="rouge: compare Porter's stems.")]
SentenceSeparator = Annotated[
    str,
    typer.Option(
        help="rouge: what stands between the sentences of a line, such as <q>; for Lsum.", show_default="a line's end"
    ),
]
Scheme = Annotated[str, typer.Option(help="entity_f1: lenient (conlleval), or strict bio or bioes.")]
PositiveLabel = Annotated[str | None, typer.Option(metavar="LABEL", help="f1 of this label only, as for MRPC and QQP.")]
Ignore = Annotated[
    list[str] | None, typer.Option(metavar="LABEL", help="f1: a label that does not count, such as O. May be repeated.")
]
Column = Annotated[str | None, typer.Option(metavar="COLUMN", help="Of a table: a name from its first line, or 1, 2 …")]
LabelSeparator = Annotated[str, typer.Option(help="What stands between the labels of one example (multilabel_f1).")]
PerClass = Annotated[bool, typer.Option("--per-class", help="Also precision, recall and F1 of each label or type.")]
PerExample = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write every example's own figures here, as TSV.")
]
Encoder = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="bertscore: the encoder.")]
Layer = Annotated[int | None, typer.Option(help="bertscore: whose vectors; 0 goes into the first block.")]
Idf = Annotated[bool, typer.Option("--idf", help="bertscore: weigh rare tokens more.")]


def score(
    metric: Metrics,
    hyp: Hypotheses,
    ref: References,
    baseline: Baseline = None,
    num_resamples: NumResamples = 1000,
    seed: Seed = 0,
    confidence: Confidence = 0.95,
    as_json: Json = False,
    lowercase: Lowercase = False,
    tokenize: Tokenize = "13a",
    multi_reference: MultiReference = "best",
    use_stemmer: UseStemmer = False,
    sentence_separator: SentenceSeparator = "\n",
    scheme: Scheme = "lenient",
    positive_label: PositiveLabel = None,
    ignore: Ignore = None,
    hyp_column: Column = None,
    ref_column: Column = None,
    label_separator: LabelSeparator = ",",
    per_class: PerClass = False,
    per_example: PerExample = None,
    model: Encoder = None,
    layer: Layer = None,
    idf: Idf = False,
    on_too_long: OnTooLong = "refuse",
    device: Device = None,
) -> None:
    """Score --hyp against --ref, line by line: texts, labels, numbers, tagged words (CoNLL), answers (SQuAD's JSON)."""
    from qkv.metrics.entities import SCHEMES
    from qkv.metrics.registry import MetricOptions
    from qkv.metrics.score_files import ScoringFiles

    options = MetricOptions(
        lowercase=lowercase,
        tokenize=tokenize,
        multi_reference=check_choice("--multi-reference", multi_reference, "best", "mean"),
        use_stemmer=use_stemmer,
        sentence_separator=sentence_separator,
        scheme=check_choice("--scheme", scheme, *SCHEMES),
        positive_label=positive_label,
        ignore=tuple(ignore or ()),
        layer=layer,
        idf=idf,
        on_too_long=check_choice("--on-too-long", on_too_long, "refuse", "truncate"),
    )
    metrics = list(dict.fromkeys(metric))
    _check_options(
        metrics,
        options,
        {"label_separator": label_separator != ",", "model": model is not None, "device": device is not None},
    )
    if num_resamples < 0 or not 0 < confidence < 1:
        raise InputError("--num-resamples is 0 or more and --confidence lies between 0 and 1")
    tags = options.scheme if "entity_f1" in metrics else None
    files = ScoringFiles(hyp, tuple(ref), baseline, hyp_column, ref_column, label_separator, tags)
    results = _score_metrics(metrics, files, options, (model, device), _Resampling(num_resamples, seed, confidence))
    if per_example is not None:
        _write_per_example(per_example, results)
    (_print_json if as_json else _print_table)(results, per_class)


@dataclass(frozen=True)
class _Resampling:
    resamples: int
    seed: int
    level: float

    @property
    def kwargs(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _MetricScores:
    """One metric's figures, with what is known about each."""

    name: str
    metric: Any  # an AnyMetric; those of labels have a table by label too
    signature: str
    stats: Any  # [examples, k]
    scores: dict[str, float]
    intervals: dict[str, Interval]
    baseline: dict[str, float] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)


@dataclass(frozen=True)
class _ScoreResults:
    metrics: list[_MetricScores]
    examples: int
    resampling: _Resampling
    notes: list[str]


def _check_options(metrics: list[str], options: Any, other_options: dict[str, bool]) -> None:
    """Refuses a choice that none of the metrics takes: it would look as if it had been followed."""
    from qkv.metrics.registry import METRICS, MetricOptions, get_metric

    accepted = {option for name in metrics for option in get_metric(name).options}
    defaults = MetricOptions()
    changed = [name for name in vars(defaults) if getattr(options, name) != getattr(defaults, name)]
    for name in [*changed, *(name for name, is_set in other_options.items() if is_set)]:
        if name not in accepted:
            metric_names = ", ".join(metric for metric, entry in METRICS.items() if name in entry.options)
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} changes nothing of {', '.join(metrics)}; it is for {metric_names}")


def _score_metrics(
    metrics: list[str], files: Any, options: Any, encoder: tuple[str | None, str | None], resampling: _Resampling
) -> _ScoreResults:
    import dataclasses

    from qkv.metrics.registry import get_metric
    from qkv.metrics.score_files import read_scoring_files

    data_by_kind: dict[str, ScoringData] = {}
    scored = []
    for name in metrics:  # all files are read before anything is computed: a bad one is found at once
        kind = get_metric(name).data_kind
        if kind not in data_by_kind:
            data_by_kind[kind] = read_scoring_files(kind, files)
    model, device = encoder
    if model is not None:
        options = dataclasses.replace(options, model=load_model(model, device), model_name=model)
    for name in metrics:
        data = data_by_kind[get_metric(name).data_kind]
        systems = (data.hypotheses, data.references, *([data.baseline] if data.baseline is not None else []))
        scored.append(_score_metric(name, get_metric(name).make(options, systems), data, resampling))
    notes = list(dict.fromkeys(note for data in data_by_kind.values() for note in data.notes))
    return _ScoreResults(scored, len(next(iter(data_by_kind.values())).hypotheses), resampling, notes)


def _score_metric(name: str, metric: AnyMetric, data: ScoringData, resampling: _Resampling) -> _MetricScores:
    from qkv.metrics.significance import bootstrap, compare

    stats = metric.statistics(data.hypotheses, data.references)
    signature = metric.signature(data.references)
    scores = metric.compute(stats)
    intervals = bootstrap(metric, stats, **resampling.kwargs) if resampling.resamples else {}
    if data.baseline is None:
        return _MetricScores(name, metric, signature, stats, scores, intervals)
    baseline_stats = metric.statistics(data.baseline, data.references)
    comparisons = compare(metric, stats, baseline_stats, **resampling.kwargs) if resampling.resamples else {}
    return _MetricScores(name, metric, signature, stats, scores, intervals, metric.compute(baseline_stats), comparisons)


def _write_per_example(path: Path, results: _ScoreResults) -> None:
    from qkv.files import atomic_write_text

    columns: dict[str, list[str]] = {}
    for metric in results.metrics:
        per_example = metric.metric.per_example(metric.stats)
        for score_name in dict.fromkeys(score_name for row in per_example for score_name in row):
            title = score_name if score_name == metric.name else f"{metric.name}.{score_name}"
            decimals = metric.metric.decimals
            columns[title] = [format_number(row.get(score_name, math.nan), decimals) for row in per_example]
    lines = zip(*columns.values(), strict=True)
    atomic_write_text(path, "".join("\t".join(line) + "\n" for line in [tuple(columns), *lines]))


def _print_json(results: _ScoreResults, per_class: bool) -> None:
    metrics: dict[str, Any] = {}
    for metric in results.metrics:
        scores = {score_name: _score_fields(metric, score_name) for score_name in metric.scores}
        metrics[metric.name] = {"signature": metric.signature, "scores": scores}
        if per_class and hasattr(metric.metric, "per_class"):
            metrics[metric.name]["classes"] = metric.metric.per_class(metric.stats)
    resampling = asdict(results.resampling) if results.resampling.resamples else None
    print(json.dumps({"examples": results.examples, "metrics": metrics, "bootstrap": resampling, "notes": results.notes}))


def _score_fields(metric: _MetricScores, score_name: str) -> dict[str, Any]:
    fields: dict[str, float] = {"value": metric.scores[score_name]}
    if score_name in metric.intervals:
        interval = metric.intervals[score_name]
        fields |= {"ci_low": interval.low, "ci_high": interval.high}
    if metric.baseline:
        fields["baseline"] = metric.baseline.get(score_name, math.nan)
    if score_name in metric.comparisons:
        comparison = asdict(metric.comparisons[score_name])
        bounds = comparison.pop("interval")
        fields |= {**comparison, "difference_ci_low": bounds["low"], "difference_ci_high": bounds["high"]}
    # JSON has no word for infinite and not-a-number
    return {key: value if math.isfinite(value) else None for key, value in fields.items()}


def _print_table(results: _ScoreResults, per_class: bool) -> None:
    has_baseline = any(metric.baseline for metric in results.metrics)
    header = [
        "metric",
        "score",
        "value",
        *(["interval"] if results.resampling.resamples else []),
        *(["baseline"] if has_baseline else []),
    ]
    rows = [_score_row(metric, score_name) for metric in results.metrics for score_name in metric.scores]
    print_table(header, rows, text_columns=2)
    if any(metric.comparisons for metric in results.metrics):  # a table of its own: both fit into eighty columns
        print()
        header = ["metric", "score", "difference", "interval", "p (boot.)", "p (rand.)"]
        rows = [_comparison_row(metric, score_name) for metric in results.metrics for score_name in metric.comparisons]
        print_table(header, rows, text_columns=2)
    for metric in results.metrics if per_class else []:
        if hasattr(metric.metric, "per_class"):
            print()
            print_table([metric.name, "precision", "recall", "f1", "support"], _class_rows(metric))
    print()
    summary = f"{results.examples:,} examples"
    resampling = results.resampling
    if resampling.resamples:
        summary += f"; {resampling.level:.0%} intervals from {resampling.resamples:,} resamples, seed {resampling.seed}"
    print(summary)
    if any(metric.comparisons for metric in results.metrics):
        print(
            "p (boot.): paired bootstrap (Koehn 2004); "
            "p (rand.): approximate randomization (Riezler & Maxwell 2005)"
        )
    signatures = [f"{metric.name}: {metric.signature}" for metric in results.metrics if metric.signature]
    for line in [*signatures, *results.notes]:
        print(line)


def _score_row(metric: _MetricScores, score_name: str) -> list[str]:
    decimals = metric.metric.decimals
    row = [metric.name, score_name, format_number(metric.scores[score_name], decimals)]
    if metric.intervals:
        interval = metric.intervals[score_name]
        row.append(format_interval(interval.low, interval.high, decimals))
    return [*row, format_number(metric.baseline.get(score_name, math.nan), decimals)] if metric.baseline else row


def _comparison_row(metric: _MetricScores, score_name: str) -> list[str]:
    decimals, comparison = metric.metric.decimals, metric.comparisons[score_name]
    interval = format_interval(comparison.interval.low, comparison.interval.high, decimals, sign="+")
    p_values = (f"{p_value:.4f}" for p_value in (comparison.p_bootstrap, comparison.p_randomization))
    return [metric.name, score_name, format_number(comparison.difference, decimals, sign="+"), interval, *p_values]


def _class_rows(metric: _MetricScores) -> list[list[str]]:
    return [
        [str(label), *(format_number(line[key], 4) for key in ("precision", "recall", "f1")), f"{line['support']:,.0f}"]
        for label, line in metric.metric.per_class(metric.stats).items()
    ]
