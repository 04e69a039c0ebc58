"""A text or two in a model's template, and what happens where they are longer than it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from qkv.data.examples import Labelled
from qkv.decode.frames import shortened
from qkv.errors import InputError
from qkv.tasks.task import Asked
from qkv.text.tokeniser import Tokeniser

TooLong = Literal["truncate", "refuse"]


def asked(
    examples: Sequence[Labelled],
    tokeniser: Tokeniser,
    longest: int,
    too_long: TooLong,
    right: Sequence[tuple[float, ...]],
) -> list[Asked]:
    """One sequence an example, with what is right."""
    given = [one.text if one.second is None else (one.text, one.second) for one in examples]
    found = []
    for number, (frame, one) in enumerate(zip(tokeniser.frame_batch(given), examples, strict=True)):
        if all(part is None for part in frame.parts):
            raise InputError(f"{one.where}: the text is empty; fill it in, or remove it")
        cut = len(frame.ids) > longest
        if cut and too_long == "refuse":
            said = f"{len(frame.ids)} tokens, and the model takes at most {longest}"
            raise InputError(f"{one.where}: {said}; shorten it, or set task.too_long: truncate")
        frame = shortened(frame, longest)
        found.append(Asked(number, (frame.ids,), (frame.segments,), right[number], cut=cut))
    return found
