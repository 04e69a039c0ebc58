"""Weight tables that work in both directions: each rule maps one Hugging Face tensor to one or several of ours.

In a pattern `{i}` matches a number and any other `{name}` one component of a dotted name. Each Hugging Face key meets
exactly one rule and each of our parameters is filled exactly once; a key without a rule is refused by name. Importing
this module imports no torch; `qkv.families.hf.convert` applies the rules to tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from qkv.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rename:
    """The same tensor under another name."""

    hf: str  # pattern of the Hugging Face name
    qkv: str  # pattern of our name

    @property
    def qkv_names(self) -> tuple[str, ...]:
        return (self.qkv,)

    def from_hf(self, hf_tensor: Tensor) -> Sequence[Tensor]:
        return [hf_tensor]

    def to_hf(self, qkv_tensors: Sequence[Tensor]) -> Tensor:
        return qkv_tensors[0]


@dataclass(frozen=True)
class Transpose(Rename):
    """A matrix that Hugging Face stores as [in, out] and we, like torch, as [out, in]; vectors are unchanged."""

    def from_hf(self, hf_tensor: Tensor) -> Sequence[Tensor]:
        return [hf_tensor.t() if hf_tensor.dim() == 2 else hf_tensor]  # a view: nothing is copied

    def to_hf(self, qkv_tensors: Sequence[Tensor]) -> Tensor:
        return qkv_tensors[0].t() if qkv_tensors[0].dim() == 2 else qkv_tensors[0]


@dataclass(frozen=True)
class Reshape(Rename):
    """A vector that Hugging Face stores with further dimensions of size 1."""

    hf_shape: tuple[int, ...] = (-1,)  # shape of the Hugging Face tensor, with -1 for the vector

    def from_hf(self, hf_tensor: Tensor) -> Sequence[Tensor]:
        return [hf_tensor.flatten()]

    def to_hf(self, qkv_tensors: Sequence[Tensor]) -> Tensor:
        return qkv_tensors[0].view(self.hf_shape)


@dataclass(frozen=True)
class HeadMatrix(Rename):
    """A projection of attention that Hugging Face stores as [width, heads, head size], that of the output too."""

    is_output: bool = False  # the projection of the heads' outputs
    num_heads: int = 1  # of the model; `HFFormat.rules` sets it

    def from_hf(self, hf_tensor: Tensor) -> Sequence[Tensor]:
        if hf_tensor.dim() != 3:
            raise InputError(f"{list(hf_tensor.shape)} is not [width, heads, head size]")
        matrix = hf_tensor.flatten(1)  # [width, heads * head size]
        return [matrix if self.is_output else matrix.t()]

    def to_hf(self, qkv_tensors: Sequence[Tensor]) -> Tensor:
        matrix = qkv_tensors[0] if self.is_output else qkv_tensors[0].t()
        return matrix.reshape(len(matrix), self.num_heads, -1)


@dataclass(frozen=True)
class Split:
    """One Hugging Face tensor that holds several of ours, equal in size, concatenated along the output dimension."""

    hf: str  # pattern of the Hugging Face name
    qkv: tuple[str, ...]  # patterns of our names, in order
    transposed: bool = False  # Hugging Face stores it as [in, out]

    @property
    def qkv_names(self) -> tuple[str, ...]:
        return self.qkv

    def from_hf(self, hf_tensor: Tensor) -> Sequence[Tensor]:
        stacked = hf_tensor.t() if self.transposed and hf_tensor.dim() == 2 else hf_tensor
        if stacked.dim() == 0 or stacked.shape[0] % len(self.qkv):
            raise InputError(f"{list(hf_tensor.shape)} does not divide into {len(self.qkv)}")
        return stacked.chunk(len(self.qkv))

    def to_hf(self, qkv_tensors: Sequence[Tensor]) -> Tensor:
        import torch  # here, so that a family's tables can be read without torch

        stacked = torch.cat(list(qkv_tensors))
        return stacked.t() if self.transposed and stacked.dim() == 2 else stacked


@dataclass(frozen=True)
class Tie:
    """A second copy of a tensor that exists once in the model: checked on import, not written on export."""

    hf: str  # pattern of the copy's name
    duplicate_of: str  # Hugging Face name of the tensor that it repeats


@dataclass(frozen=True)
class ExportDuplicate:
    """An unused tensor that the Hugging Face loader still requires: written on export, ignored on import."""

    hf: str  # pattern of the copy's name
    duplicate_of: str  # Hugging Face name of the tensor that it repeats


@dataclass(frozen=True)
class Drop:
    """A tensor of the file that is no parameter of the model, such as a mask that is recomputed."""

    hf: str  # pattern of its name


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
    """Return the values of a pattern's placeholders in a name, or None if the name does not match."""
    regex_match = _compile_pattern(pattern).fullmatch(name)
    return None if regex_match is None else regex_match.groupdict()


def find_rule(rules: Iterable[Rule], key: str) -> tuple[Rule, dict[str, str]] | None:
    """Return the rule that matches a Hugging Face key and the values of its placeholders, or None."""
    for rule in rules:
        placeholders = match_pattern(rule.hf, key)
        if placeholders is not None:
            return rule, placeholders
    return None
