"""Callbacks that send a run's records to experiment trackers: Weights & Biases and MLflow.

Name one in a recipe (`train.callbacks: [wandb]`). The trackers are configured by their own environment variables, such
as WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
"""

from __future__ import annotations

import importlib
import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.errors import InputError
from qkv.files import atomic_write_text, read_json
from qkv.train.callbacks import Callback
from qkv.train.run_folder import flatten_settings

if TYPE_CHECKING:
    from qkv.train.run_log import Record
    from qkv.train.trainer import Trainer

_TRACKING_FILE = "tracking.json"  # ids of the tracked run, so that a resumed run continues it
_MAX_PARAM_LENGTH = 500  # of MLflow


class TrackingCallback(Callback):
    """What the trackers have in common: the run starts with the first record and is continued after a resume."""

    package: str
    """Python package of the tracker, and name of the extra that installs it."""

    def __init__(self) -> None:
        """Import the tracker's package; a missing one is reported before training starts."""
        try:
            self.tracker: Any = importlib.import_module(self.package)
        except ImportError:
            message = f"callback '{self.package}' needs a package: pip install 'qkv[{self.package}]'"
            raise InputError(message) from None
        self._started = False

    def on_step(self, trainer: Trainer, record: Record) -> None:
        self._log(trainer, {f"train/{name}": value for name, value in record.values.items()})

    def on_validation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._log(trainer, {f"valid/{name}": value for name, value in metrics.items()})

    def on_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        if self._started:
            self.finish()
        self._started = False

    def _log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        if not self._started:
            path = trainer.folder / _TRACKING_FILE
            run_ids = _read_run_ids(path)
            run_ids[self.package] = self.start(trainer, run_ids.get(self.package))
            atomic_write_text(path, json.dumps(run_ids) + "\n")
            self._started = True
        self.log(values, trainer.train_state.step)

    @abstractmethod
    def start(self, trainer: Trainer, run_id: str | None) -> str:
        """Start a tracked run, or continue the one with an id, and return its id."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step."""

    @abstractmethod
    def finish(self) -> None:
        """End the tracked run."""


class WandbCallback(TrackingCallback):
    """Logs a run to Weights & Biases."""

    package = "wandb"

    def start(self, trainer: Trainer, run_id: str | None) -> str:
        run = self.tracker.init(
            project=os.environ.get("WANDB_PROJECT", "qkv"),
            name=trainer.recipe.name,
            config=asdict(trainer.recipe),
            dir=str(trainer.folder),
            id=run_id,
            resume="allow",
        )
        return str(run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.log(dict(values), step=step)

    def finish(self) -> None:
        self.tracker.finish()


class MLflowCallback(TrackingCallback):
    """Logs a run to MLflow."""

    package = "mlflow"

    def start(self, trainer: Trainer, run_id: str | None) -> str:
        run = self.tracker.start_run(run_id=run_id, run_name=None if run_id else trainer.recipe.name)
        if run_id is None:
            settings = flatten_settings(asdict(trainer.recipe))
            self.tracker.log_params({key: str(value)[:_MAX_PARAM_LENGTH] for key, value in settings.items()})
        return str(run.info.run_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.log_metrics(dict(values), step=step)

    def finish(self) -> None:
        self.tracker.end_run()


def _read_run_ids(path: Path) -> dict[str, str]:
    run_ids = read_json(path) if path.is_file() else {}
    if not isinstance(run_ids, dict) or not all(isinstance(run_id, str) for run_id in run_ids.values()):
        raise InputError(f"{path}: must hold the run ids of trackers; remove it to track the run as a new one")
    return run_ids
