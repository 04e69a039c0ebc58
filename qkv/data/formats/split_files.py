"""Find the file of a split in the folder of a downloaded dataset."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qkv.data.formats.io import COMPRESSED, file_suffix
from qkv.data.formats.rows import has_saved_splits, is_saved_dataset
from qkv.errors import InputError, did_you_mean

ALIASES = {"train": ("train", "training"), "dev": ("dev", "val", "valid", "validation"), "test": ("test",)}


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """File names of a format: given for each split, or recognized by the suffix and the name of the split."""

    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Possible file names of each split; empty if files are found by `suffixes`."""
    folders: tuple[str, ...] = ()
    """Subfolders that may contain the files."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of the files, which have the name of the split in theirs."""


def has_split_files(path: Path) -> bool:
    """Return whether a path is a folder with files, or folders of `save_to_disk`, of several splits."""
    return os.path.isdir(path) and (has_saved_splits(path) or not is_saved_dataset(path))


def find_split_file(path: Path, split: str | None, split_files: SplitFiles) -> Path:
    """Return the file of a split in a folder, by default that of "train"; a file is returned unchanged."""
    if not os.path.isdir(path):
        return path
    if is_saved_dataset(path):
        return _saved_split(path, split or "train") if has_saved_splits(path) else path
    subfolders = [path / name for name in split_files.folders if (path / name).is_dir()]
    folder = subfolders[0] if subfolders else path
    split_name = _canonical_split(split or "train", split_files, path)
    if split_files.files:
        candidates = [folder / name for name in split_files.files[split_name]]
        matches = [variant for file in candidates for variant in _compressed_variants(file) if variant.is_file()]
    else:
        matches = _files_named_after(folder, split_name, split_files.suffixes)
        if len(matches) > 1:
            file_names = ", ".join(file.name for file in matches)
            problem = f"several files could be the split '{split_name}': {file_names}"
            raise InputError(f"{folder}: {problem}; give the file instead of the folder")
    if not matches:
        contents = ", ".join(sorted(file.name for file in folder.iterdir())[:12]) or "nothing"
        named = " or ".join(split_files.files.get(split_name, ()))
        expected = named or f"{split_name}*{' or '.join(split_files.suffixes)}"
        raise InputError(f"{folder}: no {expected} for the split '{split_name}'; the folder contains: {contents}")
    return matches[0]


def _saved_split(path: Path, split: str) -> Path:
    """Return the folder of a split that `save_to_disk` wrote; its names are free, such as "validation_matched"."""
    names = (split, *next((aliases for name, aliases in ALIASES.items() if split in aliases), ()))
    folders = sorted(folder.name for folder in path.iterdir() if is_saved_dataset(folder))
    match = next((name for name in names if name in folders), None)
    if match is None:
        raise InputError(f"{path}: no split '{split}'; the folder contains: {', '.join(folders[:12]) or 'nothing'}")
    return path / match


def _canonical_split(split: str, split_files: SplitFiles, path: Path) -> str:
    split_name = next((name for name, aliases in ALIASES.items() if split in aliases), split)
    if split_name in split_files.files:
        return split_name
    known = split_files.files or ALIASES
    # MNLI has two files each for dev and test: "dev_matched" is its "dev"
    if split_name.removesuffix("_matched") in known:
        return split_name.removesuffix("_matched")
    if split_name not in known:
        raise InputError(f"{path}: no split '{split}'; {did_you_mean(split, known)}")
    return split_name


def _compressed_variants(file: Path) -> Iterator[Path]:
    yield file
    yield from (file.with_name(file.name + extension) for extension in COMPRESSED)


def _files_named_after(folder: Path, split: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files whose name is that of the split; if there are none, those whose name contains it."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file_suffix(file) in suffixes)
    stems = {file: file.name.lower().partition(".")[0] for file in files}
    exact = [file for file in files if stems[file] in ALIASES[split]]
    pattern = re.compile(rf"(?<![a-z])({'|'.join(ALIASES[split])})(?![a-z])")
    return exact or [file for file in files if pattern.search(file.name.lower())]
