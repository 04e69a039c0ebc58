"""The file of a part in a folder as it was downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qkv.data.tasks.lines import PACKED, ending
from qkv.errors import InputError, nearest

ALIASES = {"train": ("train", "training"), "dev": ("dev", "val", "valid", "validation"), "test": ("test",)}


@dataclass(frozen=True, slots=True)
class Names:
    """How the files of a format are called: by part, and in which folder; or by their ending and the part's name."""

    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()


def find(path: Path, part: str | None, names: Names) -> Path:
    """`path` itself if it is a file, else the file of the part in it ("train" if none is named)."""
    if not path.is_dir():
        return path
    inside = [path / name for name in names.folders if (path / name).is_dir()]
    folder = inside[0] if inside else path
    wanted = _part(part or "train", names, path)
    if names.files:
        tried = [folder / name for name in names.files[wanted]]
        found = [packed for file in tried for packed in _packed(file) if packed.is_file()]
    else:
        found = _called(folder, wanted, names.endings)
        if len(found) > 1:
            listed = ", ".join(file.name for file in found)
            raise InputError(f"{folder}: several files may be its part '{wanted}': {listed}; name the file itself")
    if not found:
        there = ", ".join(sorted(file.name for file in folder.iterdir())[:12]) or "nothing"
        looked = " or ".join(names.files[wanted]) if names.files else f"{wanted}*{' or '.join(names.endings)}"
        raise InputError(f"{folder}: no {looked} for the part '{wanted}'; in it: {there}")
    return found[0]


def _part(part: str, names: Names, path: Path) -> str:
    wanted = next((name for name, aliases in ALIASES.items() if part in aliases), part)
    if wanted in names.files:
        return wanted
    known = names.files or ALIASES
    # MNLI has two of each: "dev_matched" is its "dev".
    if wanted.removesuffix("_matched") in known:
        return wanted.removesuffix("_matched")
    if wanted not in known:
        raise InputError(f"{path}: there is no part '{part}'; {nearest(part, known)}")
    return wanted


def _packed(file: Path) -> Iterator[Path]:
    yield file
    yield from (file.with_name(file.name + kind) for kind in PACKED)


def _called(folder: Path, part: str, endings: tuple[str, ...]) -> list[Path]:
    """Files called after the part; if there are none, those that have its name in theirs."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and ending(file) in endings)
    stems = {file: file.name.lower().partition(".")[0] for file in files}
    exact = [file for file in files if stems[file] in ALIASES[part]]
    named = re.compile(rf"(?<![a-z])({'|'.join(ALIASES[part])})(?![a-z])")
    return exact or [file for file in files if named.search(file.name.lower())]
