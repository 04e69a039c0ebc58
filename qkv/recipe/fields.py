"""Number types and settings that the sections of a recipe share."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

STRICT = {"extra": "forbid", "allow_inf_nan": False}

PositiveInt = Annotated[int, Ge(1)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Probability = Annotated[float, Ge(0), Le(1)]
