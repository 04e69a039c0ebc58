"""Readers of labeled images: MNIST's idx files, one folder per class, or a table of file names.

An idx file (LeCun et al. 1998) has a header of big-endian integers, then all images: 0x0803, number of images, rows,
columns. A label file has 0x0801 and the number of labels. Fashion-MNIST, KMNIST, EMNIST and QMNIST have this format.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkv.data.compression import open_decompressed
from qkv.data.examples import ImageExample, Pixels
from qkv.data.formats.io import COMPRESSED, ErrorPolicy
from qkv.data.formats.rows import MemoryRows, Source, is_saved_dataset
from qkv.data.formats.split_files import ALIASES, SplitFiles
from qkv.data.formats.table import parse_label, read_rows
from qkv.data.formats.text_table import Row
from qkv.data.image_files import verify_image
from qkv.errors import InputError
from qkv.files import open_file
from qkv.limits import limit, raise_hint

IDX_FILES = SplitFiles(
    {
        "train": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
        "test": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    }
)
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MAGIC = {3: 0x0803, 1: 0x0801}  # by the number of dimensions
_IMAGE_FILE_MARKERS = ("images-idx3", "images.idx3")


# ---- idx ------------------------------------------------------------------------------------------------------------


def read_idx(
    path: Path, error_policy: ErrorPolicy, *, label: str | None = "labels", names: Sequence[str] | str | None = None
) -> Iterator[ImageExample]:
    """Read the images of an idx3 file with the labels of the idx1 file in the same folder.

    The name of the label file has `label` in place of "images"; `label=None` reads no labels. `names` are the classes
    in the order of their indices. Examples are views of one array.
    """
    pixels = _read_idx_array(path, 3)  # [N, H, W]
    class_names = names.split(",") if isinstance(names, str) else names
    label_ids = None if label is None else _read_label_ids(path, label, len(pixels))
    for index, image in enumerate(pixels):
        location = f"{path}: image {index + 1}"
        with error_policy:
            class_name = None if label_ids is None else _class_name(int(label_ids[index]), class_names, location)
            yield ImageExample(image, location, class_name)


def _read_label_ids(path: Path, label: str, count: int) -> Pixels:
    label_file = _find_label_file(path, label)
    label_ids = _read_idx_array(label_file, 1)
    if len(label_ids) != count:
        raise InputError(
            f"{label_file}: {len(label_ids):,} labels for the {count:,} images of {path.name}; copy both again"
        )
    return label_ids


def _find_label_file(path: Path, label: str) -> Path:
    """Return the file of the labels, which may be compressed independently of the images."""
    marker = next((name for name in _IMAGE_FILE_MARKERS if name in path.name), None)
    if marker is None:
        problem = f"its name has no {_IMAGE_FILE_MARKERS[0]}, so its label file is unknown"
        raise InputError(f"{path}: {problem}; rename it, or set label=none")
    uncompressed = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    label_name = uncompressed.name.replace(marker, marker.replace("images", label).replace("idx3", "idx1"))
    candidates = [path.with_name(label_name + extension) for extension in ("", *COMPRESSED)]
    matches = [file for file in candidates if file.is_file()]
    if not matches:
        raise InputError(f"{path.with_name(label_name)}: no such file; it contains the labels of {path.name}")
    return matches[0]


def _read_idx_array(path: Path, dimensions: int) -> Pixels:
    """Read a whole idx file as an array."""
    raw = _read_bytes(path)
    if not raw:
        raise InputError(f"{path}: empty, no images or labels in it; copy the file again")
    header_size = 4 * (dimensions + 1)
    if len(raw) < header_size or struct.unpack(">I", raw[:4])[0] != _MAGIC[dimensions]:
        problem = f"not an idx{dimensions} file: it begins with 0x{raw[:4].hex()}, not 0x{_MAGIC[dimensions]:08x}"
        raise InputError(f"{path}: {problem}; give the file of the {'images' if dimensions == 3 else 'labels'}")
    shape = struct.unpack(f">{dimensions}I", raw[4:header_size])
    expected_bytes, actual_bytes = int(np.prod(shape, dtype=object)), len(raw) - header_size
    if actual_bytes != expected_bytes:
        problem = "ends early" if actual_bytes < expected_bytes else "is too long"
        size = f"{actual_bytes:,} bytes for {' x '.join(map(str, shape))}"
        raise InputError(f"{path}: {problem}: {size}; copy the file again")
    return np.frombuffer(raw, np.uint8, offset=header_size).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    max_bytes = limit("data_json_bytes")
    try:
        with open_file(path) as file:
            content = open_decompressed(file, str(path)).read(max_bytes + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: the {path.suffix.lower()} file is broken or ends early; copy it again") from None
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror}); give a readable file") from None
    if len(content) > max_bytes:
        raise InputError(f"{path}: the file has too many bytes; {raise_hint('data_json_bytes')}")
    return content


def _class_name(class_index: int, class_names: Sequence[str] | None, location: str) -> str:
    if class_names is None:
        return str(class_index)
    if class_index >= len(class_names):
        known = f"names has 0 to {len(class_names) - 1}"
        raise InputError(f"{location}: has class {class_index}, but {known}; name all classes")
    return str(class_names[class_index]).strip()


# ---- image files ----------------------------------------------------------------------------------------------


def read_images(
    path: Source,
    error_policy: ErrorPolicy,
    *,
    split: str = "train",
    file: str = "file",
    label: str | None = "label",
    delimiter: str | None = None,
    encoding: str | None = None,
) -> Iterator[ImageExample]:
    """Read the images of a folder with one subfolder per class, or of a table of file names and labels.

    The folder of classes may be inside a folder per split. `file` and `label` are the columns of a table, whose file
    names are relative to its own folder. `label=None` reads no labels. Every image is verified, so that a broken file
    is reported before training.
    """
    if isinstance(path, MemoryRows) or not os.path.isdir(path) or is_saved_dataset(path):
        options: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding}
        required = [name for name in (file, label) if name is not None]
        rows = read_rows(path, error_policy, required=required, **options)
        folder = Path() if isinstance(path, MemoryRows) else path.parent
        yield from _read_image_rows(rows, folder, error_policy, file, label)
        return
    root = _split_folder(path, split)
    for image_path in sorted(entry for entry in root.rglob("*") if _is_image(entry, root)):
        folders = image_path.relative_to(root).parts[:-1]
        with error_policy:
            verify_image(image_path)
            yield ImageExample(image_path, str(image_path), folders[0] if folders and label is not None else None)


def _read_image_rows(
    rows: Iterable[Row], folder: Path, error_policy: ErrorPolicy, file: str, label: str | None
) -> Iterator[ImageExample]:
    for row in rows:
        with error_policy:
            image_path, class_name = folder / row.text(file), None if label is None else parse_label(row, label)
            if class_name is not None and not isinstance(class_name, str):
                raise InputError(
                    f"{row.location}: the column '{label}' is not a single class; give one class per image"
                )
            try:
                verify_image(image_path)
            except InputError as error:
                raise InputError(f"{row.location}: {error}") from None
            except ValueError:  # a character that no file name can have
                raise InputError(f"{row.location}: the column '{file}' is not a file name; correct it") from None
            yield ImageExample(image_path, row.location, class_name)


def _is_image(path: Path, root: Path) -> bool:
    """Return whether a path is an image file by its name, and not hidden below `root`."""
    is_hidden = any(name.startswith(".") for name in path.relative_to(root).parts)
    return path.suffix.lower() in SUFFIXES and not is_hidden and path.is_file()


def has_splits(path: Path) -> bool:
    """Return whether a folder has one subfolder per split."""
    return os.path.isdir(path) and any(os.path.isdir(path / name) for names in ALIASES.values() for name in names)


def _split_folder(path: Path, split: str) -> Path:
    """Return the subfolder of a split, or the folder itself if it has no splits."""
    if not has_splits(path):
        return path
    names = next((names for name, names in ALIASES.items() if split in names), (split,))
    matches = [path / name for name in names if (path / name).is_dir()]
    if not matches:
        contents = ", ".join(sorted(entry.name for entry in path.iterdir())[:12])
        raise InputError(
            f"{path}: no folder {' or '.join(names)} for the split '{split}'; the folder contains: {contents}"
        )
    return matches[0]
