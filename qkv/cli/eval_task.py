"""`qkv eval` of a task: a report with metrics, classes and confusions, and the predictions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.tables import print_table
from qkv.data.filtering import format_skipped
from qkv.errors import InputError
from qkv.reports.numbers import format_interval, format_number

if TYPE_CHECKING:
    from qkv.reports.error_analysis import ScoredExample
    from qkv.reports.report import Report
    from qkv.tasks.base import Task
    from qkv.tasks.evaluation import TaskEvaluation
    from qkv.tasks.predictions import TaskPrediction

_MAX_CLASSES, _MAX_CONFUSIONS = 15, 10  # rows that are printed; the report has all of them


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What is printed and written of the evaluation of a task."""

    resamples: int
    folder: Path | None  # of report.html and report.json
    output: Path | None  # TSV file of the predictions
    as_json: bool


def report_task(evaluation: TaskEvaluation, model: str, data_name: str, options: ReportOptions) -> None:
    """Print the report of a task, and write it and the predictions to files."""
    from qkv.files import atomic_write_text
    from qkv.reports.html import render_html
    from qkv.reports.report import to_dict

    report = _make_report(evaluation, Path(model), data_name, options.resamples)
    text = json.dumps(to_dict(report), ensure_ascii=False, indent=None if options.folder is None else 1)
    if options.output is not None:
        rows = _prediction_rows(evaluation.examples, evaluation.predictions, evaluation.task)
        atomic_write_text(options.output, "".join("\t".join(row) + "\n" for row in rows))
    if options.folder is not None:
        atomic_write_text(options.folder / "report.json", text + "\n")
        atomic_write_text(options.folder / "report.html", render_html(report))
    if options.as_json:
        print(text)
        return
    _print_report(report)
    if options.folder is not None:
        print(f"{options.folder / 'report.html'}: the report with the worst examples; report.json: the same as JSON")


def _make_report(evaluation: TaskEvaluation, folder: Path, data_name: str, resamples: int) -> Report:
    from qkv.recipe import RECIPE_FILE
    from qkv.reports.report import build_report, read_learning_curves

    report = build_report(
        evaluation.task.name,
        _scored_examples(evaluation.labeled_examples, evaluation.scored_predictions, evaluation.golds),
        evaluation.metrics,
        evaluation.labels,
        evaluation.primary_metric,
        num_unlabeled=evaluation.num_unlabeled,
        resamples=resamples,
    )
    recipe_file = folder / RECIPE_FILE
    is_run = recipe_file.is_file()
    return dataclasses.replace(
        report,
        run=str(folder),
        data=data_name,
        learning_curves=read_learning_curves(folder / "log.jsonl", evaluation.primary_metric) if is_run else {},
        recipe=recipe_file.read_text(encoding="utf-8") if is_run else "",
        notes=tuple(_notes(evaluation)),
    )


def _notes(evaluation: TaskEvaluation) -> list[str]:
    notes = [*evaluation.notes, *format_skipped(evaluation.skipped)]
    if evaluation.num_truncated:
        notes.append(f"{evaluation.num_truncated:,} texts were truncated to the model's maximum length")
    return notes


def print_null_threshold(evaluation: TaskEvaluation, as_json: bool) -> None:
    """Print the margin of no answer that gives the best F1 on the examples."""
    from qkv.tasks.question_answering import QuestionAnswering, best_null_threshold

    if not isinstance(evaluation.task, QuestionAnswering):
        raise InputError(f"--tune-null-threshold: is for question_answering, not {evaluation.task.name}; leave it out")
    if all(evaluation.golds):
        raise InputError("--tune-null-threshold: every question has an answer; give data with unanswerable ones")
    predictions = [prediction.prediction for prediction in evaluation.scored_predictions]
    best_f1, threshold = best_null_threshold(predictions, evaluation.labeled_examples)
    if as_json:
        print(json.dumps({"null_score_diff_threshold": threshold, "f1": best_f1, "examples": len(predictions)}))
        return
    print(f"best F1 {best_f1:.2f} at a margin of no answer of {threshold:.4f} ({len(predictions):,} questions)")
    print(f"use it with qkv predict --threshold {threshold:.4f}, or task.null_score_diff_threshold in a recipe")


def _scored_examples(
    examples: Sequence[Any], predictions: Sequence[TaskPrediction], golds: Sequence[Any]
) -> list[ScoredExample]:
    from qkv.reports.error_analysis import ScoredExample

    return [
        ScoredExample(example, prediction.prediction, gold, prediction.error_probability(gold), prediction.span)
        for example, prediction, gold in zip(examples, predictions, golds, strict=True)
    ]


def _prediction_rows(
    examples: Sequence[Any], predictions: Sequence[TaskPrediction], task: Task[Any]
) -> list[list[str]]:
    rows = [["location", "prediction", "probability", "label"]]
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
