"""GLUE's files as they are downloaded, and the files that its server takes (Wang et al., 2018).

Tab-separated, quoting off. CoLA has no header but in its test file; MRPC's is Microsoft's own file with a byte order
mark; QQP has a few lines that are cut short; a test file has no labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qkv.data.examples import Label, TextExample
from qkv.data.formats.io import ErrorPolicy
from qkv.data.formats.table import Row, field_count_error, missing_column_error, parse_number, read_rows
from qkv.errors import InputError, did_you_mean
from qkv.files import atomic_write_text

_ENTAILMENT = {"not_entailment": "not_entailment", "entailment": "entailment"}
_NLI_LABELS = {name: name for name in ("contradiction", "entailment", "neutral")}
_MATCHED = {"train": ("train.tsv",), "dev": ("dev_matched.tsv",), "test": ("test_matched.tsv",)}
_MATCHED |= {"dev_mismatched": ("dev_mismatched.tsv",), "test_mismatched": ("test_mismatched.tsv",)}
_MISMATCHED = {**_MATCHED, "dev": ("dev_mismatched.tsv",), "test": ("test_mismatched.tsv",)}
_DEFAULT_FILES = {split: (f"{split}.tsv",) for split in ("train", "dev", "test")}
_MSR_FILES = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}


@dataclass(frozen=True, slots=True)
class GlueTask:
    """Where a task's texts and label stand, and what its labels are called."""

    description: str
    text_columns: tuple[str, ...]
    label_column: str
    label_names: Mapping[str, str] | None  # from what the file has to a name; None where the label is a number
    files: Mapping[str, tuple[str, ...]]  # what the file of a part may be called
    folders: tuple[str, ...]  # what the task's folder in a folder of all tasks may be called


def _make_task(
    name: str,
    description: str,
    text_columns: tuple[str, ...],
    label_names: Mapping[str, str] | None,
    label_column: str = "label",
    files: Mapping[str, tuple[str, ...]] = _DEFAULT_FILES,
    folders: tuple[str, ...] = (),
) -> tuple[str, GlueTask]:
    return name, GlueTask(description, text_columns, label_column, label_names, files, (name, *folders))


def _numbered_labels(*names: str) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


_SENTENCES = ("sentence1", "sentence2")
_MRPC_FILES = {split: (*names, *([_MSR_FILES[split]] if split in _MSR_FILES else [])) for split, names in _DEFAULT_FILES.items()}
_MNLI_ARGS = (_SENTENCES, _NLI_LABELS, "gold_label")
TASKS: dict[str, GlueTask] = dict(
    (
        _make_task("CoLA", "is it English?", ("sentence",), _numbered_labels("unacceptable", "acceptable")),
        _make_task("SST-2", "sentiment of a film review", ("sentence",), _numbered_labels("negative", "positive")),
        _make_task(
            "MRPC",
            "do two sentences say the same?",
            ("#1 String", "#2 String"),
            _numbered_labels("not_equivalent", "equivalent"),
            "Quality",
            _MRPC_FILES,
        ),
        _make_task("STS-B", "how alike are two sentences, 0 to 5?", _SENTENCES, None, "score"),
        _make_task(
            "QQP",
            "do two questions ask the same?",
            ("question1", "question2"),
            _numbered_labels("not_duplicate", "duplicate"),
            "is_duplicate",
        ),
        _make_task("MNLI", "inference; dev and test are the matched ones", *_MNLI_ARGS, _MATCHED),
        _make_task("MNLI-m", "inference, matched genres", *_MNLI_ARGS, _MATCHED, ("MNLI",)),
        _make_task("MNLI-mm", "inference, other genres than in training", *_MNLI_ARGS, _MISMATCHED, ("MNLI",)),
        _make_task("QNLI", "does the sentence answer the question?", ("question", "sentence"), _ENTAILMENT),
        _make_task("RTE", "does the first sentence entail the second?", _SENTENCES, _ENTAILMENT),
        _make_task("WNLI", "Winograd's pronouns as inference", _SENTENCES, _numbered_labels("not_entailment", "entailment")),
        _make_task(
            "AX",
            "diagnostic inference, test only",
            _SENTENCES,
            _NLI_LABELS,
            files={"test": ("AX.tsv", "diagnostic.tsv", "diagnostic-full.tsv")},
            folders=("diagnostic",),
        ),
    )
)
# The diagnostic set with its categories and labels was published with a header of its own.
_AX_COLUMNS = {"Premise": "sentence1", "Hypothesis": "sentence2", "Label": "label"}


