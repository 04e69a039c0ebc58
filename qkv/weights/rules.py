"""Weight tables with an inverse: each row says which of their tensors is which of ours, both ways.

A pattern's `{i}` stands for a number and any other `{name}` for one part of a dotted name. The law: each of their keys
meets exactly one rule, each of our parameters is filled exactly once, and a key that is neither is an error by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qkv.errors import InputError


@dataclass(frozen=True)
class Rename:
    """The same tensor under another name."""

    theirs: str
    ours: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours,)

    def inward(self, theirs: Tensor) -> Sequence[Tensor]:
        return [theirs]

    def outward(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0]


@dataclass(frozen=True)
class Transpose(Rename):
    """A matrix that they keep as [in, out] and we, like torch, as [out, in]; vectors pass as they are."""

    def inward(self, theirs: Tensor) -> Sequence[Tensor]:
        return [theirs.t() if theirs.dim() == 2 else theirs]  # a view: nothing is copied

    def outward(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].t() if ours[0].dim() == 2 else ours[0]


@dataclass(frozen=True)
class Split:
    """One tensor of theirs holds several of ours, equal in size, one after the other along the outputs."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False  # theirs is [in, out]

    @property
    def names(self) -> tuple[str, ...]:
        return self.ours

    def inward(self, theirs: Tensor) -> Sequence[Tensor]:
        whole = theirs.t() if self.transposed and theirs.dim() == 2 else theirs
        if whole.shape[0] % len(self.ours):
            raise InputError(f"{list(theirs.shape)} does not divide into {len(self.ours)}")
        return whole.chunk(len(self.ours))

    def outward(self, ours: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(list(ours))
        return whole.t() if self.transposed and whole.dim() == 2 else whole


@dataclass(frozen=True)
class Tie:
    """A second copy of a tensor that is one in the model: checked on the way in, not written on the way out."""

    theirs: str
    same: str  # their name of the tensor that it repeats


@dataclass(frozen=True)
class Copy:
    """A name of theirs that nothing is computed from and that their loader still asks for: written, not read."""

    theirs: str
    same: str  # their name of the tensor that it repeats


@dataclass(frozen=True)
class Drop:
    """Something in their file that is no parameter of the model, such as a mask that can be made again."""

    theirs: str


Moving = Rename | Split
Rule = Moving | Tie | Copy | Drop


@lru_cache(maxsize=4096)
def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", text)
    out, seen = "", set()
    for place, part in enumerate(parts):
        if place % 2 == 0:
            out += re.escape(part)
        elif part in seen:
            out += f"(?P={part})"
        else:
            seen.add(part)
            out += f"(?P<{part}>{'[0-9]+' if part == 'i' else '[^.]+'})"
    return re.compile(out)


def match(pattern: str, name: str) -> dict[str, str] | None:
    """What a pattern's placeholders stand for in a name; None: it is another name."""
    found = _pattern(pattern).fullmatch(name)
    return None if found is None else found.groupdict()


def rule_for(rules: Iterable[Rule], key: str) -> tuple[Rule, dict[str, str]] | None:
    """The rule that takes a key of theirs, and what its placeholders stand for."""
    for rule in rules:
        places = match(rule.theirs, key)
        if places is not None:
            return rule, places
    return None


def inward(rules: Sequence[Rule], tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Their tensors under our names. Nothing is copied; a key that no rule takes is refused."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        taken = rule_for(rules, key)
        if taken is None:
            raise InputError(f"{where}: holds '{key}', which no rule of this family takes; nothing was loaded")
        rule, places = taken
        if isinstance(rule, Tie):
            _check_tie(tensors, key, rule.same.format(**places), where)
        elif isinstance(rule, Moving):
            _take_in(found, rule, places, key, tensor, where)
    return found


def _take_in(
    found: dict[str, Tensor], rule: Moving, places: dict[str, str], key: str, tensor: Tensor, where: str
) -> None:
    try:
        parts = rule.inward(tensor)
    except InputError as error:
        raise InputError(f"{where}: '{key}': {error}") from None
    for name, part in zip(rule.names, parts, strict=True):
        ours = name.format(**places)
        if ours in found:
            raise InputError(f"{where}: '{key}' is a second source for '{ours}'; nothing was loaded")
        found[ours] = part


def _check_tie(tensors: Mapping[str, Tensor], key: str, same: str, where: str) -> None:
    if same in tensors and not torch.equal(tensors[key], tensors[same]):
        raise InputError(f"{where}: '{key}' and '{same}' are one tensor in this model, and differ here")


def outward(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `inward`: our tensors under their names, ties and dropped things left out."""
    found: dict[str, Tensor] = {}
    taken: set[str] = set()
    for rule, places in _occasions(rules, tensors):
        names = [name.format(**places) for name in rule.names]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise InputError(f"'{missing[0]}' is missing beside '{names[0]}': this model has no such form")
        found[rule.theirs.format(**places)] = rule.outward([tensors[name] for name in names])
        taken.update(names)
    for copy in rules:
        if isinstance(copy, Copy) and copy.same in found:
            found[copy.theirs] = found[copy.same].clone()  # two names of one memory cannot be written
    left = [name for name in tensors if name not in taken]
    if left:
        raise InputError(f"'{left[0]}' has no name in this family's Hugging Face form")
    return found


def _occasions(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> Iterator[tuple[Moving, dict[str, str]]]:
    for rule in rules:
        if not isinstance(rule, Moving):
            continue
        for name in tensors:
            places = match(rule.names[0], name)
            if places is not None:
                yield rule, places
