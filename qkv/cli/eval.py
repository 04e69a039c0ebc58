"""`qkv eval`: scores of a run on labeled examples, pairs or held-out text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.eval_seq2seq import Seq2SeqEvalOptions, evaluate_seq2seq
from qkv.cli.help import INPUT, OUTPUT
from qkv.cli.input_stream import parse_reader_options
from qkv.cli.options import (
    Device,
    Json,
    LabelColumn,
    LengthPenalty,
    NumBeams,
    OnTooLongOfRecipe,
    OnUnknown,
    ReaderOptions,
    RunFolder,
    SkipBad,
    TextColumn,
    check_renamed,
    load_model,
)
from qkv.cli.tables import print_table
from qkv.data.filtering import filter_invalid, format_skipped
from qkv.errors import InputError
from qkv.reports.numbers import format_interval, format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qkv.data.examples import Examples
    from qkv.recipe import Recipe
    from qkv.recipe.schema import FinetuneRecipe, PretrainingRecipe
    from qkv.reports.error_analysis import ScoredExample
    from qkv.reports.report import Report
    from qkv.tasks.base import Task
    from qkv.tasks.predictions import TaskPrediction
    from qkv.tasks.predictor import Predictor

_MAX_CLASSES, _MAX_CONFUSIONS = 15, 10  # rows that are printed; the report has all of them

Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        metavar="PATH",
        help="Evaluate on this file or folder.",
        show_default="test split of the recipe",
        rich_help_panel=INPUT,
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Read --data in this format, such as csv, squad or conll for tasks, aligned or tsv for pairs, and jsonl "
        "or line_per_document for text.",
        show_default="as the training data",
        rich_help_panel=INPUT,
    ),
]
NumResamples = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Draw N bootstrap resamples for the intervals, or compute none with 0.",
        show_default="1000",
        rich_help_panel=OUTPUT,
    ),
]
Target = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read the targets from this file, which is aligned with the sources in --data (pairs).",
        rich_help_panel=INPUT,
    ),
]
FreeRunning = Annotated[
    bool,
    typer.Option(
        "--free-running",
        help="Report the loss of the references with and without teacher forcing as well (pairs).",
        rich_help_panel=OUTPUT,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write predictions and labels to this TSV file.", rich_help_panel=OUTPUT
    ),
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="DIR",
        help="Write report.html and report.json of a task to this folder.",
        rich_help_panel=OUTPUT,
    ),
]


def eval_command(
    run: RunFolder,
    data: Data = None,
    format: Format = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    reader_option: ReaderOptions = None,
    skip_bad: SkipBad = False,
    target: Target = None,
    on_too_long: OnTooLongOfRecipe = None,
    num_beams: NumBeams = None,
    length_penalty: LengthPenalty = None,
    on_unknown: OnUnknown = None,
    output: Output = None,
    report: ReportFolder = None,
    num_resamples: NumResamples = None,
    free_running: FreeRunning = False,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Evaluate a run on test data.

    The metrics are those of the task with confidence intervals and confusions, error rates or BLEU of pairs, or the
    perplexity of text.

    Pairs are scored by the recipe's test.metrics, against all references of a source. For text, --data is a file or
    folder of documents, whose format follows from its suffix, else from the recipe.

    Examples:
        qkv eval runs/g2p-demo --num-beams 4
        qkv eval runs/sentiment --data test.csv --report reports/sentiment
    """
    from qkv.recipe.schema import FinetuneRecipe, PretrainingRecipe

    recipe = _load_recipe(run)
    pair_options: dict[str, Any] = {"--target": target, "--num-beams": num_beams, "--length-penalty": length_penalty}
    pair_options |= {"--on-unknown": on_unknown, "--on-too-long": on_too_long, "--free-running": free_running or None}
    task_options: dict[str, Any] = {"--report": report, "--text": text, "--label": label}
    task_options |= {"--reader-option": reader_option, "--skip-bad": skip_bad or None}
    if isinstance(recipe, PretrainingRecipe):
        if any(value is not None for value in (*pair_options.values(), *task_options.values(), num_resamples, output)):
            raise InputError("a pretrained model is scored by its perplexity; use --data and --format only")
        _eval_text(run, recipe, data, format, as_json, device)
    elif isinstance(recipe, FinetuneRecipe):
        _reject_options(pair_options, "pairs, and this run was trained on a task")
        reader_options = parse_reader_options(reader_option, text=text, label=label)
        resamples = 1000 if num_resamples is None else num_resamples
        eval_options = EvalOptions(data, format, reader_options, skip_bad, resamples)
        _eval_task(run, recipe, eval_options, report, output, as_json, device)
    else:
        _reject_options(task_options, "tasks, and this run was trained on pairs")
        search = (num_beams, length_penalty, on_too_long, on_unknown)
        seq2seq_options = Seq2SeqEvalOptions(data, target, format, *search, free_running, num_resamples)
        evaluate_seq2seq(run, recipe, seq2seq_options, output, as_json, device)


