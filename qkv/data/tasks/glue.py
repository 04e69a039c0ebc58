"""GLUE's files as they are downloaded, and the files that its server takes (Wang et al., 2018).

Tab-separated, quoting off. CoLA has no header but in its test file; MRPC's is Microsoft's own file with a byte order
mark; QQP has a few lines that are cut short; a test file has no labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qkv.data.examples import Label, Labelled
from qkv.data.tasks.lines import Bad
from qkv.data.tasks.table import Row, misfit, missing, number_of, rows
from qkv.errors import InputError, nearest
from qkv.files import write_text

_ENTAILMENT = {"not_entailment": "not_entailment", "entailment": "entailment"}
_THREE_WAYS = {name: name for name in ("contradiction", "entailment", "neutral")}
_MATCHED = {"train": ("train.tsv",), "dev": ("dev_matched.tsv",), "test": ("test_matched.tsv",)}
_MATCHED |= {"dev_mismatched": ("dev_mismatched.tsv",), "test_mismatched": ("test_mismatched.tsv",)}
_MISMATCHED = {**_MATCHED, "dev": ("dev_mismatched.tsv",), "test": ("test_mismatched.tsv",)}
_USUAL = {part: (f"{part}.tsv",) for part in ("train", "dev", "test")}
_MICROSOFT = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}


@dataclass(frozen=True, slots=True)
class Task:
    """Where a task's texts and label stand, and what its labels are called."""

    says: str
    texts: tuple[str, ...]
    label: str
    labels: Mapping[str, str] | None  # from what the file has to a name; None where the label is a number
    files: Mapping[str, tuple[str, ...]]  # what the file of a part may be called
    folders: tuple[str, ...]  # what the task's folder in a folder of all tasks may be called


def _task(
    name: str,
    says: str,
    texts: tuple[str, ...],
    labels: Mapping[str, str] | None,
    label: str = "label",
    files: Mapping[str, tuple[str, ...]] = _USUAL,
    folders: tuple[str, ...] = (),
) -> tuple[str, Task]:
    return name, Task(says, texts, label, labels, files, (name, *folders))


def _numbered(*names: str) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


_SENTENCES = ("sentence1", "sentence2")
_MRPC_FILES = {part: (*names, *([_MICROSOFT[part]] if part in _MICROSOFT else [])) for part, names in _USUAL.items()}
_MNLI = (_SENTENCES, _THREE_WAYS, "gold_label")
TASKS: dict[str, Task] = dict(
    (
        _task("CoLA", "is it English?", ("sentence",), _numbered("unacceptable", "acceptable")),
        _task("SST-2", "sentiment of a film review", ("sentence",), _numbered("negative", "positive")),
        _task(
            "MRPC",
            "do two sentences say the same?",
            ("#1 String", "#2 String"),
            _numbered("not_equivalent", "equivalent"),
            "Quality",
            _MRPC_FILES,
        ),
        _task("STS-B", "how alike are two sentences, 0 to 5?", _SENTENCES, None, "score"),
        _task(
            "QQP",
            "do two questions ask the same?",
            ("question1", "question2"),
            _numbered("not_duplicate", "duplicate"),
            "is_duplicate",
        ),
        _task("MNLI", "inference; dev and test are the matched ones", *_MNLI, _MATCHED),
        _task("MNLI-m", "inference, matched genres", *_MNLI, _MATCHED, ("MNLI",)),
        _task("MNLI-mm", "inference, other genres than in training", *_MNLI, _MISMATCHED, ("MNLI",)),
        _task("QNLI", "does the sentence answer the question?", ("question", "sentence"), _ENTAILMENT),
        _task("RTE", "does the first sentence entail the second?", _SENTENCES, _ENTAILMENT),
        _task("WNLI", "Winograd's pronouns as inference", _SENTENCES, _numbered("not_entailment", "entailment")),
        _task(
            "AX",
            "diagnostic inference, test only",
            _SENTENCES,
            _THREE_WAYS,
            files={"test": ("AX.tsv", "diagnostic.tsv", "diagnostic-full.tsv")},
            folders=("diagnostic",),
        ),
    )
)
# The diagnostic set with its categories and labels was published with a header of its own.
_FULL_AX = {"Premise": "sentence1", "Hypothesis": "sentence2", "Label": "label"}


