"""`qkv prompt`: classification with a language model by prompting, without training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.help import INPUT, OUTPUT
from qkv.cli.input_stream import parse_reader_options
from qkv.cli.options import (
    Delimiter,
    Device,
    Encoding,
    Json,
    LabelColumn,
    ModelName,
    OnTooLong,
    ReaderOptions,
    SkipBad,
    TextColumn,
    TextPairColumn,
    check_choice,
    check_seed,
    load_model,
)
from qkv.cli.tables import print_table
from qkv.data.filtering import filter_invalid, format_skipped
from qkv.errors import InputError
from qkv.reports.numbers import format_interval, format_number

if TYPE_CHECKING:
    from qkv.data.examples import Examples, TextExample
    from qkv.generation.prompting import PromptPrediction

_PROMPT = "Prompt"
Data = Annotated[
    Path,
    typer.Option(
        "--data", "-d", metavar="FILE", help="Classify the labeled examples of this file.", rich_help_panel=INPUT
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Read --data in this format, such as csv, jsonl or glue:SST-2.",
        show_default="by the suffix of the file",
        rich_help_panel=INPUT,
    ),
]
MaxExamples = Annotated[
    int | None,
    typer.Option(metavar="N", help="Classify at most N examples, evenly spaced in the file.", rich_help_panel=INPUT),
]
Template = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help=r"Format an example with {text}, {text_pair} for pairs, {label} after them, and \n for a line break.",
        rich_help_panel=_PROMPT,
    ),
]
Verbalizers = Annotated[
    list[str] | None,
    typer.Option(
        "--verbalizer",
        metavar="LABEL=WORD",
        help="Write WORD instead of the name of a label (repeatable).",
        rich_help_panel=_PROMPT,
    ),
]
Shots = Annotated[int, typer.Option(metavar="N", help="Put N demonstrations into the prompt.", rich_help_panel=_PROMPT)]
Train = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw the demonstrations from the labeled examples of this file.",
        show_default="from --data",
        rich_help_panel=_PROMPT,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Set the random seed of the demonstrations (--shots).",
        show_default="0",
        rich_help_panel=_PROMPT,
    ),
]
LengthNormalize = Annotated[
    bool,
    typer.Option(
        "--length-normalize",
        help="Rank labels by log-likelihood per token instead of in total.",
        rich_help_panel=_PROMPT,
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Divide the label probabilities by those of content-free inputs.",
        rich_help_panel=_PROMPT,
    ),
]
NumResamples = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Draw N bootstrap resamples for the confidence intervals, or compute none with 0.",
        rich_help_panel=OUTPUT,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write predictions and labels to this TSV file.", rich_help_panel=OUTPUT
    ),
]


def prompt(
    model: ModelName,
    data: Data,
    format: Format = None,
    text: TextColumn = None,
    text_pair: TextPairColumn = None,
    label: LabelColumn = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    reader_option: ReaderOptions = None,
    skip_bad: SkipBad = False,
    max_examples: MaxExamples = None,
    on_too_long: OnTooLong = "refuse",
    template: Template = r"Text: {text}\nLabel: {label}\n\n",
    verbalizer: Verbalizers = None,
    shots: Shots = 0,
    train: Train = None,
    seed: Seed = None,
    length_normalize: LengthNormalize = False,
    calibrate: Calibrate = False,
    num_resamples: NumResamples = 1000,
    output: Output = None,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Classify by prompting a language model, without training.

    The prediction is the label that the model gives the highest likelihood as the continuation of the prompt.
    Demonstrations are drawn from --train, or from --data, which is then scored without them.

    Example:
        qkv prompt gpt2 --data reviews.csv --shots 4 --verbalizer 1=good
    """
    from qkv.data.examples import TextExample
    from qkv.data.formats import infer_format
    from qkv.generation.prompting import PromptConfig, predict_with_prompt

    if num_resamples < 0 or shots < 0 or (max_examples is not None and max_examples < 1):
        raise InputError("--num-resamples and --shots are 0 or more, --max-examples is 1 or more")
    check_seed(seed)
    if seed is not None and not shots:
        raise InputError("--seed draws the demonstrations of --shots; add it, or leave the option out")
    config = PromptConfig(
        template=template.replace("\\n", "\n").replace("\\t", "\t"),
        verbalizer=_parse_verbalizers(verbalizer),
        length_normalize=length_normalize,
        calibrate=calibrate,
        on_too_long=check_choice("--on-too-long", on_too_long, "refuse", "truncate"),
    )
    columns = {"text": text, "text_pair": text_pair, "label": label, "delimiter": delimiter, "encoding": encoding}
    reader_options = parse_reader_options(reader_option, **columns)
    sampling = (shots, seed or 0)
    format_name = format or infer_format(TextExample, data)
    examples = _read_examples(format_name, (data, train), reader_options, sampling, skip_bad)
    queries, demonstrations, labels, skipped = examples
    _check_verbalizer(config.verbalizer, labels)
    if max_examples is not None and max_examples < len(queries):
        queries = [queries[i * len(queries) // max_examples] for i in range(max_examples)]
    predictions = predict_with_prompt(load_model(model, device), queries, labels, demonstrations, config)
    if output is not None:
        _write_predictions(output, queries, predictions)
    _print_metrics(queries, predictions, num_resamples, as_json)
    if not as_json and skipped:
        print("\n".join(skipped))


def _parse_verbalizers(options: list[str] | None) -> dict[str, str]:
    verbalizers = {}
    for option in options or []:
        label, equals, word = option.partition("=")
        if not equals or not label or not word.strip():
            raise InputError(f"--verbalizer: '{option}' is not LABEL=WORD, such as 1=positive")
        verbalizers[label] = word
    return verbalizers


def _check_verbalizer(verbalizer: Mapping[str, str], labels: Sequence[str]) -> None:
    for name in set(verbalizer).difference(labels):
        raise InputError(f"--verbalizer: no example has the label '{name}'; known: {', '.join(labels)}")


def _read_examples(
    format: str,
    files: tuple[Path, Path | None],
    reader_options: dict[str, Any],
    shots_and_seed: tuple[int, int],
    skip_bad: bool,
) -> tuple[list[TextExample], list[TextExample], list[str], list[str]]:
    """Return the queries, the demonstrations, all labels, and a summary of skipped examples."""
    from qkv.data.examples import TextExample
    from qkv.data.formats import FORMATS, get_format, read
    from qkv.data.labels import check_labels, collect_labels
    from qkv.generation.prompting import sample_demonstrations

    if get_format(format).example_type is not TextExample:
        format_names = ", ".join(
            name for name in FORMATS.names() if FORMATS.get(name).example_type is TextExample and ":" not in name
        )
        raise InputError(f"--format {format} has no labeled texts; known: {format_names}, and GLUE tasks")
    path, train_path = files
    queries = read(format, path, split="dev", columns=reader_options, skip_bad=skip_bad)
    queries = _filter_checked(queries, _check_class_labels, skip_bad)
    if train_path is None:
        shot_indices = sample_demonstrations(queries, *shots_and_seed)
        demonstrations = [queries[i] for i in shot_indices]
        remaining = [example for i, example in enumerate(queries) if i not in set(shot_indices)]
        if not remaining:
            raise InputError(f"{path}: no example is left to classify; use fewer --shots, or give --train")
        return remaining, demonstrations, list(collect_labels(queries)), format_skipped(queries.skipped)
    train_examples = read(format, train_path, split="train", columns=reader_options, skip_bad=skip_bad)
    labels = list(collect_labels(train_examples))
    queries = _filter_checked(queries, lambda subset: check_labels(labels, subset), skip_bad)
    return (
        list(queries),
        [train_examples[i] for i in sample_demonstrations(train_examples, *shots_and_seed)],
        labels,
        format_skipped(queries.skipped + train_examples.skipped),
    )


def _filter_checked(
    examples: Examples[TextExample], check: Callable[[Sequence[TextExample]], Any], skip_bad: bool
) -> Examples[TextExample]:
    if not skip_bad:
        check(examples)
        return examples
    valid = filter_invalid(examples, check)
    if not valid:
        raise InputError(f"all examples are bad, the first: {valid.skipped[0]}")
    return valid


def _check_class_labels(examples: Sequence[TextExample]) -> None:
    for example in examples:
        if not isinstance(example.label, str):
            raise InputError(f"{example.location}: its label is not a class; prompting needs one")


def _write_predictions(output: Path, queries: list[TextExample], predictions: list[PromptPrediction]) -> None:
    from qkv.files import atomic_write_text

    rows = [["location", "prediction", "probability", "label"]]
    for example, prediction in zip(queries, predictions, strict=True):
        rows.append([example.location, prediction.label, f"{prediction.probability:.4f}", str(example.label)])
    atomic_write_text(output, "".join("\t".join(row) + "\n" for row in rows))


def _print_metrics(
    queries: list[TextExample], predictions: list[PromptPrediction], resamples: int, as_json: bool
) -> None:
    from qkv.metrics import significance
    from qkv.metrics.classification import F1, Accuracy, collect_label_set

    predicted, gold = [prediction.label for prediction in predictions], [str(example.label) for example in queries]
    scores: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    macro_f1 = F1(collect_label_set(predicted, gold), "macro")
    for metric, name in ((Accuracy(), "accuracy"), (macro_f1, "f1_macro")):
        rows = metric.statistics(predicted, gold)
        scores[name] = metric.compute(rows)[name]
        if resamples:
            interval = significance.bootstrap(metric, rows, resamples=resamples)[name]
            intervals[name] = interval.low, interval.high
    if as_json:
        print(json.dumps({"examples": len(queries), **scores, **({"intervals": intervals} if intervals else {})}))
        return
    table = [
        [name, format_number(value, 4), *([format_interval(*intervals[name], 4)] if resamples else [])]
        for name, value in scores.items()
    ]
    print_table(["metric", "value", *(["95 % interval"] if resamples else [])], table)
    print(f"\n{len(queries):,} examples")
