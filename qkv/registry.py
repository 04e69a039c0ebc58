"""Named things that can be extended from outside the package: families, objectives, tasks, metrics, formats and so on.

A registry knows the built-in entries by the place of their definition and imports one when it is first used, so that
listing names costs nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast, overload

from qkv.errors import InputError, did_you_mean

T = TypeVar("T")
Registered = TypeVar("Registered")


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
            raise InputError(f"a {self.kind} is registered under a name, not {name!r}")
        known = self._entries.get(name)
        if name in self._locations or (known is not None and known is not entry):
            raise InputError(f"the {self.kind} '{name}' is already registered; choose another name")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """Return the entry of a name; an unknown name is refused with the nearest known one."""
        if name not in self._entries:
            if name not in self._locations:
                raise InputError(f"there is no {self.kind} '{name}'; {did_you_mean(name, self.names())}")
            module, _, attribute = self._locations[name].partition(":")
            imported = importlib.import_module(module)
            self._entries[name] = cast("T", getattr(imported, attribute) if attribute else imported)
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all names, the built-in ones first."""
        return [*self._locations, *(name for name in self._entries if name not in self._locations)]

    def __contains__(self, name: object) -> bool:
        return name in self._locations or name in self._entries
