"""Images of 8 x 8 pixels in three classes that a tiny model learns quickly, as files of every format."""

from __future__ import annotations

import csv
import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = ("dark", "striped", "bright")
SIDE = 8


def pictures(count: int = 90, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return noise with no, every second or all lines brighter, and class indices.  # [count, 8, 8], [count]"""
    drawn = np.random.default_rng(seed).integers(0, 90, (count, SIDE, SIDE), dtype=np.uint8)
    labels = (np.arange(count) % 3).astype(np.uint8)
    drawn[labels == 1, ::2] += 100
    drawn[labels == 2] += 100
    return drawn, labels


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">{array.ndim + 1}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, sizes: dict[str, int] | None = None, packed: bool = False) -> Path:
    """Write the four files of MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (part, count) in enumerate((sizes or {"train": 90, "t10k": 30}).items(), 1):
        for what, array in zip(("images-idx3", "labels-idx1"), pictures(count, number), strict=True):
            content = idx_bytes(array)
            name = f"{part}-{what}-ubyte" + (".gz" if packed else "")
            (folder / name).write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_folder(folder: Path, count: int = 12, kind: str = "png", seed: int = 1) -> Path:
    """Write one folder per class."""
    for number, (picture, label) in enumerate(zip(*pictures(count, seed), strict=True)):
        path = folder / NAMES[label] / f"{number:03}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    return folder


def write_table(path: Path, folder: Path) -> Path:
    """Write the images and a table of their names, relative to the table's folder."""
    named = sorted(folder.rglob("*.png"))
    rows = [(one.relative_to(path.parent), one.parent.name) for one in named]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "label"), *rows])
    return path


def recipe_of(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return a recipe that trains on the MNIST files of a folder for a few steps."""
    plain: dict[str, Any] = {
        "name": "lines",
        "task": {"name": "image_classification", "horizontal_flip": True, "max_shift": 1, "random_erasing": 0.2},
        "data": {"format": "idx", "train": str(folder), "columns": {"names": list(NAMES)}, "hold_out": {"valid": 0.25}},
        "model": {
            "family": "vit",
            "d_model": 32,
            "d_ff": 64,
            "layers": 2,
            "heads": 2,
            "image_size": SIDE,
            "patch_size": 2,
        },
        "train": {
            "max_steps": 8,
            "batch_tokens": 272,
            "learning_rate": 0.003,
            "schedule": "constant",
            "warmup_steps": 4,
        },
        "validation": {"every_steps": 4},
    }
    plain["model"] |= {"num_channels": 1, "dropout": 0.1}
    plain["train"] |= {"log_every": 2, "label_smoothing": 0.05}
    for name, section in sections.items():
        plain[name] = plain.get(name, {}) | section if name != "model" or "init_from" not in section else section
    return plain
