"""A text or two in a model's template, and what happens where they are longer than it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qkv.data.examples import Labelled, refuse_outside
from qkv.decode.frames import Text, shortened
from qkv.errors import InputError
from qkv.tasks.task import Asked
from qkv.text.engine import Framed
from qkv.text.tokeniser import Tokeniser

TooLong = Literal["truncate", "refuse"]
_TOGETHER = 1024  # texts framed at a time: what is known of their tokens takes far more room than what is kept
_MARKS = "*#"  # around the first span of a text and the second, as T5 marks them (Raffel et al. 2020, appendix A)


@dataclass(frozen=True, kw_only=True)
class OfTexts:
    """What tasks have in common whose example is a text or two."""

    too_long: TooLong = "truncate"
    pairs: bool | None = None  # a line is two texts; None: where all training examples are, else it may be

    def found_out(self, examples: Sequence[Labelled]) -> dict[str, Any]:
        """Settings that nobody gave and that the training examples tell: each is two texts."""
        return {"pairs": True} if self.pairs is None and all(one.second is not None for one in examples) else {}


def asked(
    examples: Sequence[Labelled],
    tokeniser: Tokeniser,
    longest: int,
    too_long: TooLong,
    right: Sequence[tuple[float, ...]],
    mark: bool = False,
) -> list[Asked]:
    """One sequence an example, with what is right."""
    found = []
    for begin in range(0, len(examples), _TOGETHER):
        some = examples[begin : begin + _TOGETHER]
        frames = tokeniser.frame_batch([given(one, mark) for one in some])
        for number, (frame, one) in enumerate(zip(frames, some, strict=True), begin):
            frame, cut = fitted(frame, longest, too_long, one.where)
            found.append(Asked.of(number, [frame], right[number], cut=cut))
    return found


def fitted(frame: Framed, longest: int, too_long: TooLong, where: str) -> tuple[Framed, bool]:
    """What the model takes of a text or two, and whether something was cut off."""
    if all(part is None for part in frame.parts):
        raise InputError(f"{where}: the text is empty; fill it in, or remove it")
    cut = len(frame.ids) > longest
    if cut and too_long == "refuse":
        said = f"{len(frame.ids)} tokens, and the model takes at most {longest}"
        raise InputError(f"{where}: {said}; shorten it, or let it be cut (task.too_long, --too-long: truncate)")
    return shortened(frame, longest), cut


def given(example: Labelled, mark: bool = False) -> Text:
    """An example's text or two; with a mark on both sides of each span that the label is about."""
    first = _marked(example, second=False) if mark else example.text
    if example.second is None:
        return first
    return first, _marked(example, second=True) if mark else example.second


def _marked(example: Labelled, second: bool) -> str:
    text = (example.second or "") if second else example.text
    spans = sorted((s for s in example.spans if s.second == second), key=lambda s: s.start)
    edges = []
    for number, span in enumerate(spans):
        refuse_outside(span.start, span.end, text, example.where)
        sign = _MARKS[number % len(_MARKS)]
        edges += [(span.start, True, sign), (span.end, False, sign)]
    # from behind, so that places before stay what they are; where one span ends and another begins, the end comes first
    for place, _, sign in sorted(edges, reverse=True):
        text = text[:place] + sign + text[place:]
    return text
