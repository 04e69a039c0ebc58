"""Reader of GLUE's tab-separated files (Wang et al., 2018), without quoting.

CoLA has a header only in its test file; MRPC is Microsoft's file with a byte order mark; QQP has a few truncated lines;
test files have no labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qkv.data.examples import Label, TextExample
from qkv.data.formats.io import ErrorPolicy
from qkv.data.formats.table import parse_number, read_rows
from qkv.data.formats.text_table import Row, field_count_error, missing_column_error
from qkv.errors import InputError, quote

_ENTAILMENT = {"not_entailment": "not_entailment", "entailment": "entailment"}
_NLI_LABELS = {name: name for name in ("contradiction", "entailment", "neutral")}
_MATCHED = {"train": ("train.tsv",), "dev": ("dev_matched.tsv",), "test": ("test_matched.tsv",)}
_MATCHED |= {"dev_mismatched": ("dev_mismatched.tsv",), "test_mismatched": ("test_mismatched.tsv",)}
_MISMATCHED = {**_MATCHED, "dev": ("dev_mismatched.tsv",), "test": ("test_mismatched.tsv",)}
_DEFAULT_FILES = {split: (f"{split}.tsv",) for split in ("train", "dev", "test")}
_MSR_FILES = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}


@dataclass(frozen=True, slots=True)
class GlueTask:
    """Columns, labels and file names of a task."""

    description: str
    text_columns: tuple[str, ...]
    label_column: str
    label_names: Mapping[str, str] | None  # the file's label -> the name of the class; None if the label is a number
    files: Mapping[str, tuple[str, ...]]  # possible file names of each split
    folders: tuple[str, ...]  # possible names of the task's folder in a folder of all tasks


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
_MRPC_FILES = {
    split: (*names, *([_MSR_FILES[split]] if split in _MSR_FILES else [])) for split, names in _DEFAULT_FILES.items()
}
_MNLI_ARGS = (_SENTENCES, _NLI_LABELS, "gold_label")
TASKS: dict[str, GlueTask] = dict(
    (
        _make_task("CoLA", "linguistic acceptability", ("sentence",), _numbered_labels("unacceptable", "acceptable")),
        _make_task("SST-2", "sentiment of a film review", ("sentence",), _numbered_labels("negative", "positive")),
        _make_task(
            "MRPC",
            "do two sentences have the same meaning?",
            ("#1 String", "#2 String"),
            _numbered_labels("not_equivalent", "equivalent"),
            "Quality",
            _MRPC_FILES,
        ),
        _make_task("STS-B", "similarity of two sentences, 0 to 5", _SENTENCES, None, "score"),
        _make_task(
            "QQP",
            "are two questions duplicates?",
            ("question1", "question2"),
            _numbered_labels("not_duplicate", "duplicate"),
            "is_duplicate",
        ),
        _make_task("MNLI", "inference; dev and test are the matched ones", *_MNLI_ARGS, _MATCHED),
        _make_task("MNLI-m", "inference, matched genres", *_MNLI_ARGS, _MATCHED, ("MNLI",)),
        _make_task("MNLI-mm", "inference, other genres than in training", *_MNLI_ARGS, _MISMATCHED, ("MNLI",)),
        _make_task("QNLI", "does the sentence answer the question?", ("question", "sentence"), _ENTAILMENT),
        _make_task("RTE", "does the first sentence entail the second?", _SENTENCES, _ENTAILMENT),
        _make_task(
            "WNLI", "Winograd's pronouns as inference", _SENTENCES, _numbered_labels("not_entailment", "entailment")
        ),
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
# the published diagnostic set with categories and labels has a header of its own
_AX_COLUMNS = {"Premise": "sentence1", "Hypothesis": "sentence2", "Label": "label"}


def read(path: Path, error_policy: ErrorPolicy, *, task: str) -> Iterator[TextExample]:
    """Read a file of one of the TASKS; the `id` of an example is the index that a submission to the server needs."""
    glue_task = TASKS[task]
    if task == "CoLA":
        yield from _read_cola(path, error_policy, glue_task)
        return
    for number, row in enumerate(
        read_rows(path, error_policy, file_type="tsv", delimiter="tab", allow_short_rows=True)
    ):
        if task == "AX":
            row = _rename_ax_columns(row)
        if number == 0:
            _check_columns(path, glue_task, row.columns)
        if len(row.fields) < len(row.columns) and task == "QQP":
            # the published file has such lines, which are dropped by all implementations
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
    label = (
        _parse_label(row.fields[task.label_column], task, row.location) if task.label_column in row.columns else None
    )
    index = row.fields.get("index", row.fields.get("id", ""))
    return TextExample(text, row.location, text_pair[0] if text_pair else None, label, id=index)


def _parse_label(raw_label: str, task: GlueTask, location: str) -> Label:
    if task.label_names is None:
        return parse_number(raw_label, location, task.label_column)
    if raw_label not in task.label_names:
        raise InputError(
            f"{location}: label {quote(raw_label)} is not one of {', '.join(task.label_names)}; correct it"
        )
    return task.label_names[raw_label]


def _read_cola(path: Path, error_policy: ErrorPolicy, task: GlueTask) -> Iterator[TextExample]:
    """Read four columns (source, label, the linguist's mark, sentence) without a header, or a test file with one."""
    is_unlabeled: bool | None = None
    for row in read_rows(path, error_policy, file_type="tsv", delimiter="tab", header=False):
        if is_unlabeled is None:
            is_unlabeled = list(row.fields.values()) == ["index", "sentence"]
            if is_unlabeled:
                continue
            if len(row.columns) != 4:
                raise field_count_error(row.location, list(row.fields), ["source", "label", "mark", "sentence"])
        with error_policy:
            if len(row.fields) < len(row.columns):
                raise field_count_error(row.location, list(row.fields), row.columns)
            if is_unlabeled:
                yield TextExample(row.fields["2"], row.location, id=row.fields["1"])
            else:
                yield TextExample(
                    row.fields["4"], row.location, label=_parse_label(row.fields["2"], task, row.location)
                )
