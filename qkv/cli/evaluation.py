"""The command that scores a run on examples: eval."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.options import Device, Json, LabelColumn, RunFolder, TextColumn, load_model
from qkv.cli.pairs import AskedPairs, evaluate_pairs
from qkv.cli.tables import number, show, span
from qkv.cli.tasks import Columns, SkipBad, column_names, recipe_of
from qkv.data.sifting import sifted, skipped_lines
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.evaluate.report import Report
    from qkv.tasks.said import Said

_CLASSES, _MISTAKES = 15, 10  # that are printed; all of them are in the report


Data = Annotated[Path | None, typer.Option("--data", "-d", help="What to score on; by default the recipe's test part.")]
Target = Annotated[Path | None, typer.Option(help="Pairs: the target file, where --data is one of two aligned files.")]
Format = Annotated[
    str | None,
    typer.Option(
        help="Of pairs aligned, tsv, scitldr, …; of text lines, blank, …; of a task csv, squad, conll, …; "
        "by default as in training."
    ),
]
ReportFolder = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Tasks: write report.html and report.json there.")
]
Bootstrap = Annotated[
    int | None, typer.Option(help="How many resamples the intervals rest on, by default 1000; 0: none.")
]
Beams = Annotated[int | None, typer.Option(help="Pairs: beam width; by default the recipe's.")]
Penalty = Annotated[float | None, typer.Option(help="Pairs: as in predict; by default the recipe's.")]
Free = Annotated[
    bool, typer.Option("--free", help="Pairs: also the loss of the references with and without a teacher.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write what was predicted and what is right as TSV.")
]
TooLong = Annotated[str | None, typer.Option(help="Pairs: an input over the model's length: refuse or truncate.")]
Unknown = Annotated[str | None, typer.Option(help="Pairs: as in predict; by default the recipe's.")]


def evaluate_command(
    run: RunFolder,
    data: Data = None,
    target: Target = None,
    format: Format = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    column: Columns = None,
    skip_bad: SkipBad = False,
    report: ReportFolder = None,
    bootstrap: Bootstrap = None,
    beams: Beams = None,
    length_penalty: Penalty = None,
    free: Free = False,
    output: Output = None,
    as_json: Json = False,
    too_long: TooLong = None,
    unknown: Unknown = None,
    device: Device = None,
) -> None:
    """A task's figures with intervals, classes and confusions; error rates, BLEU, ROUGE and so on of pairs, as their
    recipe has it (test.metrics); perplexity of held-out text.

    Of pairs any listed reference counts as right. Of text, --data is a file or folder of documents; its format is as
    its name ends, else as in training.
    """
    from qkv.train.sections import TaskRecipe, TextRecipe

    recipe = recipe_of(run)
    of_pairs: dict[str, Any] = {
        "--target": target,
        "--beams": beams,
        "--length-penalty": length_penalty,
        "--free": free or None,
    }
    of_pairs |= {"--unknown": unknown, "--too-long": too_long}
    of_tasks = {"--report": report, "--column": column, "--text": text, "--label": label}
    of_tasks |= {"--skip-bad": skip_bad or None}
    if isinstance(recipe, TextRecipe):
        if any(given is not None for given in (*of_pairs.values(), *of_tasks.values(), bootstrap, output)):
            said = "of the options only --data and --format go with that"
            raise InputError(f"a model of text is scored by its perplexity; {said}")
        _text(run, recipe, data, format, as_json, device)
    elif isinstance(recipe, TaskRecipe):
        _refuse(of_pairs, "pairs, and this run learned a task")
        columns = column_names(column, text=text, label=label)
        asked = _Asked(data, format, columns, skip_bad, 1000 if bootstrap is None else bootstrap)
        _task(run, recipe, asked, report, output, as_json, device)
    else:
        _refuse(of_tasks, "tasks, and this run learned from pairs")
        asked_pairs = AskedPairs(
            data, target, format, beams, length_penalty, too_long, unknown, free=free, resamples=bootstrap
        )
        evaluate_pairs(run, recipe, asked_pairs, output, as_json, device)


def _refuse(options: dict[str, Any], why: str) -> None:
    for name, given in options.items():
        if given is not None:
            raise InputError(f"{name} is for {why}; leave it out")


# ---- tasks ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What the command line says of the examples."""

    data: Path | None
    format: str | None
    columns: dict[str, Any]
    skip_bad: bool
    resamples: int


def _task(
    run: Path, recipe: Any, asked: _Asked, folder: Path | None, output: Path | None, as_json: bool, device: str | None
) -> None:
    from qkv.evaluate.page import page
    from qkv.evaluate.report import as_json as told
    from qkv.files import write_text

    if asked.resamples < 0:
        raise InputError("--bootstrap is 0 or more")
    found, rows = _report(run, recipe, asked, device)
    text = json.dumps(told(found), ensure_ascii=False, indent=None if folder is None else 1)
    if output is not None:
        write_text(output, "".join("\t".join(row) + "\n" for row in rows))
    if folder is not None:
        write_text(folder / "report.json", text + "\n")
        write_text(folder / "report.html", page(found))
    if as_json:
        print(text)
        return
    _print_report(found)
    if folder is not None:
        print(f"{folder / 'report.html'}: all of this and the worst examples; report.json: the same for programs")


