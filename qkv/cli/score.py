"""`qkv score`: metrics of hypothesis files against reference files, from any system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.help import INPUT, OUTPUT
from qkv.cli.options import Device, Json, OnTooLong, check_choice, check_seed, load_model
from qkv.cli.score_output import MetricScores, Resampling, ScoreResults, print_results
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.metrics.registry import AnyMetric, MetricOptions
    from qkv.metrics.score_files import ScoringData, ScoringFiles

_CONFIDENCE = 0.95
_METRIC_OPTIONS, _SIGNIFICANCE = "Metric options", "Confidence intervals and comparison"
Metrics = Annotated[
    list[str],
    typer.Option(
        "--metric",
        "-m",
        metavar="NAME",
        help="Compute this metric, such as bleu, f1 or rouge (docs/metrics.md lists all; repeatable).",
        rich_help_panel=INPUT,
    ),
]
Hypotheses = Annotated[
    Path, typer.Option("--hyp", metavar="FILE", help="Score the outputs in this file.", rich_help_panel=INPUT)
]
References = Annotated[
    list[Path],
    typer.Option(
        "--ref",
        metavar="FILE",
        help="Compare with the references in this file (repeatable for several references per text).",
        rich_help_panel=INPUT,
    ),
]
HypothesisColumn = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Read the outputs from this column of a table, given by its name or by its number from 1.",
        rich_help_panel=INPUT,
    ),
]
ReferenceColumn = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Read the references from this column of a table, given by its name or by its number from 1.",
        rich_help_panel=INPUT,
    ),
]
LabelSeparator = Annotated[
    str,
    typer.Option(
        metavar="TEXT", help="Split the labels of one example at this text (multilabel_f1).", rich_help_panel=INPUT
    ),
]
Lowercase = Annotated[
    bool,
    typer.Option("--lowercase", help="Ignore case (bleu, chrf, wer, cer).", rich_help_panel=_METRIC_OPTIONS),
]
Tokenize = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Tokenize with 13a, intl, char or zh, or with none if the text is tokenized already (bleu).",
        rich_help_panel=_METRIC_OPTIONS,
    ),
]
MultiReference = Annotated[
    str,
    typer.Option(
        "--multi-reference",
        metavar="NAME",
        help="Use the best or the mean score over several references (rouge).",
        rich_help_panel=_METRIC_OPTIONS,
    ),
]
UseStemmer = Annotated[
    bool,
    typer.Option(
        "--use-stemmer", help="Compare Porter stems instead of words (rouge).", rich_help_panel=_METRIC_OPTIONS
    ),
]
SentenceSeparator = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="Split a text into sentences at this text, such as <q>, for ROUGE-Lsum (rouge).",
        show_default="line break",
        rich_help_panel=_METRIC_OPTIONS,
    ),
]
Scheme = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Parse tags leniently (lenient, as conlleval) or strictly by a scheme (bio, bioes) (entity_f1).",
        rich_help_panel=_METRIC_OPTIONS,
    ),
]
PositiveLabel = Annotated[
    str | None,
    typer.Option(
        metavar="LABEL",
        help="Compute the F1 of this label only, as for MRPC and QQP (f1).",
        rich_help_panel=_METRIC_OPTIONS,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LABEL", help="Leave out this label, such as O (f1; repeatable).", rich_help_panel=_METRIC_OPTIONS
    ),
]
Encoder = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="Embed tokens with this encoder (bertscore).", rich_help_panel=_METRIC_OPTIONS
    ),
]
Layer = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Use the output of this layer, where 0 is the embedding layer (bertscore).",
        rich_help_panel=_METRIC_OPTIONS,
    ),
]
Idf = Annotated[
    bool,
    typer.Option(
        "--idf", help="Weight tokens by inverse document frequency (bertscore).", rich_help_panel=_METRIC_OPTIONS
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Compare with the outputs of another system in this file by paired significance tests.",
        rich_help_panel=_SIGNIFICANCE,
    ),
]
NumResamples = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Draw N resamples for intervals and tests, or compute none with 0.",
        rich_help_panel=_SIGNIFICANCE,
    ),
]
Confidence = Annotated[
    float | None,
    typer.Option(
        metavar="LEVEL",
        help="Set the confidence level of the intervals.",
        show_default="0.95",
        rich_help_panel=_SIGNIFICANCE,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Set the random seed of the resampling.",
        show_default="0",
        rich_help_panel=_SIGNIFICANCE,
    ),
]
PerClass = Annotated[
    bool,
    typer.Option(
        "--per-class", help="Print precision, recall and F1 of each label or entity type.", rich_help_panel=OUTPUT
    ),
]
PerExample = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the scores of each example to this TSV file.", rich_help_panel=OUTPUT),
]


def score(
    metric: Metrics,
    hyp: Hypotheses,
    ref: References,
    hyp_column: HypothesisColumn = None,
    ref_column: ReferenceColumn = None,
    label_separator: LabelSeparator = ",",
    on_too_long: OnTooLong = "refuse",
    lowercase: Lowercase = False,
    tokenize: Tokenize = "13a",
    multi_reference: MultiReference = "best",
    use_stemmer: UseStemmer = False,
    sentence_separator: SentenceSeparator = "\n",
    scheme: Scheme = "lenient",
    positive_label: PositiveLabel = None,
    ignore: Ignore = None,
    model: Encoder = None,
    layer: Layer = None,
    idf: Idf = False,
    baseline: Baseline = None,
    num_resamples: NumResamples = 1000,
    confidence: Confidence = None,
    seed: Seed = None,
    per_class: PerClass = False,
    per_example: PerExample = None,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Score a file of outputs against references.

    Files have one text, label or number per line, or are tables, CoNLL files (entity_f1) or SQuAD JSON (squad). The
    outputs can also be a file of qkv predict: JSON lines (--json) or a .csv, .tsv, .jsonl or .parquet file (-o).

    Examples:
        qkv score --metric bleu --metric chrf --hyp output.de --ref test.de
        qkv score -m f1 --hyp a.txt --baseline b.txt --ref gold.txt
    """
    from qkv.metrics.entities import ENTITY_SCHEMES
    from qkv.metrics.registry import MetricOptions, check_packages
    from qkv.metrics.score_files import ScoringFiles

    options = MetricOptions(
        lowercase=lowercase,
        tokenize=tokenize,
        multi_reference=check_choice("--multi-reference", multi_reference, "best", "mean"),
        use_stemmer=use_stemmer,
        sentence_separator=sentence_separator,
        scheme=check_choice("--scheme", scheme, *ENTITY_SCHEMES),
        positive_label=positive_label,
        ignore=tuple(ignore or ()),
        layer=layer,
        idf=idf,
        on_too_long=check_choice("--on-too-long", on_too_long, "refuse", "truncate"),
    )
    metrics = list(dict.fromkeys(metric))
    is_set = {"label_separator": label_separator != ",", "model": model is not None, "device": device is not None}
    _check_options(metrics, options, is_set)
    check_packages(metrics)
    resampling = _make_resampling(num_resamples, seed, confidence)
    tags = options.scheme if "entity_f1" in metrics else None
    files = ScoringFiles(hyp, tuple(ref), baseline, hyp_column, ref_column, label_separator, tags)
    results = _score_metrics(metrics, files, options, (model, device), resampling)
    if per_class and not any(hasattr(scored.metric, "per_class") for scored in results.metrics):
        raise InputError(f"--per-class has no effect on {', '.join(metrics)}; it is for f1 and the metrics of tags")
    print_results(results, per_example, per_class, as_json)


