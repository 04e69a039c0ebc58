"""The command that scores a run on examples: eval."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.eval_seq2seq import Seq2SeqEvalOptions, evaluate_seq2seq
from qkv.cli.options import Device, Json, LabelColumn, RunFolder, TextColumn, check_renamed, load_model
from qkv.cli.run_task import ReaderOptions, SkipBad, load_run_recipe, parse_reader_options
from qkv.cli.tables import format_interval, format_number, print_table
from qkv.data.filtering import filter_invalid, format_skipped
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.reports.report import Report
    from qkv.tasks.predictions import TaskPrediction

_MAX_CLASSES, _MAX_CONFUSIONS = 15, 10  # that are printed; all of them are in the report


Data = Annotated[Path | None, typer.Option("--data", "-d", help="What to score on; by default the recipe's test split.")]
Target = Annotated[Path | None, typer.Option(help="Pairs: the target file, where --data is one of two aligned files.")]
Format = Annotated[
    str | None,
    typer.Option(
        help="Of pairs aligned, tsv, scitldr, …; of text line_per_document, jsonl, …; of a task csv, squad, conll, …; "
        "by default as in training."
    ),
]
ReportFolder = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Tasks: write report.html and report.json there.")
]
NumResamples = Annotated[
    int | None, typer.Option(help="How many resamples the intervals rest on, by default 1000; 0: none.")
]
NumBeams = Annotated[int | None, typer.Option(help="Pairs: beam width; by default the recipe's.")]
LengthPenalty = Annotated[float | None, typer.Option(help="Pairs: as in predict; by default the recipe's.")]
FreeRunning = Annotated[
    bool, typer.Option("--free-running", help="Pairs: also the loss of the references with and without a teacher.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write what was predicted and what is right as TSV.")
]
OnTooLong = Annotated[str | None, typer.Option(help="Pairs: an input over the model's length: refuse or truncate.")]
OnUnknown = Annotated[str | None, typer.Option(help="Pairs: as in predict; by default the recipe's.")]


def eval_command(
    run: RunFolder,
    data: Data = None,
    target: Target = None,
    format: Format = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    reader_option: ReaderOptions = None,
    skip_bad: SkipBad = False,
    report: ReportFolder = None,
    num_resamples: NumResamples = None,
    num_beams: NumBeams = None,
    length_penalty: LengthPenalty = None,
    free_running: FreeRunning = False,
    output: Output = None,
    as_json: Json = False,
    on_too_long: OnTooLong = None,
    on_unknown: OnUnknown = None,
    device: Device = None,
) -> None:
    """A task's figures with intervals, classes and confusions; error rates, BLEU, ROUGE and so on of pairs, as their
    recipe has it (test.metrics); perplexity of held-out text.

    Of pairs any listed reference counts as right. Of text, --data is a file or folder of documents; its format is as
    its name ends, else as in training.
    """
    from qkv.recipe.schema import FinetuneRecipe, PretrainingRecipe

    recipe = load_run_recipe(run)
    pair_options: dict[str, Any] = {
        "--target": target,
        "--num-beams": num_beams,
        "--length-penalty": length_penalty,
        "--free-running": free_running or None,
    }
    pair_options |= {"--on-unknown": on_unknown, "--on-too-long": on_too_long}
    task_options: dict[str, Any] = {"--report": report, "--reader-option": reader_option, "--text": text, "--label": label}
    task_options |= {"--skip-bad": skip_bad or None}
    if isinstance(recipe, PretrainingRecipe):
        if any(value is not None for value in (*pair_options.values(), *task_options.values(), num_resamples, output)):
            reason = "of the options only --data and --format go with that"
            raise InputError(f"a model of text is scored by its perplexity; {reason}")
        _eval_text(run, recipe, data, format, as_json, device)
    elif isinstance(recipe, FinetuneRecipe):
        _reject_options(pair_options, "pairs, and this run learned a task")
        reader_options = parse_reader_options(reader_option, text=text, label=label)
        resamples = 1000 if num_resamples is None else num_resamples
        eval_options = EvalOptions(data, format, reader_options, skip_bad, resamples)
        _eval_task(run, recipe, eval_options, report, output, as_json, device)
    else:
        _reject_options(task_options, "tasks, and this run learned from pairs")
        seq2seq_options = Seq2SeqEvalOptions(
            data,
            target,
            format,
            num_beams,
            length_penalty,
            on_too_long,
            on_unknown,
            free_running=free_running,
            resamples=num_resamples,
        )
        evaluate_seq2seq(run, recipe, seq2seq_options, output, as_json, device)


def _reject_options(options: dict[str, Any], reason: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name} is for {reason}; leave it out")


# ---- tasks ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What the command line says of the examples."""

    data: Path | None
    format: str | None
    reader_options: dict[str, Any]
    skip_bad: bool
    resamples: int


