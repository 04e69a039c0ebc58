"""Pictures with a class each: MNIST's files and those of its kin, a folder a class, or a table of file names.

MNIST's idx files (LeCun et al. 1998) hold all pictures end to end behind a head of big-endian numbers: 0x0803, how
many, rows, columns; the labels' file 0x0801 and how many. Fashion-MNIST, KMNIST, EMNIST and QMNIST are written so.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from qkv.data.corpus import unpacked
from qkv.data.examples import Pictured, Pixels
from qkv.data.images import check
from qkv.data.tasks.folder import ALIASES, Names
from qkv.data.tasks.lines import PACKED, Bad
from qkv.data.tasks.table import label_of, rows
from qkv.errors import InputError

IDX = Names(
    {
        "train": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
        "test": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    }
)
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MAGIC = {3: 0x0803, 1: 0x0801}  # bytes in so many dimensions
_IMAGES = ("images-idx3", "images.idx3")


# ---- idx ------------------------------------------------------------------------------------------------------------


def idx(
    path: Path, bad: Bad, *, label: str | None = "labels", names: Sequence[str] | str | None = None
) -> Iterator[Pictured]:
    """Pictures of an idx3 file with the labels of the idx1 file beside it, whose name has `label` where this one's has
    "images"; `label=None` reads none. `names` are those of the classes, in the order of their numbers.

    The pictures stay one array, of which an example holds a view.
    """
    pictures = _array(path, 3)  # [N, H, W]
    known = names.split(",") if isinstance(names, str) else names
    numbers = None if label is None else _labels(path, label, len(pictures))
    for number, picture in enumerate(pictures):
        where = f"{path}: picture {number + 1}"
        with bad:
            named = None if numbers is None else _class(int(numbers[number]), known, where)
            yield Pictured(picture, where, named)


def _labels(path: Path, label: str, count: int) -> Pixels:
    beside = _beside(path, label)
    found = _array(beside, 1)
    if len(found) != count:
        raise InputError(f"{beside}: {len(found):,} labels for the {count:,} pictures of {path.name}; copy both again")
    return found


def _beside(path: Path, label: str) -> Path:
    """The file of the labels, packed or not, whichever the pictures are."""
    told = next((name for name in _IMAGES if name in path.name), None)
    if told is None:
        raise InputError(f"{path}: its name has no {_IMAGES[0]}, so its labels are not found; rename it, or label=none")
    plain = path.with_suffix("") if path.suffix.lower() in PACKED else path
    own = plain.name.replace(told, told.replace("images", label).replace("idx3", "idx1"))
    tried = [path.with_name(own + packed) for packed in ("", *PACKED)]
    found = [file for file in tried if file.is_file()]
    if not found:
        raise InputError(f"{path.with_name(own)}: no such file, and it has the labels of {path.name}; bring it here")
    return found[0]


def _array(path: Path, dimensions: int) -> Pixels:
    """All of an idx file."""
    raw = _bytes(path)
    if not raw:
        raise InputError(f"{path}: empty, no pictures or labels in it; copy the file again")
    head = 4 * (dimensions + 1)
    if len(raw) < head or struct.unpack(">I", raw[:4])[0] != _MAGIC[dimensions]:
        what = f"idx{dimensions} file of bytes: it begins with 0x{raw[:4].hex()}, not 0x{_MAGIC[dimensions]:08x}"
        raise InputError(f"{path}: no {what}; name the file of the {'pictures' if dimensions == 3 else 'labels'}")
    shape = struct.unpack(f">{dimensions}I", raw[4:head])
    wanted, there = int(np.prod(shape, dtype=object)), len(raw) - head
    if there != wanted:
        said = "ends early" if there < wanted else "goes on behind its end"
        raise InputError(f"{path}: {said}: {there:,} bytes for {' x '.join(map(str, shape))}; copy the file again")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def _bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return b"".join(unpacked(file, str(path)))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: the {path.suffix.lower()} file is broken or ends early; copy it again") from None
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror}); give a readable file") from None


def _class(number: int, names: Sequence[str] | None, where: str) -> str:
    if names is None:
        return str(number)
    if number >= len(names):
        raise InputError(f"{where}: is of class {number}, and names has 0 to {len(names) - 1}; name all classes")
    return str(names[number]).strip()


# ---- files of pictures ----------------------------------------------------------------------------------------------


def images(
    path: Path, bad: Bad, *, part: str = "train", file: str = "file", label: str | None = "label"
) -> Iterator[Pictured]:
    """Pictures of a folder with a folder a class, perhaps under one for each part; or of a table with a column of file
    names, from the table's own folder on, and one of labels. `label=None` reads none.

    Every file is looked through, so that none is found broken later.
    """
    if not path.is_dir():
        yield from _table(path, bad, file, label)
        return
    whole = _part(path, part)
    for picture in sorted(one for one in whole.rglob("*") if _is_picture(one.relative_to(whole)) and one.is_file()):
        inside = picture.relative_to(whole).parts
        with bad:
            check(picture)
            yield Pictured(picture, str(picture), inside[0] if len(inside) > 1 and label is not None else None)


def _table(path: Path, bad: Bad, file: str, label: str | None) -> Iterator[Pictured]:
    for row in rows(path, bad, needs=[name for name in (file, label) if name is not None]):
        with bad:
            picture, named = path.parent / row.text(file), None if label is None else label_of(row, label)
            if named is not None and not isinstance(named, str):
                raise InputError(f"{row.where}: the column '{label}' is no one class; give each picture one")
            try:
                check(picture)
            except InputError as error:
                raise InputError(f"{row.where}: {error}") from None
            except ValueError:  # a name with a character that no file's can have
                raise InputError(f"{row.where}: the column '{file}' names no file; correct it") from None
            yield Pictured(picture, row.where, named)


def _is_picture(inside: Path) -> bool:
    """By its name; what is hidden is not meant."""
    return inside.suffix.lower() in ENDINGS and not any(name.startswith(".") for name in inside.parts)


def has_parts(path: Path) -> bool:
    """Whether a folder is one of parts, which are then folders of classes."""
    return path.is_dir() and any((path / name).is_dir() for names in ALIASES.values() for name in names)


def _part(path: Path, part: str) -> Path:
    """The folder of a part; one that has no parts is taken whole."""
    if not has_parts(path):
        return path
    names = next((names for name, names in ALIASES.items() if part in names), (part,))
    found = [path / name for name in names if (path / name).is_dir()]
    if not found:
        there = ", ".join(sorted(one.name for one in path.iterdir())[:12])
        raise InputError(f"{path}: no folder {' or '.join(names)} for the part '{part}'; in it: {there}")
    return found[0]
