"""The command that classifies with a language model as it is, shown a few examples: prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.options import Device, Json, ModelName, TooLong, load_model, one_of
from qkv.cli.tables import number, show, span
from qkv.cli.tasks import Columns, SkipBad, column_names
from qkv.data.sifting import sifted, skipped_lines
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.data.examples import Examples, Labelled
    from qkv.decode.in_context import Answer

Template = Annotated[
    str,
    typer.Option(
        help=r"An example as text: {text}, {second} where there are two, and {label} behind them; \n is a line's end."
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Option("--word", metavar="LABEL=WORD", help="What stands for a label in the text; by default its name."),
]
Train = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where solved examples are drawn from; by default --data itself.")
]


def prompt(
    model: ModelName,
    data: Annotated[Path, typer.Option("--data", "-d", help="The examples, with their labels.")],
    format: Annotated[str, typer.Option(help="csv, tsv, jsonl, glue:SST-2, …")] = "table",
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="Where the text stands.")] = None,
    second: Annotated[str | None, typer.Option(metavar="COLUMN", help="Where a second text stands.")] = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Where the label stands.")] = None,
    column: Columns = None,
    template: Template = r"Text: {text}\nLabel: {label}\n\n",
    word: Words = None,
    shots: Annotated[int, typer.Option(help="How many solved examples the model is shown; 0: none.")] = 0,
    train: Train = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same examples to be shown.")] = 0,
    mean: Annotated[
        bool, typer.Option("--mean", help="Labels by their mean log-likelihood a token, not by the sum.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Against what the model says of texts without content.")
    ] = False,
    examples: Annotated[int | None, typer.Option(help="Score at most so many, spread over the file.")] = None,
    bootstrap: Annotated[int, typer.Option(help="How many resamples the intervals rest on; 0: none.")] = 1000,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write what was said and what is right as TSV.")
    ] = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
    too_long: TooLong = "refuse",
    device: Device = None,
) -> None:
    """Classify with a language model that was not trained to: each label's words are scored as the text's continuation.

    What is shown to it is drawn from --train, or from --data, which then is scored without it.
    """
    from qkv.decode.in_context import Prompting, answer
    from qkv.files import write_text

    if bootstrap < 0 or shots < 0 or (examples is not None and examples < 1):
        raise InputError("--bootstrap and --shots are 0 or more, --examples is 1 or more")
    how = Prompting(
        template=template.replace("\\n", "\n").replace("\\t", "\t"),
        words=_words(word),
        mean=mean,
        calibrate=calibrate,
        too_long=one_of("--too-long", too_long, "refuse", "truncate"),
    )
    columns = column_names(column, text=text, second=second, label=label)
    asked, shown, labels, skipped = _examples(format, (data, train), columns, (shots, seed), skip_bad)
    for name in set(how.words).difference(labels):
        raise InputError(f"--word: no example has the label '{name}'; known: {', '.join(labels)}")
    if examples is not None and examples < len(asked):
        asked = [asked[i * len(asked) // examples] for i in range(examples)]
    found = answer(load_model(model, device), asked, labels, shown, how)
    if output is not None:
        write_text(output, "".join("\t".join(row) + "\n" for row in _rows(asked, found)))
    _print(asked, found, labels, bootstrap, as_json)
    for line in [] if as_json else skipped:
        print(line)


def _words(given: list[str] | None) -> dict[str, str]:
    found = {}
    for one in given or []:
        label, sign, word = one.partition("=")
        if not sign or not label or not word.strip():
            raise InputError(f"--word: '{one}' is not LABEL=WORD, such as 1=positive")
        found[label] = word
    return found


def _examples(
    format: str, files: tuple[Path, Path | None], columns: dict[str, Any], drawn: tuple[int, int], skip_bad: bool
) -> tuple[list[Labelled], list[Labelled], list[str], list[str]]:
    """Those that are asked about, those that are shown, all labels, and what was skipped."""
    from qkv.data.examples import Labelled
    from qkv.data.labels import check_labels, labels_of
    from qkv.data.tasks import FORMATS, read
    from qkv.data.tasks.formats import named
    from qkv.decode.in_context import shots

    if named(format).example is not Labelled:
        kinds = ", ".join(name for name, one in FORMATS.items() if one.example is Labelled and ":" not in name)
        raise InputError(f"--format {format} has no labelled texts; known: {kinds}, and GLUE's")
    path, source = files
    asked = read(format, path, part="dev", columns=columns, skip_bad=skip_bad)
    asked = _checked(asked, _refuse_unclassed, skip_bad)
    if source is None:
        chosen = shots(asked, *drawn)
        shown = [asked[i] for i in chosen]
        rest = [example for i, example in enumerate(asked) if i not in set(chosen)]
        if not rest:
            raise InputError(f"{path}: no example is left to ask about; show fewer, or name --train")
        return rest, shown, list(labels_of(asked)), skipped_lines(asked.skipped)
    solved = read(format, source, part="train", columns=columns, skip_bad=skip_bad)
    labels = list(labels_of(solved))
    asked = _checked(asked, lambda some: check_labels(labels, some), skip_bad)
    return (
        list(asked),
        [solved[i] for i in shots(solved, *drawn)],
        labels,
        skipped_lines(asked.skipped + solved.skipped),
    )


def _checked(
    asked: Examples[Labelled], check: Callable[[Sequence[Labelled]], Any], skip_bad: bool
) -> Examples[Labelled]:
    if not skip_bad:
        check(asked)
        return asked
    kept = sifted(asked, check)
    if not kept:
        raise InputError(f"nothing is left but bad examples, the first: {kept.skipped[0]}")
    return kept


def _refuse_unclassed(examples: Sequence[Labelled]) -> None:
    for example in examples:
        if not isinstance(example.label, str):
            raise InputError(f"{example.where}: has no class for a label; prompting needs one")


def _rows(asked: list[Labelled], found: list[Answer]) -> list[list[str]]:
    rows = [["where", "predicted", "probability", "right"]]
    for example, one in zip(asked, found, strict=True):
        rows.append([example.where, one.label, f"{one.chance:.4f}", str(example.label)])
    return rows


def _print(asked: list[Labelled], found: list[Answer], labels: list[str], resamples: int, as_json: bool) -> None:
    from qkv.evaluate import confidence
    from qkv.evaluate.classification import F1, Accuracy

    said, right = [one.label for one in found], [str(example.label) for example in asked]
    figures: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for metric, name in ((Accuracy(), "accuracy"), (F1(tuple(labels), "macro"), "f1_macro")):
        rows = metric.statistics(said, right)
        figures[name] = metric.of(rows)[name]
        if resamples:
            interval = confidence.bootstrap(metric, rows, resamples=resamples)[name]
            intervals[name] = interval.low, interval.high
    if as_json:
        print(json.dumps({"examples": len(asked), **figures, **({"intervals": intervals} if intervals else {})}))
        return
    table = [
        [name, number(value, 4), *([span(*intervals[name], 4)] if resamples else [])] for name, value in figures.items()
    ]
    show(["figure", "value", *(["95 % interval"] if resamples else [])], table)
    print(f"\n{len(asked):,} examples")
