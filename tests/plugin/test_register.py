"""Registries and plugins: a taken name, an unknown name, a class that is incomplete, entry points, failing imports."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qkv
from qkv import registry
from qkv.errors import InputError
from qkv.metrics.metric import MeanMetric, Metric
from qkv.registry import Registry, load_plugins


@pytest.fixture
def colors() -> Registry[str]:
    return Registry("color", {"digits": "string:digits"})


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory for modules, which are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_an_entry_is_added_by_a_call_or_a_decorator_and_built_in_ones_are_imported_when_used(
    colors: Registry[str],
) -> None:
    assert colors.register("red", "#f00") == "#f00"

    @colors.register("mix")
    def mix() -> None: ...

    assert colors.names() == ["digits", "red", "mix"]
    assert (colors.get("digits"), colors.get("red"), colors.get("mix")) == ("0123456789", "#f00", mix)


def test_a_taken_name_an_unknown_name_and_an_empty_name_are_refused(colors: Registry[str]) -> None:
    colors.register("red", "#f00")
    colors.register("red", "#f00")  # the same entry again, as from a module that is reloaded
    for name in ("digits", "red"):
        with pytest.raises(InputError, match=f"the color '{name}' is already registered"):
            colors.register(name, "#f11")
    with pytest.raises(InputError, match="there is no color 'rad'; did you mean 'red'"):
        colors.get("rad")
    with pytest.raises(InputError, match="the name must be a text"):
        colors.register("", "#f00")


@pytest.mark.parametrize(
    "kind", ["family", "objective", "task", "metric", "format", "score_function", "schedule", "callback"]
)
def test_every_extension_point_has_a_function_with_documentation(kind: str) -> None:
    assert getattr(qkv.register, kind).__doc__.startswith("Add a")


def test_a_built_in_name_is_refused_at_every_extension_point() -> None:
    taken = {
        "family": "bert",
        "objective": "clm",
        "task": "regression",
        "metric": "bleu",
        "format": "squad",
        "score_function": "dot",
        "schedule": "linear",
    }
    from qkv.metrics.classification import Accuracy
    from qkv.objectives.clm import CausalLM

    entries = {"metric": Accuracy, "objective": CausalLM}
    for kind, name in taken.items():
        with pytest.raises(InputError, match=f"'{name}' is already registered"):
            getattr(qkv.register, kind)(name, entries.get(kind, object()))


def test_a_metric_that_is_no_metric_or_incomplete_is_refused() -> None:
    with pytest.raises(InputError, match="register a subclass of"):
        qkv.register.metric("mine", len)

    class Incomplete(Metric[str, str]):
        pass

    with pytest.raises(InputError, match="Incomplete does not define score, statistics"):
        qkv.register.metric("mine", Incomplete)
    with pytest.raises(InputError, match="MeanMetric does not define values"):
        qkv.register.metric("mine", MeanMetric)


def test_a_module_is_found_in_the_current_directory(modules: Path) -> None:
    (modules / "some_plugin.py").write_text("loaded = True\n")
    load_plugins(["some_plugin"])
    assert sys.modules["some_plugin"].loaded


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_library", r"ModuleNotFoundError: No module named 'no_such_library' \(.*bad_plugin.py:1\)"),
        ("\n1 / 0", r"ZeroDivisionError: division by zero \(.*bad_plugin.py:2\)"),
        ("a b", r"SyntaxError: invalid syntax"),
        ("import qkv\nqkv.register.task('regression', 1)", r"the task 'regression' is already registered"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_the_reason(modules: Path, code: str, message: str) -> None:
    (modules / "bad_plugin.py").write_text(code)
    with pytest.raises(InputError, match=f"module 'bad_plugin'.*{message}"):
        load_plugins(["bad_plugin"])


def test_entry_points_of_installed_packages_are_loaded_once(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (modules / "installed_plugin.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(modules)
    entry_point = importlib.metadata.EntryPoint("mine", "installed_plugin", registry.PLUGIN_GROUP)
    groups: list[str] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: groups.append(group) or [entry_point])
    registry._load_entry_points.cache_clear()
    load_plugins()
    load_plugins()
    assert groups == ["qkv.plugins"]
    assert "installed_plugin" in sys.modules
    broken = importlib.metadata.EntryPoint("broken", "no_such_module", registry.PLUGIN_GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken])  # noqa: ARG005
    registry._load_entry_points.cache_clear()
    with pytest.raises(InputError, match=r"plugin 'broken' \(no_such_module\) cannot be imported"):
        load_plugins()
    registry._load_entry_points.cache_clear()