def _load_recipe(run: Path) -> Recipe:
    """Return the recipe that a run was trained with."""
    from qkv.recipe import RECIPE_FILE, read_run_recipe

    if not run.is_dir():
        raise InputError(f"{run}: no such folder; train a model first (qkv train RECIPE), or check the path")
    return read_run_recipe(run / RECIPE_FILE)


def _reject_options(options: dict[str, Any], reason: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name} is for {reason}; leave it out")


# ---- tasks ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Options of the test data of a task."""

    data: Path | None  # None: the recipe's test split
    format: str | None  # None: the recipe's format
    reader_options: dict[str, Any]
    skip_bad: bool
    resamples: int


def _eval_task(
    run: Path,
    recipe: FinetuneRecipe,
    options: EvalOptions,
    report_folder: Path | None,
    output: Path | None,
    as_json: bool,
    device: str | None,
) -> None:
    from qkv.files import atomic_write_text
    from qkv.reports.html import render_html
    from qkv.reports.report import to_dict

    if options.resamples < 0:
        raise InputError("--num-resamples is 0 or more")
    report, rows = _build_report(run, recipe, options, device)
    text = json.dumps(to_dict(report), ensure_ascii=False, indent=None if report_folder is None else 1)
    if output is not None:
        atomic_write_text(output, "".join("\t".join(row) + "\n" for row in rows))
    if report_folder is not None:
        atomic_write_text(report_folder / "report.json", text + "\n")
        atomic_write_text(report_folder / "report.html", render_html(report))
    if as_json:
        print(text)
        return
    _print_report(report)
    if report_folder is not None:
        print(f"{report_folder / 'report.html'}: the report with the worst examples; report.json: the same as JSON")


def _build_report(
    run: Path, recipe: FinetuneRecipe, options: EvalOptions, device: str | None
) -> tuple[Report, list[list[str]]]:
    """Return the report, and one row per example with its location, prediction and label."""
    from qkv.recipe import RECIPE_FILE
    from qkv.reports.report import build_report, read_learning_curves
    from qkv.tasks.base import make_metrics, require_head
    from qkv.tasks.predictor import Predictor
    from qkv.tasks.recipe_task import make_task

    task = make_task(recipe)
    examples, data_name = _read_examples(recipe, options)
    predictor = Predictor(load_model(run, device), task)
    if options.skip_bad:
        examples = _filter_bad(predictor, task, examples, data_name)
    sentences = [task.from_example(example) for example in examples]
    predictions = predictor(sentences)
    labeled = [
        (example, prediction) for example, prediction in zip(sentences, predictions, strict=True) if example.is_labeled
    ]
    golds = [task.gold(example) for example, _ in labeled]
    scored = task.predictions_for_scoring([prediction for _, prediction in labeled], golds)
    labels = task.output_names(require_head(task, predictor.bundle.model.spec))
    primary_metric = recipe.validation.metric or task.primary_metric(labels)
    report = build_report(
        task.name,
        _scored_examples([example for example, _ in labeled], scored, golds),
        make_metrics(task, labels, [prediction.prediction for prediction in scored], golds, primary_metric)
        if golds
        else [],
        labels,
        primary_metric,
        num_unlabeled=len(examples) - len(labeled),
        resamples=options.resamples,
    )
    report = dataclasses.replace(
        report,
        run=str(run),
        data=data_name,
        learning_curves=read_learning_curves(run / "log.jsonl", primary_metric),
        recipe=(run / RECIPE_FILE).read_text(encoding="utf-8"),
        notes=tuple(format_skipped(examples.skipped) + _truncation_notes(predictions)),
    )
    return report, _prediction_rows(sentences, predictions, task)


def _filter_bad(predictor: Predictor, task: Task[Any], examples: Examples[Any], data_name: str) -> Examples[Any]:
    """Leave out examples that the model cannot read."""
    from qkv.checkpoints.inputs import max_input_length
    from qkv.tasks.base import input_processor, require_head

    bundle = predictor.bundle
    processor, max_length = input_processor(task, bundle), max_input_length(bundle.model.spec)
    labels = task.output_names(require_head(task, bundle.model.spec))
    valid = filter_invalid(examples, lambda batch: task.featurize(batch, processor, labels, max_length))
    if not valid:
        raise InputError(f"{data_name}: all examples are bad, the first: {valid.skipped[0]}")
    return valid


