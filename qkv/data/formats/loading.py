"""Read examples in any registered format: a file, a split of a folder, or a split of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.data.examples import Examples
from qkv.data.formats.io import ErrorPolicy
from qkv.data.formats.registry import DatasetFormat, get_format, has_splits
from qkv.data.formats.split_files import find_split_file
from qkv.data.formats.table import collect_examples
from qkv.errors import InputError, did_you_mean

FORMAT_SPLITS = {"valid": "dev"}  # names of the recipe's splits in the formats, where they differ
Paths = str | list[str] | None  # a file or folder, several, or none


def read(
    format: str,
    path: str | Path,
    *,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    **options: Any,
) -> Examples[Any]:
    """Read all examples of a file, or of the file of a split in a folder.

    Args:
        format: the name of a registered format, such as "csv" or "glue:MNLI".
        path: a file or, if the format has split files, a folder.
        split: "train", "dev" or "test" of a folder; a file is read as a whole.
        columns: the column of each field, such as `{"text": "review", "label": "stars"}`.
        skip_bad: list bad records in `skipped` instead of raising an error for the first one.
        options: further options of the format's reader.
    """
    dataset_format, file, settings = _resolve(format, path, split, {**(columns or {}), **options})
    examples = collect_examples(dataset_format.reader, file, skip_bad, **settings)
    examples.notes[:0] = _folder_notes(Path(path), file)
    return examples


def iter_examples(
    format: str,
    path: str | Path,
    error_policy: ErrorPolicy,
    *,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Yield the examples of a file one by one, for files that do not fit in memory. Errors go to `error_policy`."""
    dataset_format, file, settings = _resolve(format, path, split, columns or {})
    error_policy.notes += _folder_notes(Path(path), file)
    yield from dataset_format.reader(file, error_policy, **settings)


def iter_examples_with_rows(
    format: str,
    path: str | Path,
    error_policy: ErrorPolicy,
    *,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each example of a file with the fields of its record as the file has them; {} in a format without rows."""
    rows: dict[str, dict[str, Any]] = {}
    error_policy.rows = rows
    for example in iter_examples(format, path, error_policy, split=split, columns=columns):
        if example.location in rows:
            while (location := next(iter(rows))) != example.location:  # records that were skipped
                del rows[location]
        yield example, rows.get(example.location, {})


def _resolve(
    format: str, path: str | Path, split: str | None, settings: Mapping[str, Any]
) -> tuple[DatasetFormat, Path, dict[str, Any]]:
    """Return the format, the file to read, and the checked options for its reader."""
    dataset_format = get_format(format)
    check_options(format, dataset_format, settings)
    split_files = dataset_format.split_files
    if not dataset_format.reader_takes_split:
        return dataset_format, find_split_file(Path(path), split, split_files), dict(settings)
    file = find_split_file(Path(path), None, split_files) if split_files.files else Path(path)
    return dataset_format, file, {**settings, "split": split or "train"}


def _folder_notes(path: Path, file: Path) -> list[str]:
    """Return a line on which file of a folder is read; none if the path is the file itself."""
    return [] if file == path else [f"{path}: the file read is {file.relative_to(path)}"]


def check_options(format: str, dataset_format: DatasetFormat, settings: Mapping[str, Any]) -> None:
    """Refuse options that the reader of a format does not have, and missing ones that it needs."""
    known_options = dataset_format.options
    for name in settings:
        if name not in known_options:
            hint = did_you_mean(name, known_options) if known_options else "its columns are fixed"
            raise InputError(f"format '{format}' has no column or option '{name}'; {hint}")
    for name in dataset_format.required_options:
        if name not in settings:
            raise InputError(f"format '{format}' needs '{name}'; name it")


def read_files(
    format: str,
    paths: str | Sequence[str],
    *,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> Examples[Any]:
    """Read one or several files as one set. A format of two files takes exactly those, source first."""
    files = [paths] if isinstance(paths, str) else list(paths)
    settings = dict(columns or {})
    second_file_option = get_format(format).second_file_option
    if second_file_option is not None:
        if len(files) != 2:
            raise InputError(f"data.format {format} takes two files, [source, target], not {len(files)}")
        settings[second_file_option] = files.pop()
    examples: Examples[Any] = Examples()
    for file in files:
        file_examples = read(format, file, split=split, columns=settings, skip_bad=skip_bad)
        examples.extend(file_examples)
        examples.skipped += file_examples.skipped
        examples.notes += file_examples.notes
        examples.detected |= file_examples.detected
    return examples


def read_splits(
    format: str,
    paths: Mapping[str, Paths],
    splits: Sequence[str],
    *,
    held_out: Collection[str] = (),
    divide: Callable[[Examples[Any]], Mapping[str, Sequence[Any]]],
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    owner: str = "the recipe",
) -> dict[str, Examples[Any]]:
    """Read some of the splits "train", "valid" and "test" of a recipe; files that several of them share are read once.

    A split is in its own files, or held out from the training files, or the split of that name in the training folder.

    Args:
        format: the name of a registered format.
        paths: the files of each split; None where the recipe names none.
        splits: the splits to read.
        held_out: the splits that are taken out of the training examples if they have no files.
        divide: divides the training examples into splits.
        columns: options of the format's reader.
        skip_bad: list bad records in `skipped` instead of raising an error.
        owner: the section of the recipe for messages.
    """
    train_files = paths["train"]
    assert train_files is not None  # the recipe's schema requires it
    is_held_out = {split: paths[split] is None and split in held_out for split in splits}
    for split in splits:
        if paths[split] is None and not is_held_out[split] and not _all_have_splits(format, train_files):
            raise InputError(f"{owner} has no '{split}' data; give data.{split}, or a fraction under data.hold_out")
    result: dict[str, Examples[Any]] = {}
    divided: tuple[Mapping[str, Sequence[Any]], Examples[Any]] | None = None
    for split in splits:
        if is_held_out[split] or (split == "train" and held_out):
            if divided is None:
                examples = read_files(format, train_files, split="train", columns=columns, skip_bad=skip_bad)
                divided = divide(examples), examples.derive()
            result[split] = divided[1].derive(divided[0][split])
        else:
            own_files, format_split = paths[split], FORMAT_SPLITS.get(split, split)
            files = train_files if own_files is None else own_files
            result[split] = read_files(format, files, split=format_split, columns=columns, skip_bad=skip_bad)
    return result


def _all_have_splits(format: str, paths: str | list[str]) -> bool:
    return all(has_splits(format, path) for path in ([paths] if isinstance(paths, str) else paths))
