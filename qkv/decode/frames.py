"""Inputs as a model's family writes them, in batches of similar length: from text and pictures to packed tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkv import spec
from qkv.data.batches import evaluation_batches
from qkv.decode.settings import Decoding
from qkv.errors import InputError
from qkv.nn import Decoder, Encoder, Ragged
from qkv.nn.stack import Encoded
from qkv.text.engine import Framed
from qkv.text.tokeniser import Tokeniser
from qkv.weights import Loaded

_SHOWN = 60  # characters of an input that a message repeats
Text = str | tuple[str, str]  # a text, or two that belong together


@dataclass(frozen=True)
class Packed:
    """Some of the inputs as one batch."""

    rows: list[int]  # which inputs these are
    source: Ragged  # [T] ids
    segments: Tensor | None  # [T]


def tokeniser_of(loaded: Loaded) -> Tokeniser:
    """The tokeniser that reads a model's inputs."""
    if loaded.source is None:
        raise InputError(f"this {loaded.model.spec.family} came without a tokeniser, so it cannot read text")
    return loaded.source


def framed(
    loaded: Loaded, inputs: Sequence[Text], places: Sequence[str], how: Decoding, *, special: bool = False
) -> list[Framed]:
    """Inputs in the model's template; an empty or too long one is refused by its place, or cut as the user chose."""
    longest = input_length(loaded.model.spec)
    found = tokeniser_of(loaded).frame_batch(list(inputs), special=special or how.special)
    for i, (frame, where) in enumerate(zip(found, places, strict=True)):
        if all(part is None for part in frame.parts):
            raise InputError(f"{where}: is empty; give some text")
        if len(frame.ids) > longest and how.too_long == "refuse":
            said = f"{len(frame.ids)} tokens, and the model takes at most {longest}"
            raise InputError(f"{where}: {said}; shorten it, or choose --too-long truncate")
        found[i] = shortened(frame, longest)
    return found


def batches(loaded: Loaded, frames: Sequence[Framed], budget: int) -> Iterator[Packed]:
    """All frames, those of similar length together, on the model's device."""
    model = loaded.model
    has_segments = (
        isinstance(model, Encoder) and isinstance(model.spec.source, spec.Embed) and model.spec.source.segments
    )
    for rows in evaluation_batches([len(frame.ids) for frame in frames], budget):
        chosen = [frames[i] for i in rows]
        source = Ragged.pack([torch.tensor(frame.ids) for frame in chosen]).to(model.device)
        segments = None
        if has_segments:
            segments = torch.cat([torch.tensor(frame.segments) for frame in chosen]).to(model.device)
        yield Packed([int(i) for i in rows], source, segments)


def encoded(loaded: Loaded, batch: Packed) -> Encoded:
    """The hidden states that a model's head judges."""
    model = loaded.model
    if isinstance(model, Encoder):
        return model.encode(batch.source, batch.segments)
    if isinstance(model, Decoder):
        return model.encode(batch.source)
    return Encoded(batch.source.like(model.decode(model.encode(batch.source), batch.source.shifted(model.spec.start))))


def input_length(s: spec.Model) -> int:
    """How many tokens a model reads at most."""
    return spec.entrance(s).length


def shortened(frame: Framed, longest: int) -> Framed:
    """Without the last tokens of its longer text, until it fits; what the template added stays."""
    over = len(frame.ids) - longest
    if over <= 0:
        return frame
    sizes = [frame.parts.count(0), frame.parts.count(1)]
    for _ in range(over):
        sizes[0 if sizes[0] >= sizes[1] else 1] -= 1
    kept, left = [], list(sizes)
    for i, part in enumerate(frame.parts):
        if part is None or left[part] > 0:
            kept.append(i)
        if part is not None:
            left[part] -= 1
    return only(frame, kept)


def only(frame: Framed, kept: Sequence[int]) -> Framed:
    """Those tokens of a frame."""
    lists = {name: [getattr(frame, name)[i] for i in kept] for name in ("ids", "segments", "offsets", "words", "parts")}
    return replace(frame, **lists)


def place_of(given: object) -> str:
    """How an input is named in a message: by its beginning."""
    text = str(given)
    return f"'{text}'" if len(text) <= _SHOWN else f"'{text[:_SHOWN]}…'"