def _scored_examples(
    examples: Sequence[Any], predictions: Sequence[TaskPrediction], golds: Sequence[Any]
) -> list[ScoredExample]:
    from qkv.reports.error_analysis import ScoredExample

    return [
        ScoredExample(example, prediction.prediction, gold, prediction.error_probability(gold), prediction.span)
        for example, prediction, gold in zip(examples, predictions, golds, strict=True)
    ]


def _truncation_notes(predictions: Sequence[TaskPrediction]) -> list[str]:
    num_truncated = sum(prediction.truncated for prediction in predictions)
    return [f"{num_truncated:,} texts were truncated to the model's maximum length"] if num_truncated else []


def _read_examples(recipe: FinetuneRecipe, options: EvalOptions) -> tuple[Examples[Any], str]:
    """Return the test examples and a name for them."""
    from qkv.train.workloads.task_data import read_split

    data = recipe.data
    if options.data is None and (options.format is not None or options.reader_options):
        raise InputError("--format, --text, --label and --reader-option go with --data")
    data_name = str(data.test or f"{data.train}, test split")
    if options.data is not None:
        data_name = str(options.data)
        # columns of one format are not those of another
        reader_options = (data.columns if options.format in (None, data.format) else {}) | options.reader_options
        format = options.format or data.format
        data = dataclasses.replace(data, test=str(options.data), format=format, columns=reader_options)
    return read_split(dataclasses.replace(data, skip_bad=data.skip_bad or options.skip_bad), "test"), data_name


def _prediction_rows(
    examples: Sequence[Any], predictions: Sequence[TaskPrediction], task: Task[Any]
) -> list[list[str]]:
    rows = [["location", "predicted", "probability", "gold"]]
    for example, prediction in zip(examples, predictions, strict=True):
        gold_text = task.format_gold(task.gold(example)) if example.is_labeled else ""
        probability = "" if prediction.probability is None else f"{prediction.probability:.4f}"
        rows.append([example.location, prediction.text, probability, gold_text])
    return [[" ".join(cell.split()) for cell in row] for row in rows]


def _print_report(report: Report) -> None:
    if report.metrics:
        header = ["metric", "value", *(["95 % interval"] if report.resamples else [])]
        print_table(header, [_metric_row(name, metric) for name, metric in report.metrics.items()])
    if report.classes:
        print()
        rows = [
            [
                label,
                *(format_number(line[name], 4) for name in ("precision", "recall", "f1")),
                f"{line['support']:,.0f}",
            ]
            for label, line in report.worst_classes()
        ]
        print_table(["class", "precision", "recall", "f1", "support"], rows[:_MAX_CLASSES])
        if len(rows) > _MAX_CLASSES:
            print(f"the {_MAX_CLASSES} classes with the lowest F1 of {len(rows)}; --report DIR or --json has all")
    confusions = report.confusion_matrix.mistakes() if report.confusion_matrix else []
    if confusions:
        print()
        rows = [[a, b, f"{n:,}"] for a, b, n in confusions[:_MAX_CONFUSIONS]]
        print_table(["gold", "predicted", "count"], rows, text_columns=2)
    print()
    summary = f"{report.num_examples:,} examples"
    if report.resamples:
        summary += f"; 95 % intervals from {report.resamples:,} resamples"
    if report.num_examples:
        print(summary)
    if report.num_unlabeled:
        print(f"{report.num_unlabeled:,} examples have no label and are not scored (-o FILE writes their predictions)")
    for note in report.notes:
        print(note)


def _metric_row(name: str, metric: Any) -> list[str]:
    interval = [] if metric.ci_low is None else [format_interval(metric.ci_low, metric.ci_high, metric.decimals)]
    return [name, format_number(metric.value, metric.decimals), *interval]


# ---- text -----------------------------------------------------------------------------------------------------------


def _eval_text(
    run: Path, recipe: PretrainingRecipe, data: Path | None, format: str | None, as_json: bool, device: str | None
) -> None:
    from qkv.train.workloads.pretraining import evaluate_perplexity

    if data is None and format is not None:
        raise InputError("--format goes with --data")
    check_renamed("--format", format)
    values = evaluate_perplexity(load_model(run, device), recipe, None if data is None else [str(data)], format)
    if as_json:
        print(json.dumps(values))
        return
    print(f"tokens      {int(values['tokens']):>10,}")
    print(f"perplexity  {values['perplexity']:>10,.3f}   (of the predicted tokens; loss {values['loss']:.4f})")
    if "next_sentence_loss" in values:
        print(f"next-sentence loss {values['next_sentence_loss']:.4f}")
