"""Hyper-parameter search over recipe keys with Optuna: trials, pruning, resumption, and the best recipe.

The folder of a sweep contains `study.log` (Optuna's journal), `trials.tsv`, `best.yaml`, and one folder per trial,
named by a digest of its values. An interrupted trial therefore resumes from its checkpoint, and several processes can
work on one sweep: the folder of a trial is locked while it is trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.errors import InputError, one_line
from qkv.files import atomic_write_text
from qkv.recipe.parse import RECIPE_FILE, read_recipe, recipe_to_yaml
from qkv.recipe.search_space import Choice, Dimension, SearchSpace
from qkv.train.callbacks import Callback
from qkv.train.fit import fit
from qkv.train.multi_run import final_metrics
from qkv.train.run_folder import lock_run_folder
from qkv.train.run_log import LOG

if TYPE_CHECKING:
    import optuna

    from qkv.train.trainer import Trainer

BEST_RECIPE, TRIALS_TABLE = "best.yaml", "trials.tsv"
_JOURNAL, _SPACE, _RUN = "study.log", "space.json", "run"
_MAX_FIRST_FAILURES = 3  # a sweep whose first trials all fail is ended: the recipe is hardly right
_STARTUP_TRIALS = 5  # random trials before the sampler learns from them, and trials that are never pruned
# user attributes of a study and of its trials
_METRIC, _SIGN, _STEP, _ERROR = "metric", "sign", "step", "error"


@dataclass(frozen=True)
class TrialResult:
    """One trial of a sweep."""

    number: int
    """Number of the trial, from 1."""
    state: str
    """`complete`, `pruned` or `failed`."""
    values: dict[str, Any]
    """Value of each searched key."""
    metric: float | None
    """Validation metric: of the best step, or of the last one before pruning."""
    step: int
    """Last step that was trained."""
    folder: Path
    """Run folder of the trial."""
    error: str = ""
    """Reason of a failure, in one line."""


class Sweep:
    """A search in a folder; it continues the study that the folder contains."""

    def __init__(self, recipe_path: Path, space: SearchSpace, folder: Path, *, prune: bool, seed: int | None) -> None:
        """Open or create the study.

        Args:
            recipe_path: the recipe whose keys are varied.
            space: the searched keys and fixed overrides.
            folder: the folder of the sweep.
            prune: end trials early whose validation metric is below the median of the earlier trials at that step.
            seed: seed of the sampler; None: that of the recipe.
        """
        self.recipe_path, self.space, self.folder = recipe_path, space, folder
        recipe = read_recipe(recipe_path, [*space.overrides, *_overrides(_first_values(space.dimensions))])
        self._optuna = _import_optuna()
        _check_same_space(folder, recipe_path, space)
        backend = self._optuna.storages.journal.JournalFileBackend(str(folder / _JOURNAL))
        storage = self._optuna.storages.JournalStorage(backend)
        pruners = self._optuna.pruners
        self.study: optuna.Study = self._optuna.create_study(
            study_name="sweep",
            storage=storage,
            load_if_exists=True,
            direction="minimize",  # the metric times its sign, see `Trainer.metric_sign`
            pruner=pruners.MedianPruner(n_startup_trials=_STARTUP_TRIALS) if prune else pruners.NopPruner(),
        )
        # another seed after a resume: the sampler would draw its first values again
        sampler_seed = (recipe.seed if seed is None else seed) + len(self.study.get_trials(deepcopy=False))
        self.study.sampler = self._optuna.samplers.TPESampler(seed=sampler_seed, n_startup_trials=_STARTUP_TRIALS)
        self._requeue_interrupted()

    @property
    def metric(self) -> str:
        """Name of the validation metric; empty before the first validation."""
        return str(self.study.user_attrs.get(_METRIC, ""))

    def run(self, num_trials: int, device: str | None = None) -> Iterator[TrialResult]:
        """Train until the study has `num_trials` trials that are complete or pruned, and yield each new one."""
        while len(self.results(("complete", "pruned"))) < num_trials:
            yield self._run_trial(device)
            failures = self.results(("failed",))
            if len(failures) >= _MAX_FIRST_FAILURES and len(failures) == len(self.results()):
                raise InputError(f"the first {len(failures)} trials failed, the last: {failures[-1].error}")

    def results(self, states: Sequence[str] = ("complete", "pruned", "failed")) -> list[TrialResult]:
        """Return the finished trials with these states, in the order of their numbers."""
        trials = (self._result(trial) for trial in self.study.get_trials(deepcopy=False) if trial.state.is_finished())
        return [result for result in trials if result.state in states]

    def ranked(self) -> list[TrialResult]:
        """Return the trials, the best first, failed ones last."""
        sign = self.study.user_attrs.get(_SIGN, 1)
        complete = sorted(self.results(("complete",)), key=lambda result: sign * (result.metric or 0.0))
        return [*complete, *self.results(("pruned",)), *self.results(("failed",))]

    def write_results(self, keep_all: bool) -> TrialResult | None:
        """Write the table of trials and the best recipe; return the best trial.

        Args:
            keep_all: keep the weights of all trials; otherwise those of the best remain, with the logs of all.
        """
        ranked = self.ranked()
        rows = [["trial", "state", self.metric or "metric", "step", *(d.key for d in self.space.dimensions), "folder"]]
        for result in ranked:
            metric = "" if result.metric is None else f"{result.metric:.6g}"
            values = [str(result.values.get(dimension.key, "")) for dimension in self.space.dimensions]
            rows.append([str(result.number), result.state, metric, str(result.step), *values, str(result.folder)])
        atomic_write_text(self.folder / TRIALS_TABLE, "".join("\t".join(row) + "\n" for row in rows))
        best = ranked[0] if ranked and ranked[0].state == "complete" else None
        if best is not None:
            atomic_write_text(self.folder / BEST_RECIPE, recipe_to_yaml(self._recipe(best.values)))
        if not keep_all:
            for result in ranked:
                if best is None or result.folder != best.folder:
                    _remove_weights(result.folder)
        return best

    def _run_trial(self, device: str | None) -> TrialResult:
        trial = self.study.ask()
        values = {dimension.key: _suggest(trial, dimension) for dimension in self.space.dimensions}
        folder = self._trial_folder(values)
        lock_fd = lock_run_folder(folder.parent)
        state, value = self._optuna.trial.TrialState.COMPLETE, None
        try:
            repeated = self._same_values(values, trial.number)
            if repeated is not None:
                state, value = repeated.state, repeated.value
                trial.set_user_attr(_STEP, repeated.user_attrs.get(_STEP, 0))
            else:
                reporter = _Reporter(trial, self.study)
                for _ in fit(self._recipe(values), folder, device=device, callbacks=[reporter]):
                    pass
                if reporter.pruned:
                    state = self._optuna.trial.TrialState.PRUNED
                else:
                    value = self.study.user_attrs[_SIGN] * final_metrics(folder)[self.metric]
        except InputError as error:
            state = self._optuna.trial.TrialState.FAIL
            trial.set_user_attr(_ERROR, one_line(error))
        finally:
            if lock_fd is not None:
                os.close(lock_fd)
        return self._result(self.study.tell(trial, value, state))

    def _recipe(self, values: Mapping[str, Any]) -> Any:
        return read_recipe(self.recipe_path, [*self.space.overrides, *_overrides(values)])

    def _trial_folder(self, values: Mapping[str, Any]) -> Path:
        """Return the run folder of a trial; its parent is locked while the trial is trained."""
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        return self.folder / f"trial-{digest}" / _RUN

    def _same_values(self, values: Mapping[str, Any], number: int) -> optuna.trial.FrozenTrial | None:
        """Return an earlier trial with the same values, which need not be trained again."""
        states = self._optuna.trial.TrialState
        trials = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
        return next((t for t in trials if t.number != number and self._values(t) == dict(values)), None)

    def _values(self, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        """Return the values of a trial; of a choice, Optuna stores the index."""
        choices = {dimension.key: dimension for dimension in self.space.dimensions if isinstance(dimension, Choice)}
        return {
            key: choices[key].values[int(value)] if key in choices else value for key, value in trial.params.items()
        }

    def _result(self, trial: optuna.trial.FrozenTrial) -> TrialResult:
        values = self._values(trial)
        sign = self.study.user_attrs.get(_SIGN, 1)
        reported = trial.intermediate_values
        value = trial.value if trial.value is not None else reported[max(reported)] if reported else None
        return TrialResult(
            trial.number + 1,
            {"COMPLETE": "complete", "PRUNED": "pruned"}.get(trial.state.name, "failed"),
            values,
            None if value is None else sign * value,
            trial.user_attrs.get(_STEP, max(reported, default=0)),
            self._trial_folder(values),
            trial.user_attrs.get(_ERROR, ""),
        )

    def _requeue_interrupted(self) -> None:
        """Queue the values of trials whose process is gone, so that they resume from their checkpoints first."""
        states = self._optuna.trial.TrialState
        for trial in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            try:
                lock_fd = lock_run_folder(self._trial_folder(self._values(trial)).parent)
            except InputError:
                continue  # another process trains it
            if lock_fd is not None:
                os.close(lock_fd)
            self.study.tell(trial.number, state=states.FAIL)
            if len(trial.params) == len(self.space.dimensions):
                self.study.enqueue_trial(trial.params)


class _Reporter(Callback):
    """Reports the validations of a trial to Optuna, and ends the run if the trial is pruned."""

    def __init__(self, trial: optuna.Trial, study: optuna.Study) -> None:
        self._trial, self._study = trial, study
        self.pruned = False

    def on_validation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        metric, step = trainer.workload.metric, trainer.train_state.step
        if self._study.user_attrs.get(_METRIC) != metric:
            self._study.set_user_attr(_METRIC, metric)
            self._study.set_user_attr(_SIGN, trainer.metric_sign)
        self._trial.report(trainer.metric_sign * metrics[metric], step)
        self._trial.set_user_attr(_STEP, step)
        if self._trial.should_prune():
            self.pruned = trainer.train_state.finished = True


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("qkv sweep needs a package: pip install 'qkv[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _suggest(trial: optuna.Trial, dimension: Dimension) -> Any:
    if isinstance(dimension, Choice):  # by index, because Optuna stores few types
        return dimension.values[trial.suggest_categorical(dimension.key, list(range(len(dimension.values))))]
    if dimension.is_integer:
        step = 1 if dimension.step is None else int(dimension.step)
        return trial.suggest_int(dimension.key, int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return trial.suggest_float(dimension.key, dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def _first_values(dimensions: Sequence[Dimension]) -> dict[str, Any]:
    """Return values with which the keys can be validated before the first trial."""
    return {d.key: d.values[0] if isinstance(d, Choice) else d.low for d in dimensions}


def _overrides(values: Mapping[str, Any]) -> list[str]:
    """Return values as recipe overrides."""
    return [
        f"{key}={_yaml_number(value) if isinstance(value, float) else json.dumps(value)}"
        for key, value in values.items()
    ]


def _yaml_number(value: float) -> str:
    """Return a float as YAML reads it: with a decimal point, which Python leaves out in 1e-05."""
    mantissa, exponent_sign, exponent = repr(value).partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}{exponent_sign}{exponent}"


def _check_same_space(folder: Path, recipe_path: Path, space: SearchSpace) -> None:
    """Refuse a folder with a sweep of another recipe or other ranges."""
    description = json.dumps(
        {"recipe": str(recipe_path), "overrides": space.overrides, "space": [repr(d) for d in space.dimensions]}
    )
    path = folder / _SPACE
    if path.is_file() and path.read_text(encoding="utf-8") != description:
        raise InputError(f"{folder}: holds a sweep of another recipe or with other ranges; choose another --output")
    if not path.is_file() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: already exists and is no sweep; choose another --output")
    atomic_write_text(path, description)


def _remove_weights(folder: Path) -> None:
    """Remove everything but the recipe and the log of a run."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name in (RECIPE_FILE, LOG):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
