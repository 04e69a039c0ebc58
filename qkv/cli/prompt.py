"""The command that classifies with a language model as it is, shown a few examples: prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.options import Device, Json, ModelName, OnTooLong, check_choice, load_model
from qkv.cli.run_task import ReaderOptions, SkipBad, parse_reader_options
from qkv.cli.tables import format_interval, format_number, print_table
from qkv.data.filtering import filter_invalid, format_skipped
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.data.examples import Examples, TextExample
    from qkv.generation.prompting import PromptPrediction

Template = Annotated[
    str,
    typer.Option(
        help=r"An example as text: {text}, {text_pair} where there are two, and {label} behind them; \n is a line's end."
    ),
]
Verbalizers = Annotated[
    list[str] | None,
    typer.Option("--verbalizer", metavar="LABEL=WORD", help="What stands for a label in the text; by default its name."),
]
Train = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where solved examples are drawn from; by default --data itself.")
]


def prompt(
    model: ModelName,
    data: Annotated[Path, typer.Option("--data", "-d", help="The examples, with their labels.")],
    format: Annotated[str, typer.Option(help="csv, tsv, jsonl, glue:SST-2, …")] = "table",
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="Where the text stands.")] = None,
    text_pair: Annotated[str | None, typer.Option(metavar="COLUMN", help="Where a second text stands.")] = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Where the label stands.")] = None,
    reader_option: ReaderOptions = None,
    template: Template = r"Text: {text}\nLabel: {label}\n\n",
    verbalizer: Verbalizers = None,
    shots: Annotated[int, typer.Option(help="How many solved examples the model is shown; 0: none.")] = 0,
    train: Train = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same examples to be shown.")] = 0,
    length_normalize: Annotated[
        bool, typer.Option("--length-normalize", help="Labels by their mean log-likelihood a token, not by the sum.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Against what the model says of texts without content.")
    ] = False,
    max_examples: Annotated[int | None, typer.Option(help="Score at most so many, spread over the file.")] = None,
    num_resamples: Annotated[int, typer.Option(help="How many resamples the intervals rest on; 0: none.")] = 1000,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write what was said and what is right as TSV.")
    ] = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
    on_too_long: OnTooLong = "refuse",
    device: Device = None,
) -> None:
    """Classify with a language model that was not trained to: each label's words are scored as the text's continuation.

    What is shown to it is drawn from --train, or from --data, which then is scored without it.
    """
    from qkv.files import atomic_write_text
    from qkv.generation.prompting import PromptConfig, predict_with_prompt

    if num_resamples < 0 or shots < 0 or (max_examples is not None and max_examples < 1):
        raise InputError("--num-resamples and --shots are 0 or more, --max-examples is 1 or more")
    config = PromptConfig(
        template=template.replace("\\n", "\n").replace("\\t", "\t"),
        verbalizer=_parse_verbalizers(verbalizer),
        length_normalize=length_normalize,
        calibrate=calibrate,
        on_too_long=check_choice("--on-too-long", on_too_long, "refuse", "truncate"),
    )
    reader_options = parse_reader_options(reader_option, text=text, text_pair=text_pair, label=label)
    queries, demonstrations, labels, skipped = _read_examples(
        format, (data, train), reader_options, (shots, seed), skip_bad
    )
    for name in set(config.verbalizer).difference(labels):
        raise InputError(f"--verbalizer: no example has the label '{name}'; known: {', '.join(labels)}")
    if max_examples is not None and max_examples < len(queries):
        queries = [queries[i * len(queries) // max_examples] for i in range(max_examples)]
    answers = predict_with_prompt(load_model(model, device), queries, labels, demonstrations, config)
    if output is not None:
        atomic_write_text(output, "".join("\t".join(row) + "\n" for row in _prediction_rows(queries, answers)))
    _print_metrics(queries, answers, labels, num_resamples, as_json)
    for line in [] if as_json else skipped:
        print(line)


def _parse_verbalizers(options: list[str] | None) -> dict[str, str]:
    verbalizers = {}
    for option in options or []:
        label, equals, word = option.partition("=")
        if not equals or not label or not word.strip():
            raise InputError(f"--verbalizer: '{option}' is not LABEL=WORD, such as 1=positive")
        verbalizers[label] = word
    return verbalizers


def _read_examples(
    format: str,
    files: tuple[Path, Path | None],
    reader_options: dict[str, Any],
    shots_and_seed: tuple[int, int],
    skip_bad: bool,
) -> tuple[list[TextExample], list[TextExample], list[str], list[str]]:
    """Those that are asked about, those that are shown, all labels, and what was skipped."""
    from qkv.data.examples import TextExample
    from qkv.data.formats import FORMATS, read
    from qkv.data.formats.registry import get_format
    from qkv.data.labels import check_labels, collect_labels
    from qkv.generation.prompting import sample_demonstrations

    if get_format(format).example_type is not TextExample:
        format_names = ", ".join(
            name
            for name, dataset_format in FORMATS.items()
            if dataset_format.example_type is TextExample and ":" not in name
        )
        raise InputError(f"--format {format} has no labelled texts; known: {format_names}, and GLUE's")
    path, train_path = files
    queries = read(format, path, split="dev", columns=reader_options, skip_bad=skip_bad)
    queries = _filter_checked(queries, _check_class_labels, skip_bad)
    if train_path is None:
        shot_indices = sample_demonstrations(queries, *shots_and_seed)
        demonstrations = [queries[i] for i in shot_indices]
        remaining = [example for i, example in enumerate(queries) if i not in set(shot_indices)]
        if not remaining:
            raise InputError(f"{path}: no example is left to ask about; show fewer, or name --train")
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
        raise InputError(f"nothing is left but bad examples, the first: {valid.skipped[0]}")
    return valid


def _check_class_labels(examples: Sequence[TextExample]) -> None:
    for example in examples:
        if not isinstance(example.label, str):
            raise InputError(f"{example.location}: has no class for a label; prompting needs one")


def _prediction_rows(queries: list[TextExample], answers: list[PromptPrediction]) -> list[list[str]]:
    rows = [["location", "predicted", "probability", "gold"]]
    for example, answer in zip(queries, answers, strict=True):
        rows.append([example.location, answer.label, f"{answer.probability:.4f}", str(example.label)])
    return rows


def _print_metrics(
    queries: list[TextExample], answers: list[PromptPrediction], labels: list[str], resamples: int, as_json: bool
) -> None:
    from qkv.metrics import significance
    from qkv.metrics.classification import F1, Accuracy

    predicted, gold = [answer.label for answer in answers], [str(example.label) for example in queries]
    scores: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for metric, name in ((Accuracy(), "accuracy"), (F1(tuple(labels), "macro"), "f1_macro")):
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