def read(path: Path, bad: Bad, *, task: str) -> Iterator[Labelled]:
    """The examples of a file of one of the TASKS; their `id` is the index that the server wants back."""
    known = TASKS[task]
    if task == "CoLA":
        yield from _cola(path, bad, known)
        return
    for number, row in enumerate(rows(path, bad, form="tsv", ragged=True)):
        if task == "AX":
            row = _renamed(row)
        if number == 0:
            _refuse_foreign(path, known, row.columns)
        if len(row.fields) < len(row.columns) and task == "QQP":
            # The published file has such lines, and everybody drops them: no reason to refuse it.
            bad.reasons.append(str(misfit(row.where, list(row.fields), row.columns)))
            continue
        with bad:
            yield _example(row, known)


def _renamed(row: Row) -> Row:
    fields = {_FULL_AX.get(name, name): value for name, value in row.fields.items()}
    return Row(row.where, fields, [_FULL_AX.get(name, name) for name in row.columns])


def _refuse_foreign(path: Path, task: Task, columns: Sequence[str]) -> None:
    for name in task.texts:
        if name not in columns:
            raise missing(f"{path}:1", name, columns)


def _example(row: Row, task: Task) -> Labelled:
    if len(row.fields) < len(row.columns):
        raise misfit(row.where, list(row.fields), row.columns)
    first, *second = (row.fields[name] for name in task.texts)
    label = _label(row.fields[task.label], task, row.where) if task.label in row.columns else None
    index = row.fields.get("index", row.fields.get("id", ""))
    return Labelled(first, row.where, second[0] if second else None, label, id=index)


def _label(found: str, task: Task, where: str) -> Label:
    if task.labels is None:
        return number_of(found, where, task.label)
    if found not in task.labels:
        raise InputError(f"{where}: label '{found}' is none of {', '.join(task.labels)}; correct it")
    return task.labels[found]


def _cola(path: Path, bad: Bad, task: Task) -> Iterator[Labelled]:
    """Four columns (source, label, the linguist's mark, sentence) without a header, or a test file with one."""
    unlabelled: bool | None = None
    for row in rows(path, bad, form="tsv", header=False):
        if unlabelled is None:
            unlabelled = list(row.fields.values()) == ["index", "sentence"]
            if unlabelled:
                continue
            if len(row.columns) != 4:
                raise misfit(row.where, list(row.fields), ["source", "label", "mark", "sentence"])
        with bad:
            if unlabelled:
                yield Labelled(row.fields["2"], row.where, id=row.fields["1"])
            else:
                yield Labelled(row.fields["4"], row.where, label=_label(row.fields["2"], task, row.where))


def write_submission(folder: Path, task: str, examples: Sequence[Labelled], predictions: Sequence[str | float]) -> Path:
    """Writes the file that GLUE's server takes for a task, index and prediction a line, and says where it is."""
    if task not in TASKS:
        raise InputError(f"GLUE has no task '{task}'; {nearest(task, TASKS)}")
    if len(examples) != len(predictions):
        raise InputError(f"{task}: {len(predictions)} predictions for {len(examples)} examples; give one for each")
    labels = TASKS[task].labels
    written = None if labels is None else {name: found for found, name in labels.items()}
    lines = ["index\tprediction"]
    for number, (example, prediction) in enumerate(zip(examples, predictions, strict=True)):
        index = example.id or str(number)
        if written is None:
            lines.append(f"{index}\t{number_of(prediction, example.where, 'prediction'):.3f}")
        elif prediction in written:
            lines.append(f"{index}\t{written[str(prediction)]}")
        else:
            raise InputError(f"{example.where}: prediction '{prediction}' is none of {', '.join(written)}")
    path = folder / f"{'MNLI-m' if task == 'MNLI' else task}.tsv"
    write_text(path, "\n".join(lines) + "\n")
    return path
