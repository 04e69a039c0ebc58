"""A training run as `qkv.fit` returns it: an iterator of records that can also be run to its end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from qkv.recipe.schema import Recipe
from qkv.train.run_log import Record


class Run:
    """A run in a folder. It trains while it is iterated over; `run()` trains to the end and shows the progress."""

    def __init__(self, recipe: Recipe, folder: Path, records: Iterator[Record]) -> None:
        self.recipe = recipe
        """The recipe, complete."""
        self.folder = folder
        """The run folder, which `qkv.load` and `qkv.predict` read."""
        self.records: list[Record] = []
        """The records so far."""
        self._iterator = records
        self._state = "not started"

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        self._state = "training"
        try:
            record = next(self._iterator)
        except StopIteration:
            self._state = "finished"
            raise
        except BaseException:
            self._state = "stopped; call qkv.fit again to resume"
            raise
        self.records.append(record)
        return record

    def close(self) -> None:
        """Stop training; the run can be resumed from its last checkpoint."""
        self._iterator.close()  # type: ignore[attr-defined]  # a generator
        self._state = "closed"

    def run(self, progress: bool = True) -> Run:
        """Train to the end, show the progress unless `progress` is False, and return the run."""
        from qkv.train.display import display

        if progress:
            display(self, self.recipe.train.max_steps)
        else:
            for _ in self:
                pass
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """The validation metrics of the weights that were saved at the end; before that, of the last validation."""
        validations = {record.step: record.values for record in self.records if record.kind == "valid"}
        final = next((record for record in reversed(self.records) if record.kind == "final"), None)
        best_step = next(reversed(validations), None) if final is None else final.values.get("best_step")
        values = validations.get(int(best_step), {}) if best_step is not None else {}
        return {name: value for name, value in values.items() if name != "seconds"}

    def __repr__(self) -> str:
        hint = "; iterate over it, or call run()" if self._state == "not started" else ""
        step = f", step {self.records[-1].step}" if self.records else ""
        scores = "".join(f", {name} {value:.4g}" for name, value in list(self.metrics.items())[:1])
        return f"Run({str(self.folder)!r}, {self._state}{step}{scores}{hint})"

    def __del__(self) -> None:
        if getattr(self, "_state", "") == "not started":
            message = f"qkv.fit: the run in {self.folder} was never started; iterate over it, or call run()"
            warnings.warn(message, stacklevel=2)