def _eval_task(
    run: Path,
    recipe: Any,
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
        print(f"{report_folder / 'report.html'}: all of this and the worst examples; report.json: the same for programs")


def _build_report(run: Path, recipe: Any, options: EvalOptions, device: str | None) -> tuple[Report, list[list[str]]]:
    """The report, and each example's place with what was said of it and what is right."""
    from qkv.data.tagging_schemes import spans_to_tags
    from qkv.checkpoints.inputs import max_input_length
    from qkv.reports.error_analysis import ScoredExample
    from qkv.reports.report import build_report, is_labeled, read_learning_curves
    from qkv.tasks.base import input_processor
    from qkv.tasks.predictions import apply_null_threshold, predict_detailed
    from qkv.train.workloads.finetuning import make_task

    task = make_task(recipe)
    examples, data_name = _read_examples(recipe, options)
    notes: list[str] = []
    bundle = load_model(run, device)
    labels = bundle.model.spec.head.labels
    if options.skip_bad:
        processor, max_length = input_processor(task, bundle), max_input_length(bundle.model.spec)
        examples = filter_invalid(examples, lambda batch: task.featurize(batch, processor, labels, max_length))
        if not examples:
            raise InputError(f"{data_name}: nothing is left but bad examples, the first: {examples.skipped[0]}")
    notes += format_skipped(examples.skipped)
    predictions: list[TaskPrediction] = predict_detailed(task, bundle, examples)
    pairs = [
        (example, prediction)
        for example, prediction in zip(examples, predictions, strict=True)
        if is_labeled(example)
    ]
    gold = [task.gold(example) for example, _ in pairs]
    scored = apply_null_threshold(task, [prediction for _, prediction in pairs], gold)
    displayed = [
        spans_to_tags(example) if task.head_kind == "token" and hasattr(example, "spans") else example
        for example, _ in pairs
    ]
    scored_examples = [
        ScoredExample(example, prediction.prediction, label, prediction.error_confidence(label), prediction.span)
        for example, prediction, label in zip(displayed, scored, gold, strict=True)
    ]
    num_truncated = sum(prediction.truncated for prediction in predictions)
    if num_truncated:
        notes.append(f"{num_truncated:,} texts are longer than the model takes and were cut")
    primary_metric = recipe.validation.metric or task.primary_metric(labels)
    metrics = task.metrics(labels, [prediction.prediction for prediction in scored], gold) if gold else []
    result = build_report(
        task.name,
        scored_examples,
        metrics,
        labels,
        primary_metric,
        num_unlabeled=len(examples) - len(scored_examples),
        resamples=options.resamples,
    )
    result = dataclasses.replace(
        result,
        run=str(run),
        data=data_name,
        learning_curves=read_learning_curves(run / "log.jsonl", primary_metric),
        recipe=(run / "recipe.yaml").read_text(encoding="utf-8"),
        notes=tuple(notes),
    )
    return result, _prediction_rows(examples, predictions, task)


def _read_examples(recipe: Any, options: EvalOptions) -> tuple[Any, str]:
    """What is scored, and what it is called."""
    from qkv.train.workloads.finetuning import read_split

    data = recipe.data
    if options.data is None and (options.format is not None or options.reader_options):
        raise InputError("--format, --text, --label and --reader-option go with --data")
    data_name = str(data.test or f"{data.train}, test split")
    if options.data is not None:
        data_name = str(options.data)
        # the columns of one format mean nothing in another
        reader_options = (data.columns if options.format in (None, data.format) else {}) | options.reader_options
        format = options.format or data.format
        data = dataclasses.replace(data, test=str(options.data), format=format, columns=reader_options)
    return read_split(dataclasses.replace(data, skip_bad=data.skip_bad or options.skip_bad), "test"), data_name


def _prediction_rows(examples: Any, predictions: list[TaskPrediction], task: Any) -> list[list[str]]:
    from qkv.reports.report import is_labeled

    rows = [["location", "predicted", "probability", "gold"]]
    for example, prediction in zip(examples, predictions, strict=True):
        gold = task.gold(example) if is_labeled(example) else None
        gold_text = "" if gold is None else str(gold) if isinstance(gold, str | int | float) else " ".join(sorted(gold))
        if task.head_kind == "token" and gold is not None:
            gold_text = " ".join(gold)
        probability = "" if prediction.confidence is None else f"{prediction.confidence:.4f}"
        rows.append([example.location, prediction.text, probability, gold_text])
    return [[" ".join(cell.split()) for cell in row] for row in rows]


def _print_report(report: Report) -> None:
    if report.metrics:
        header = ["metric", "value", *(["95 % interval"] if report.resamples else [])]
        print_table(header, [_metric_row(name, metric) for name, metric in report.metrics.items()])
    if report.classes:
        print()
        rows = [
            [label, *(format_number(line[name], 4) for name in ("precision", "recall", "f1")), f"{line['support']:,.0f}"]
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
        print(f"{report.num_unlabeled:,} examples have no label: predicted only (-o FILE writes what was said of them)")
    for note in report.notes:
        print(note)


def _metric_row(name: str, metric: Any) -> list[str]:
    interval = [] if metric.ci_low is None else [format_interval(metric.ci_low, metric.ci_high, metric.decimals)]
    return [name, format_number(metric.value, metric.decimals), *interval]


# ---- text -----------------------------------------------------------------------------------------------------------


def _eval_text(run: Path, recipe: Any, data: Path | None, format: str | None, as_json: bool, device: str | None) -> None:
    from qkv.train.workloads.pretraining import evaluate_perplexity

    if data is None and format is not None:
        raise InputError("--format goes with --data")
    check_renamed("--format", format)
    values = evaluate_perplexity(load_model(run, device), recipe, None if data is None else [str(data)], format)
    if as_json:
        print(json.dumps(values))
        return
    print(f"tokens      {int(values['tokens']):>10,}")
    print(f"perplexity  {values['perplexity']:>10,.3f}   (of the tokens that are asked for; loss {values['loss']:.4f})")
    if "next_sentence_loss" in values:
        print(f"next-sentence loss {values['next_sentence_loss']:.4f}")
