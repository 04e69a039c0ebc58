"""`qkv eval`: scores of a model on labeled examples, pairs or text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.eval_seq2seq import report_pairs
from qkv.cli.eval_task import ReportOptions, print_null_threshold, report_task
from qkv.cli.help import INPUT, OUTPUT
from qkv.cli.input_stream import parse_reader_options
from qkv.cli.options import (
    Delimiter,
    Device,
    Encoding,
    Json,
    LabelColumn,
    LengthPenalty,
    ModelName,
    NumBeams,
    OnTooLongOfRecipe,
    OnUnknown,
    ReaderOptions,
    SkipBad,
    TextColumn,
    TextPairColumn,
    Verbose,
    With,
    check_choice,
    check_num_beams,
    check_renamed,
    load_model,
)
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.checkpoints import ModelBundle
    from qkv.tasks.predictor import Predictor
    from qkv.train.evaluation_data import EvaluationData, Split

_DEFAULT_RESAMPLES = 1000
# options by the kinds of evaluation that they have an effect on
_KINDS_OF_OPTION = {
    "--text": ("task", "text"),
    "--text-pair": ("task",),
    "--label": ("task",),
    "--reader-option": ("task", "pairs"),
    "--delimiter": ("task", "pairs"),
    "--encoding": ("task", "pairs"),
    "--skip-bad": ("task",),
    "--report": ("task",),
    "--tune-null-threshold": ("task",),
    "--on-too-long": ("task", "pairs"),
    "--target": ("pairs",),
    "--num-beams": ("pairs",),
    "--length-penalty": ("pairs",),
    "--on-unknown": ("pairs",),
    "--metric": ("pairs",),
    "--free-running": ("pairs",),
    "--with": ("pairs",),
    "--memory-length": ("text",),
    "--output": ("task", "pairs"),
    "--num-resamples": ("task", "pairs"),
}
_KIND_NAMES = {"task": "a task", "pairs": "pairs of texts", "text": "text, by its perplexity"}
_COLUMN_OPTIONS = ("--text", "--text-pair", "--label", "--reader-option", "--delimiter", "--encoding")
_DATA_OPTIONS = ("--format", *_COLUMN_OPTIONS, "--target")

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
        show_default="as the training data, or by the suffix of the file",
        rich_help_panel=INPUT,
    ),
]
SplitName = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="SPLIT",
        help="Evaluate on this split of the recipe, or of the folder of --data (train, valid, test).",
        show_default="test, or the held-out text",
        rich_help_panel=INPUT,
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        "-m",
        metavar="NAME",
        help="Compute this metric of generated texts, such as bleu, rouge or token_error_rate (pairs; repeatable).",
        show_default="as in the recipe, or bleu and chrf",
        rich_help_panel=OUTPUT,
    ),
]
TuneNullThreshold = Annotated[
    bool,
    typer.Option(
        "--tune-null-threshold",
        help="Print the margin of no answer with the best F1 instead (question_answering).",
        rich_help_panel=OUTPUT,
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
MemoryLength = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Let a model with memory attend to the N preceding tokens of a text (text).",
        show_default="as in training",
        rich_help_panel=INPUT,
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
    model: ModelName,
    data: Data = None,
    split: SplitName = None,
    format: Format = None,
    text: TextColumn = None,
    text_pair: TextPairColumn = None,
    label: LabelColumn = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    reader_option: ReaderOptions = None,
    skip_bad: SkipBad = False,
    target: Target = None,
    on_too_long: OnTooLongOfRecipe = None,
    num_beams: NumBeams = None,
    length_penalty: LengthPenalty = None,
    on_unknown: OnUnknown = None,
    metric: Metrics = None,
    output: Output = None,
    report: ReportFolder = None,
    num_resamples: NumResamples = None,
    tune_null_threshold: TuneNullThreshold = False,
    free_running: FreeRunning = False,
    memory_length: MemoryLength = None,
    as_json: Json = False,
    with_: With = None,
    verbose: Verbose = False,
    device: Device = None,
) -> None:
    """Evaluate a model on test data.

    The metrics are those of the task with confidence intervals and confusions, error rates or BLEU of pairs, or the
    perplexity of text. A run is evaluated on the test data of its recipe, any model on --data.

    Pairs are scored by the recipe's test.metrics, against all references of a source. For text, --data is a file or
    folder of documents, whose format follows from its suffix, else from the recipe.

    Examples:
        qkv eval runs/g2p-demo --num-beams 4
        qkv eval runs/sentiment --split valid
        qkv eval runs/sentiment --data test.csv --report reports/sentiment
    """
    from qkv.train.evaluation_data import EvaluationData

    options: dict[str, Any] = {"--format": format, "--text": text, "--text-pair": text_pair, "--label": label}
    options |= {"--reader-option": reader_option, "--delimiter": delimiter, "--encoding": encoding}
    options |= {"--target": target, "--skip-bad": skip_bad, "--on-too-long": on_too_long, "--num-beams": num_beams}
    options |= {"--length-penalty": length_penalty, "--on-unknown": on_unknown, "--metric": metric, "--output": output}
    options |= {"--report": report, "--num-resamples": num_resamples, "--free-running": free_running}
    options |= {"--tune-null-threshold": tune_null_threshold, "--with": with_, "--memory-length": memory_length}
    _check_options(options, data, split)
    columns = {"text": text, "text_pair": text_pair, "label": label, "delimiter": delimiter, "encoding": encoding}
    reader_options = parse_reader_options(reader_option, **columns)
    split_name = None if split is None else _parse_split(split)
    source = EvaluationData(data, target, format, reader_options, split_name, skip_bad)
    settings = {"num_beams": num_beams, "length_penalty": length_penalty, "on_unknown": on_unknown}
    predictor, kind = _load([model, *(with_ or [])], device, source, options, settings | {"on_too_long": on_too_long})
    if verbose:
        print(predictor.describe_settings(), file=sys.stderr)
    resamples = _DEFAULT_RESAMPLES if num_resamples is None else num_resamples
    if kind == "text":
        _eval_text(predictor.bundle, source, memory_length, as_json)
    elif kind == "pairs":
        from qkv.train.evaluation import run_pair_evaluation

        results = run_pair_evaluation(predictor, source, metric, resamples=resamples, free_running=free_running)
        report_pairs(results, output, as_json)
    else:
        report_options = ReportOptions(resamples, report, output, as_json)
        _eval_task(predictor, source, report_options, tune_null_threshold=tune_null_threshold)


def _parse_split(name: str) -> Split:
    split: Split = check_choice("--split", name, "train", "valid", "test")
    return split


def _check_options(options: Mapping[str, Any], data: Path | None, split: str | None) -> None:
    """Refuse options of the data without data, and numbers out of range."""
    ignored = next((name for name in _DATA_OPTIONS if options[name]), None)
    if data is None and ignored is not None:
        raise InputError(f"{ignored} is for the file of --data; add it, or leave the option out")
    if options["--memory-length"] is not None and options["--memory-length"] < 1:
        raise InputError("--memory-length must be 1 or more")
    if options["--num-resamples"] is not None and options["--num-resamples"] < 0:
        raise InputError("--num-resamples must be 0 or more")
    if options["--tune-null-threshold"]:
        unused = next((name for name in ("--report", "--output", "--num-resamples") if options[name] is not None), None)
        if unused is not None:
            raise InputError(
                f"{unused} has no effect with --tune-null-threshold, which prints one number; leave it out"
            )
    check_num_beams(options["--num-beams"])
    check_renamed("--format", options["--format"])
    check_renamed("--split", split)


def _load(
    models: list[str], device: str | None, data: EvaluationData, options: Mapping[str, Any], settings: dict[str, Any]
) -> tuple[Predictor, str]:
    """Load a model with the settings of the command line, and return it with the kind of its evaluation."""
    from qkv.tasks.predictor import Predictor
    from qkv.train.evaluation import evaluation_kind

    predictor = Predictor(load_model(models[0], device))
    kind = evaluation_kind(predictor, data)
    for name, kinds in _KINDS_OF_OPTION.items():
        if options[name] not in (None, False) and kind not in kinds:
            if name == "--metric" and kind == "task":
                raise InputError("--metric is for generated texts; a task prints all its metrics, so leave it out")
            raise InputError(f"{name} has no effect here: this model is evaluated on {_KIND_NAMES[kind]}; leave it out")
    for name, choices in {
        "on_too_long": ("refuse", "truncate", "windows"),
        "on_unknown": ("refuse", "replace"),
    }.items():
        if settings[name] is not None:
            check_choice(f"--{name.replace('_', '-')}", settings[name], *choices)
    if len(models) > 1:
        members = [predictor, *(Predictor(load_model(model, device)) for model in models[1:])]
        predictor = Predictor.ensemble(members, names=models)
    chosen = {name: value for name, value in settings.items() if value is not None}
    predictor = predictor.with_settings(**chosen)
    predictor.check_used(list(chosen))
    return predictor, kind


def _eval_task(
    predictor: Predictor, data: EvaluationData, options: ReportOptions, *, tune_null_threshold: bool
) -> None:
    from qkv.train.evaluation import run_task_evaluation

    evaluation = run_task_evaluation(predictor, data)
    if tune_null_threshold:
        print_null_threshold(evaluation, options.as_json)
        return
    recipe: Any = predictor.recipe
    data_name = str(data.source)
    if data.source is None:
        split = data.split or "test"
        data_name = str(getattr(recipe.data, split, None) or f"{recipe.data.train}, {split} split")
    folder = predictor.bundle.folder
    report_task(evaluation, str(folder or ""), data_name, options)


def _eval_text(bundle: ModelBundle, data: EvaluationData, memory_length: int | None, as_json: bool) -> None:
    from qkv.recipe.schema import PretrainingRecipe
    from qkv.tasks.predictor import recipe_of_bundle
    from qkv.train.text_evaluation import evaluate_text

    recipe = recipe_of_bundle(bundle)
    text_recipe = recipe if isinstance(recipe, PretrainingRecipe) else None
    values = evaluate_text(bundle, text_recipe, data.path, data.format, data.split, data.columns, memory_length)
    if as_json:
        print(json.dumps(values))
        return
    print(f"tokens      {int(values['tokens']):>10,}")
    if "perplexity" in values:
        print(f"perplexity  {values['perplexity']:>10,.3f}   (of the predicted tokens; loss {values['loss']:.4f})")
    else:
        print(f"loss        {values['loss']:>10,.4f}")
    if "next_sentence_loss" in values:
        print(f"next-sentence loss {values['next_sentence_loss']:.4f}")