def _make_resampling(num_resamples: int, seed: int | None, confidence: float | None) -> Resampling:
    check_seed(seed)
    if num_resamples < 0 or not 0 < (_CONFIDENCE if confidence is None else confidence) < 1:
        raise InputError("--num-resamples must be 0 or more, and --confidence between 0 and 1")
    if num_resamples == 0 and (seed is not None or confidence is not None):
        option = "--confidence" if seed is None else "--seed"
        raise InputError(f"{option} has no effect without resamples (--num-resamples 0); leave it out")
    return Resampling(num_resamples, seed or 0, _CONFIDENCE if confidence is None else confidence)


def _check_options(metrics: list[str], options: MetricOptions, other_options: dict[str, bool]) -> None:
    """Refuse an option that none of the metrics uses."""
    from qkv.metrics.registry import METRICS, MetricOptions

    accepted = {option for name in metrics for option in METRICS.get(name).options}
    defaults = MetricOptions()
    changed = [name for name in vars(defaults) if getattr(options, name) != getattr(defaults, name)]
    for name in [*changed, *(name for name, is_set in other_options.items() if is_set)]:
        if name not in accepted:
            metric_names = ", ".join(metric for metric in METRICS.names() if name in METRICS.get(metric).options)
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} has no effect on {', '.join(metrics)}; it is for {metric_names}")


def _score_metrics(
    metrics: list[str],
    files: ScoringFiles,
    options: MetricOptions,
    encoder: tuple[str | None, str | None],
    resampling: Resampling,
) -> ScoreResults:
    import dataclasses

    from qkv.metrics.registry import METRICS
    from qkv.metrics.score_files import read_scoring_files

    data_by_kind: dict[str, ScoringData] = {}
    scored = []
    for name in metrics:  # read all files before computing, so that an invalid one is reported at once
        kind = METRICS.get(name).data_kind
        if kind not in data_by_kind:
            data_by_kind[kind] = read_scoring_files(kind, files)
    model, device = encoder
    if model is not None:
        options = dataclasses.replace(options, model=load_model(model, device), model_name=model)
    for name in metrics:
        data = data_by_kind[METRICS.get(name).data_kind]
        systems = (data.hypotheses, data.references, *([data.baseline] if data.baseline is not None else []))
        scored.append(_score_metric(name, METRICS.get(name).make(options, systems), data, resampling))
    notes = list(dict.fromkeys(note for data in data_by_kind.values() for note in data.notes))
    return ScoreResults(scored, len(next(iter(data_by_kind.values())).hypotheses), resampling, notes)


def _score_metric(name: str, metric: AnyMetric, data: ScoringData, resampling: Resampling) -> MetricScores:
    from qkv.metrics.significance import bootstrap, compare

    stats = metric.statistics(data.hypotheses, data.references)
    signature = metric.signature(data.references)
    scores = metric.compute(stats)
    intervals = bootstrap(metric, stats, **resampling.kwargs) if resampling.resamples else {}
    if data.baseline is None:
        return MetricScores(name, metric, signature, stats, scores, intervals)
    baseline_stats = metric.statistics(data.baseline, data.references)
    comparisons = compare(metric, stats, baseline_stats, **resampling.kwargs) if resampling.resamples else {}
    return MetricScores(name, metric, signature, stats, scores, intervals, metric.compute(baseline_stats), comparisons)
