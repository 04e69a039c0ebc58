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

    hf: str
    qkv: str

    @property
    def qkv_names(self) -> tuple[str, ...]:
        return (self.qkv,)

    def from_hf(self, hf_tensor: Tensor) -> Sequence[Tensor]:
        return [hf_tensor]

    def to_hf(self, qkv_tensors: Sequence[Tensor]) -> Tensor:
        return qkv_tensors[0]


@dataclass(frozen=True)
class Transpose(Rename):
    """A matrix that they keep as [in, out] and we, like torch, as [out, in]; vectors pass as they are."""

    def from_hf(self, hf_tensor: Tensor) -> Sequence[Tensor]:
        return [hf_tensor.t() if hf_tensor.dim() == 2 else hf_tensor]  # a view: nothing is copied

    def to_hf(self, qkv_tensors: Sequence[Tensor]) -> Tensor:
        return qkv_tensors[0].t() if qkv_tensors[0].dim() == 2 else qkv_tensors[0]


@dataclass(frozen=True)
class Split:
    """One tensor of theirs holds several of ours, equal in size, one after the other along the outputs."""

    hf: str
    qkv: tuple[str, ...]
    transposed: bool = False  # theirs is [in, out]

    @property
    def qkv_names(self) -> tuple[str, ...]:
        return self.qkv

    def from_hf(self, hf_tensor: Tensor) -> Sequence[Tensor]:
        stacked = hf_tensor.t() if self.transposed and hf_tensor.dim() == 2 else hf_tensor
        if stacked.shape[0] % len(self.qkv):
            raise InputError(f"{list(hf_tensor.shape)} does not divide into {len(self.qkv)}")
        return stacked.chunk(len(self.qkv))

    def to_hf(self, qkv_tensors: Sequence[Tensor]) -> Tensor:
        stacked = torch.cat(list(qkv_tensors))
        return stacked.t() if self.transposed and stacked.dim() == 2 else stacked


@dataclass(frozen=True)
class Tie:
    """A second copy of a tensor that is one in the model: checked on the way in, not written on the way out."""

    hf: str
    duplicate_of: str  # their name of the tensor that it repeats


@dataclass(frozen=True)
class ExportDuplicate:
    """A name of theirs that nothing is computed from and that their loader still asks for: written, not read."""

    hf: str
    duplicate_of: str  # their name of the tensor that it repeats


@dataclass(frozen=True)
class Drop:
    """Something in their file that is no parameter of the model, such as a mask that can be made again."""

    hf: str


TensorRule = Rename | Split
Rule = TensorRule | Tie | ExportDuplicate | Drop


@lru_cache(maxsize=4096)
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    segments = re.split(r"\{(\w+)\}", pattern)
    regex, defined = "", set()
    for index, segment in enumerate(segments):
        if index % 2 == 0:
            regex += re.escape(segment)
        elif segment in defined:
            regex += f"(?P={segment})"
        else:
            defined.add(segment)
            regex += f"(?P<{segment}>{'[0-9]+' if segment == 'i' else '[^.]+'})"
    return re.compile(regex)


def match_pattern(pattern: str, name: str) -> dict[str, str] | None:
    """What a pattern's placeholders stand for in a name; None: it is another name."""
    regex_match = _compile_pattern(pattern).fullmatch(name)
    return None if regex_match is None else regex_match.groupdict()


def find_rule(rules: Iterable[Rule], key: str) -> tuple[Rule, dict[str, str]] | None:
    """The rule that takes a key of theirs, and what its placeholders stand for."""
    for rule in rules:
        placeholders = match_pattern(rule.hf, key)
        if placeholders is not None:
            return rule, placeholders
    return None


def from_hf(rules: Sequence[Rule], tensors: Mapping[str, Tensor], location: str) -> dict[str, Tensor]:
    """Their tensors under our names. Nothing is copied; a key that no rule takes is refused."""
    qkv_tensors: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        matched = find_rule(rules, key)
        if matched is None:
            raise InputError(f"{location}: holds '{key}', which no rule of this family takes; nothing was loaded")
        rule, placeholders = matched
        if isinstance(rule, Tie):
            _check_tie(tensors, key, rule.duplicate_of.format(**placeholders), location)
        elif isinstance(rule, TensorRule):
            _apply_rule(qkv_tensors, rule, placeholders, key, tensor, location)
    return qkv_tensors


def _apply_rule(
    qkv_tensors: dict[str, Tensor], rule: TensorRule, placeholders: dict[str, str], key: str, tensor: Tensor, location: str
) -> None:
    try:
        converted = rule.from_hf(tensor)
    except InputError as error:
        raise InputError(f"{location}: '{key}': {error}") from None
    for name, converted_tensor in zip(rule.qkv_names, converted, strict=True):
        qkv_name = name.format(**placeholders)
        if qkv_name in qkv_tensors:
            raise InputError(f"{location}: '{key}' is a second source for '{qkv_name}'; nothing was loaded")
        qkv_tensors[qkv_name] = converted_tensor


def _check_tie(tensors: Mapping[str, Tensor], key: str, duplicate_of: str, location: str) -> None:
    if duplicate_of in tensors and not torch.equal(tensors[key], tensors[duplicate_of]):
        raise InputError(f"{location}: '{key}' and '{duplicate_of}' are one tensor in this model, and differ here")


def to_hf(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `inward`: our tensors under their names, ties and dropped things left out."""
    hf_tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for rule, placeholders in _matches(rules, tensors):
        names = [name.format(**placeholders) for name in rule.qkv_names]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise InputError(f"'{missing[0]}' is missing beside '{names[0]}': this model has no such form")
        hf_tensors[rule.hf.format(**placeholders)] = rule.to_hf([tensors[name] for name in names])
        used.update(names)
    for duplicate in rules:
        if isinstance(duplicate, ExportDuplicate) and duplicate.duplicate_of in hf_tensors:
            hf_tensors[duplicate.hf] = hf_tensors[duplicate.duplicate_of].clone()  # two names of one memory cannot be written
    unmatched = [name for name in tensors if name not in used]
    if unmatched:
        raise InputError(f"'{unmatched[0]}' has no name in this family's Hugging Face form")
    return hf_tensors


def _matches(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> Iterator[tuple[TensorRule, dict[str, str]]]:
    for rule in rules:
        if not isinstance(rule, TensorRule):
            continue
        for name in tensors:
            placeholders = match_pattern(rule.qkv_names[0], name)
            if placeholders is not None:
                yield rule, placeholders
