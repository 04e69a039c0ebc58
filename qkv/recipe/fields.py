"""Number types and settings that the sections of a recipe share. Every number has bounds; True and False are none.

The bounds that a user may want to raise are those of `qkv.limits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from qkv.limits import limit, raise_hint

STRICT = {"extra": "forbid", "allow_inf_nan": False}

_MAX_COUNT = 10**12  # more steps or tokens than a run can have
_MAX_NUMBER = 1e12


class _Number:
    """Metadata of a number in a recipe, for pydantic: refuses True and False, which Python counts as numbers.

    pydantic is imported when a recipe is parsed, because the schema is also imported where none is.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_refuse_bool, handler(source))


@dataclass(frozen=True)
class _AtMost:
    """Metadata of a number that a limit bounds, which the user can raise."""

    limit_name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: int) -> int:
        if value > limit(self.limit_name):
            raise ValueError(f"{value:,} is too large; {raise_hint(self.limit_name)}")
        return value


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number; write a number")
    return value


PositiveInt = Annotated[int, Ge(1), Le(_MAX_COUNT), _Number()]
NonNegativeInt = Annotated[int, Ge(0), Le(_MAX_COUNT), _Number()]
PositiveFloat = Annotated[float, Gt(0), Le(_MAX_NUMBER), _Number()]
NonNegativeFloat = Annotated[float, Ge(0), Le(_MAX_NUMBER), _Number()]
FiniteFloat = Annotated[float, Ge(-_MAX_NUMBER), Le(_MAX_NUMBER), _Number()]
Fraction = Annotated[float, Ge(0), Lt(1), _Number()]
Probability = Annotated[float, Ge(0), Le(1), _Number()]
Seed = Annotated[int, Ge(0), Lt(2**63), _Number()]
BeamCount = Annotated[int, Ge(1), _AtMost("beams"), _Number()]
SampleCount = Annotated[int, Ge(0), _AtMost("samples"), _Number()]
WorkerCount = Annotated[int, Ge(0), _AtMost("workers"), _Number()]
VocabSize = Annotated[int, Ge(1), _AtMost("vocabulary"), _Number()]
SequenceLength = Annotated[int, Ge(1), _AtMost("vocabulary"), _Number()]
Dimension = Annotated[int, Ge(1), _AtMost("dimension"), _Number()]
WindowSize = Annotated[int, Ge(1), Le(25), _Number()]  # words around a word