def read(path: Path, error_policy: ErrorPolicy, *, task: str) -> Iterator[TextExample]:
    """The examples of a file of one of the TASKS; their `id` is the index that the server wants back."""
    glue_task = TASKS[task]
    if task == "CoLA":
        yield from _read_cola(path, error_policy, glue_task)
        return
    for number, row in enumerate(read_rows(path, error_policy, file_type="tsv", allow_short_rows=True)):
        if task == "AX":
            row = _rename_ax_columns(row)
        if number == 0:
            _check_columns(path, glue_task, row.columns)
        if len(row.fields) < len(row.columns) and task == "QQP":
            # The published file has such lines, and everybody drops them: no reason to refuse it.
            error_policy.errors.append(str(field_count_error(row.location, list(row.fields), row.columns)))
            continue
        with error_policy:
            yield _make_example(row, glue_task)


def _rename_ax_columns(row: Row) -> Row:
    fields = {_AX_COLUMNS.get(name, name): value for name, value in row.fields.items()}
    return Row(row.location, fields, [_AX_COLUMNS.get(name, name) for name in row.columns])


def _check_columns(path: Path, task: GlueTask, columns: Sequence[str]) -> None:
    for name in task.text_columns:
        if name not in columns:
            raise missing_column_error(f"{path}:1", name, columns)


def _make_example(row: Row, task: GlueTask) -> TextExample:
    if len(row.fields) < len(row.columns):
        raise field_count_error(row.location, list(row.fields), row.columns)
    text, *text_pair = (row.fields[name] for name in task.text_columns)
    label = _parse_label(row.fields[task.label_column], task, row.location) if task.label_column in row.columns else None
    index = row.fields.get("index", row.fields.get("id", ""))
    return TextExample(text, row.location, text_pair[0] if text_pair else None, label, id=index)


def _parse_label(raw_label: str, task: GlueTask, location: str) -> Label:
    if task.label_names is None:
        return parse_number(raw_label, location, task.label_column)
    if raw_label not in task.label_names:
        raise InputError(f"{location}: label '{raw_label}' is none of {', '.join(task.label_names)}; correct it")
    return task.label_names[raw_label]


def _read_cola(path: Path, error_policy: ErrorPolicy, task: GlueTask) -> Iterator[TextExample]:
    """Four columns (source, label, the linguist's mark, sentence) without a header, or a test file with one."""
    is_unlabeled: bool | None = None
    for row in read_rows(path, error_policy, file_type="tsv", header=False):
        if is_unlabeled is None:
            is_unlabeled = list(row.fields.values()) == ["index", "sentence"]
            if is_unlabeled:
                continue
            if len(row.columns) != 4:
                raise field_count_error(row.location, list(row.fields), ["source", "label", "mark", "sentence"])
        with error_policy:
            if is_unlabeled:
                yield TextExample(row.fields["2"], row.location, id=row.fields["1"])
            else:
                yield TextExample(row.fields["4"], row.location, label=_parse_label(row.fields["2"], task, row.location))


def write_submission(folder: Path, task: str, examples: Sequence[TextExample], predictions: Sequence[str | float]) -> Path:
    """Writes the file that GLUE's server takes for a task, index and prediction a line, and says where it is."""
    if task not in TASKS:
        raise InputError(f"GLUE has no task '{task}'; {did_you_mean(task, TASKS)}")
    if len(examples) != len(predictions):
        raise InputError(f"{task}: {len(predictions)} predictions for {len(examples)} examples; give one for each")
    label_names = TASKS[task].label_names
    raw_labels = None if label_names is None else {name: raw_label for raw_label, name in label_names.items()}
    lines = ["index\tprediction"]
    for number, (example, prediction) in enumerate(zip(examples, predictions, strict=True)):
        index = example.id or str(number)
        if raw_labels is None:
            lines.append(f"{index}\t{parse_number(prediction, example.location, 'prediction'):.3f}")
        elif prediction in raw_labels:
            lines.append(f"{index}\t{raw_labels[str(prediction)]}")
        else:
            raise InputError(f"{example.location}: prediction '{prediction}' is none of {', '.join(raw_labels)}")
    path = folder / f"{'MNLI-m' if task == 'MNLI' else task}.tsv"
    atomic_write_text(path, "\n".join(lines) + "\n")
    return path
