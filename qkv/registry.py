"""Registries of everything that has a name and can be extended from outside the package, such as tasks and metrics.

A registry holds the built-in entries by the location of their definition and imports one when it is first used, so that
listing the names imports nothing. `qkv.register` adds entries from outside; `load_plugins` imports the modules that do.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar, cast, overload

from qkv.errors import InputError, check_names, did_you_mean, quote

T = TypeVar("T")
Registered = TypeVar("Registered")

PLUGIN_GROUP = "qkv.plugins"
"""Group of the entry points by which an installed package names a module that registers extensions."""


class Registry(Generic[T]):
    """Entries of one kind by name."""

    def __init__(self, kind: str, builtin: Mapping[str, str]) -> None:
        """Make a registry with built-in entries.

        Args:
            kind: what an entry is called in messages, such as "metric".
            builtin: name -> "package.module:attribute", or "package.module" for a module as the entry.
        """
        self.kind = kind
        self._locations = dict(builtin)
        self._entries: dict[str, T] = {}

    @overload
    def register(self, name: str) -> Callable[[Registered], Registered]: ...

    @overload
    def register(self, name: str, entry: T) -> T: ...

    def register(self, name: str, entry: Any = None) -> Any:
        """Add an entry under a new name: `register("name", entry)`, or as a decorator `@register("name")`."""
        if entry is None:
            return lambda decorated: self.register(name, decorated)
        if not name or not isinstance(name, str):
            raise InputError(f"{self.kind}: the name must be a text that is not empty, not {name!r}")
        known = self._entries.get(name)
        if name in self._locations or (known is not None and not _is_redefinition(known, entry)):
            raise InputError(f"the {self.kind} '{name}' is already registered; choose another name")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """Return the entry of a name; an unknown name is refused with the nearest known one."""
        if name not in self._entries:
            if name not in self._locations:
                raise InputError(f"there is no {self.kind} {quote(name)}; {did_you_mean(name, self.names())}")
            module, _, attribute = self._locations[name].partition(":")
            imported = importlib.import_module(module)
            self._entries[name] = cast("T", getattr(imported, attribute) if attribute else imported)
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all names, the built-in ones first."""
        return [*self._locations, *(name for name in self._entries if name not in self._locations)]

    def __contains__(self, name: object) -> bool:
        return name in self._locations or name in self._entries


def _is_redefinition(known: object, entry: object) -> bool:
    """True if an entry is the same object, or the same definition executed again, as in a notebook cell."""
    return known is entry or all(
        getattr(known, name, None) == getattr(entry, name, id(entry)) for name in ("__module__", "__qualname__")
    )


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Import the installed plugins, and modules that register extensions.

    Installed plugins are the entry points of the group `qkv.plugins`. A module is imported once; it is found in the
    current directory or among the installed packages. An import that fails raises an InputError of one line.

    Args:
        modules: names of modules, such as "my_metrics" or "my_package.objectives".
    """
    modules = check_names(modules, "modules", "names of modules")
    _load_entry_points()
    directory = os.getcwd()
    if modules and not {"", directory} & set(sys.path):
        sys.path.insert(0, directory)
    for module in modules:
        with _one_line_errors(f"module {quote(module)}"):
            importlib.import_module(module)


@cache
def _load_entry_points() -> None:
    for entry_point in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        with _one_line_errors(f"plugin '{entry_point.name}' ({entry_point.value})"):
            entry_point.load()


@contextmanager
def _one_line_errors(subject: str) -> Iterator[None]:
    """Turn any error of an import into an InputError that names the failing line of the module."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{subject}: {error}") from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        is_own_line = not frame.filename.startswith("<frozen") and frame.filename != __file__
        location = f" ({frame.filename}:{frame.lineno})" if is_own_line else ""
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise InputError(f"{subject} cannot be imported: {reason}{location}") from error
