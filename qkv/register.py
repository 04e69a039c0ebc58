"""Extend qkv from your own module with families, objectives, tasks, metrics, formats, schedules, callbacks and more.

    import qkv
    from qkv.metrics.metric import MeanMetric

    @qkv.register.metric("length_ratio")
    class LengthRatio(MeanMetric): ...

Each function takes a name and an entry, or decorates the entry. A name that is taken is refused. The module is imported
by `qkv --import my_module`, by `imports: [my_module]` in a recipe, by the environment variable QKV_IMPORT, or, if it is
part of an installed package, by an entry point of the group "qkv.plugins". `docs/extending.md` has an example of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast, overload

from qkv.errors import InputError, check_type, describe_value, quote
from qkv.registry import Registry, load_plugins

__all__ = [
    "callback",
    "family",
    "format",
    "load_plugins",
    "metric",
    "objective",
    "schedule",
    "score_function",
    "task",
]

Entry = TypeVar("Entry")
_MAX_NAME = 100  # characters


class _Register(Protocol):
    """A function that is called with a name and an entry, or used as a decorator with a name."""

    @overload
    def __call__(self, name: str, **options: Any) -> Callable[[Entry], Entry]: ...

    @overload
    def __call__(self, name: str, entry: Entry, **options: Any) -> Entry: ...


def _typed(function: Callable[..., Any]) -> _Register:
    """Give a function the types of both ways to use it."""
    return cast("_Register", function)


def _add(registry: Registry[Any], name: str, entry: Any, *attributes: str) -> Any:
    """Register an entry that has some attributes, or return the decorator that does."""
    check_type(name, str, "name", f"the name of the {registry.kind}")
    if len(name) > _MAX_NAME:
        raise InputError(f"name: {quote(name)} is too long; choose one of at most {_MAX_NAME} characters")
    if entry is None:
        return lambda decorated: _add(registry, name, decorated, *attributes)
    missing = next((attribute for attribute in attributes if not hasattr(entry, attribute)), None)
    if missing is not None and name not in registry:  # a name that is taken is refused as such
        reason = f"{describe_value(entry)} has no '{missing}'"
        raise InputError(f"{registry.kind} {quote(name)}: {reason}; docs/extending.md has an example")
    return registry.register(name, entry)


@_typed
def family(name: str, entry: Any = None) -> Any:
    """Add a model family, for `model.family` of a recipe and `qkv families`.

    The entry is a module, class or object with `PAPER`, `Config`, `PRESETS` and `make_spec`, as in `qkv.families`.
    """
    from qkv.families import FAMILIES

    return _add(FAMILIES, name, entry, "Config", "PRESETS", "make_spec")


@_typed
def objective(name: str, entry: Any = None) -> Any:
    """Add a pretraining objective, for the section `objective` of a recipe.

    The entry is a subclass of `qkv.objectives.base.Objective`.
    """
    from qkv.objectives.registry import OBJECTIVES

    return _add(OBJECTIVES, name, entry, "config_class", "losses")


@_typed
def task(name: str, entry: Any = None) -> Any:
    """Add a task, for `task.name` of a recipe and `qkv train --task`.

    The entry is a subclass of `qkv.tasks.base.Task`, a frozen dataclass of the task's settings.
    """
    from qkv.recipe.task_names import TASKS

    return _add(TASKS, name, entry, "example_type", "featurize")


@_typed
def metric(name: str, entry: Any = None) -> Any:
    """Add a metric, for `qkv score --metric`, `validation.metric` and `test.metrics` of recipes, and `qkv.evaluate`.

    The entry is a subclass of `qkv.metrics.metric.Metric` that is made without arguments and whose `data_kind` names
    the kind of hypotheses and references; or a `qkv.metrics.registry.MetricEntry` for a metric with options.
    """
    from qkv.metrics.registry import METRICS

    return _add(METRICS, name, entry)


def format(name: str, entry: Any = None, **settings: Any) -> Any:
    """Add a file format of task examples, for `data.format` of a recipe and `--format`.

    The entry is a reader function `(path, error_policy, *, options)` that yields examples, with the settings
    `example_type`, `description` and `suffixes` of `qkv.data.formats.register_format`; or a `DatasetFormat`.
    """
    from qkv.data.formats import register_format

    return register_format(name, entry, **settings)


@_typed
def score_function(name: str, entry: Any = None) -> Any:
    """Add an attention score function, for `spec.Attention.score_fn` and the model section of families that use it.

    The entry is a subclass of `qkv.nn.attention_score.AttentionScore`.
    """
    from qkv.score_functions import SCORE_FUNCTIONS

    return _add(SCORE_FUNCTIONS, name, entry, "products")


@_typed
def schedule(name: str, entry: Any = None) -> Any:
    """Add a learning-rate schedule, for `train.schedule` of a recipe.

    The entry is a function `(step, warmup_steps, max_steps) -> fraction of the peak rate` for steps after the warm-up.
    """
    from qkv.recipe.registries import SCHEDULES

    return _add(SCHEDULES, name, entry, "__call__")


@_typed
def callback(name: str, entry: Any = None) -> Any:
    """Add a training callback, for `train.callbacks` of a recipe.

    The entry is a subclass of `qkv.train.callbacks.Callback` that is made without arguments.
    """
    from qkv.recipe.registries import CALLBACKS

    return _add(CALLBACKS, name, entry, "__call__")