def _report(run: Path, recipe: Any, asked: _Asked, device: str | None) -> tuple[Report, list[list[str]]]:
    """The report, and each example's place with what was said of it and what is right."""
    from qkv.data.tags import tagged
    from qkv.decode.frames import input_length
    from qkv.evaluate.cases import Judged
    from qkv.evaluate.report import curves, has_truth, report
    from qkv.tasks.said import say, settled
    from qkv.tasks.task import reader_of
    from qkv.train.tuning import task_of

    task = task_of(recipe)
    examples, place = _examples(recipe, asked)
    notes: list[str] = []
    loaded = load_model(run, device)
    labels = loaded.model.spec.head.labels
    if asked.skip_bad:
        reader, longest = reader_of(task, loaded), input_length(loaded.model.spec)
        examples = sifted(examples, lambda some: task.ask(some, reader, labels, longest))
        if not examples:
            raise InputError(f"{place}: nothing is left but bad examples, the first: {examples.skipped[0]}")
    notes += skipped_lines(examples.skipped)
    said: list[Said] = say(task, loaded, examples)
    pairs = [(example, one) for example, one in zip(examples, said, strict=True) if has_truth(example)]
    truths = [task.truth(example) for example, _ in pairs]
    scored = settled(task, [one for _, one in pairs], truths)
    shown = [tagged(example) if task.kind == "token" and hasattr(example, "spans") else example for example, _ in pairs]
    judged = [
        Judged(example, one.prediction, right, one.surest_mistake(right), one.span)
        for example, one, right in zip(shown, scored, truths, strict=True)
    ]
    cut = sum(one.cut for one in said)
    if cut:
        notes.append(f"{cut:,} texts are longer than the model takes and were cut")
    deciding = recipe.valid.metric or task.decides(labels)
    metrics = task.metrics(labels, [one.prediction for one in scored], truths) if truths else []
    found = report(
        task.name,
        judged,
        metrics,
        labels,
        deciding,
        unlabelled=len(examples) - len(judged),
        resamples=asked.resamples,
    )
    found = dataclasses.replace(
        found,
        run=str(run),
        data=place,
        curves=curves(run / "log.jsonl", deciding),
        recipe=(run / "recipe.yaml").read_text(encoding="utf-8"),
        notes=tuple(notes),
    )
    return found, _rows(examples, said, task)


def _examples(recipe: Any, asked: _Asked) -> tuple[Any, str]:
    """What is scored, and what it is called."""
    from qkv.train.tuning import read_part

    data = recipe.data
    if asked.data is None and (asked.format is not None or asked.columns):
        raise InputError("--format, --text, --label and --column go with --data")
    place = str(data.test or f"{data.train}, test part")
    if asked.data is not None:
        place = str(asked.data)
        # the columns of one format mean nothing in another
        columns = (data.columns if asked.format in (None, data.format) else {}) | asked.columns
        data = dataclasses.replace(data, test=str(asked.data), format=asked.format or data.format, columns=columns)
    return read_part(dataclasses.replace(data, skip_bad=data.skip_bad or asked.skip_bad), "test"), place


def _rows(examples: Any, said: list[Said], task: Any) -> list[list[str]]:
    from qkv.evaluate.report import has_truth

    rows = [["where", "predicted", "probability", "right"]]
    for example, one in zip(examples, said, strict=True):
        right = task.truth(example) if has_truth(example) else None
        told = "" if right is None else str(right) if isinstance(right, str | int | float) else " ".join(sorted(right))
        if task.kind == "token" and right is not None:
            told = " ".join(right)
        chance = "" if one.confidence is None else f"{one.confidence:.4f}"
        rows.append([example.where, one.line, chance, told])
    return [[" ".join(cell.split()) for cell in row] for row in rows]


def _print_report(found: Report) -> None:
    if found.figures:
        head = ["figure", "value", *(["95 % interval"] if found.resamples else [])]
        show(head, [_figure(name, figure) for name, figure in found.figures.items()])
    if found.classes:
        print()
        rows = [
            [label, *(number(line[name], 4) for name in ("precision", "recall", "f1")), f"{line['support']:,.0f}"]
            for label, line in found.hardest_classes()
        ]
        show(["class", "precision", "recall", "f1", "support"], rows[:_CLASSES])
        if len(rows) > _CLASSES:
            print(f"the {_CLASSES} classes with the lowest F1 of {len(rows)}; --report DIR or --json has all")
    mistakes = found.confusion.mistakes() if found.confusion else []
    if mistakes:
        print()
        show(["right", "was taken for", "times"], [[a, b, f"{n:,}"] for a, b, n in mistakes[:_MISTAKES]], words=2)
    print()
    said = f"{found.examples:,} examples"
    if found.resamples:
        said += f"; 95 % intervals from {found.resamples:,} resamples"
    if found.examples:
        print(said)
    if found.unlabelled:
        print(f"{found.unlabelled:,} examples have no label: predicted only (-o FILE writes what was said of them)")
    for note in found.notes:
        print(note)


def _figure(name: str, figure: Any) -> list[str]:
    between = [] if figure.low is None else [span(figure.low, figure.high, figure.digits)]
    return [name, number(figure.value, figure.digits), *between]


# ---- text -----------------------------------------------------------------------------------------------------------


def _text(run: Path, recipe: Any, data: Path | None, format: str | None, as_json: bool, device: str | None) -> None:
    from qkv.train.pretraining import perplexity

    if data is None and format is not None:
        raise InputError("--format goes with --data")
    values = perplexity(load_model(run, device), recipe, None if data is None else [str(data)], format)
    if as_json:
        print(json.dumps(values))
        return
    print(f"tokens      {int(values['tokens']):>10,}")
    print(f"perplexity  {values['perplexity']:>10,.3f}   (of the tokens that are asked for; loss {values['loss']:.4f})")
    if "next_sentence_loss" in values:
        print(f"next-sentence loss {values['next_sentence_loss']:.4f}")
