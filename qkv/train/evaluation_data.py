"""The data of an evaluation: a file, data in memory, or a split of a run's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qkv.data import formats
from qkv.data.examples import Example
from qkv.errors import InputError
from qkv.recipe.schema import PairDataset, TaskData

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class EvaluationData:
    """The data that a model is evaluated on."""

    source: Any = None
    """A file, a folder, rows such as a data frame, or a list of examples; None: a split of the run's recipe."""
    target: str | Path | None = None
    """File of the targets that is aligned with `source` (pairs)."""
    format: str | None = None
    """Format of the file; None: that of the run, or by the file name."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns and other options of the reader."""
    split: Split | None = None
    """Split of the recipe, or of the folder; None: test, or the held-out text of pretraining."""
    skip_bad: bool = False
    """Skip examples that cannot be read, and list them."""

    @property
    def path(self) -> Path | None:
        """The file or folder; None for a split of the recipe and for data in memory."""
        return Path(self.source) if isinstance(self.source, str | Path) else None

    @property
    def examples(self) -> list[Example] | None:
        """The examples if the data is a list of them."""
        is_list = isinstance(self.source, list | tuple) and len(self.source) > 0
        return list(self.source) if is_list and all(isinstance(item, Example) for item in self.source) else None


def require_split(section: TaskData | PairDataset, format: str, split: str) -> None:
    """Refuse a split that the data section of a recipe neither names nor holds out, and that its folder lacks."""
    names = [section.train] if isinstance(section.train, str) else section.train or []
    if split == "train" or getattr(section, split) is not None or split in section.hold_out:
        return
    if not all(formats.has_splits(format, name) for name in names):
        others = "--split valid or train" if split == "test" else "--split train"
        raise InputError(f"the recipe has no {split} data; give --data FILE, or choose {others}")
