"""Vectors of texts: the fixed-feature use of a pretrained body (Devlin et al. 2019, 5.3; Peters et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from qkv.decode.frames import Packed, Text, batches, framed, place_of
from qkv.decode.predict import evaluating
from qkv.decode.settings import Decoding, check
from qkv.errors import InputError
from qkv.nn import Decoder, Encoder
from qkv.nn.ragged import Ragged
from qkv.nn.stack import Stack
from qkv.nn.words import by_word
from qkv.weights import Loaded

Pool = Literal["mean", "first", "tokens", "words"]
Layers = Literal["last", "sum", "join"]
_LAST = 4  # the layers that are summed or joined, as in the paper's table of features


@torch.inference_mode()
def embed(
    loaded: Loaded,
    texts: Sequence[Text],
    *,
    pool: Pool = "mean",
    layers: Layers | int = "last",
    unit: bool = False,
    how: Decoding | None = None,
    places: Sequence[str] | None = None,
) -> list[Tensor]:
    """One vector [W] a text, or with `tokens` and `words` one a token or word [n, W].

    `mean` averages all tokens, those that the template adds too, as sentence encoders do; `first` is [CLS].
    `layers`: the last one, or the last four summed, or joined to a vector four times as wide; or one by its
    number, 0 for what goes into the first. `unit`: of length one.
    """
    for name, value, known in (("pool", pool, Pool), ("layers", layers, Layers)):
        if value not in known.__args__ and not (name == "layers" and isinstance(value, int)):  # type: ignore[attr-defined]
            raise InputError(f"{name} is {' or '.join(known.__args__)}, not '{value}'")  # type: ignore[attr-defined]
    how = how or Decoding()
    check(how)
    frames = framed(loaded, texts, places or [place_of(text) for text in texts], how)
    out: list[Tensor] = [torch.empty(0)] * len(frames)
    with evaluating(loaded.model):
        for batch in batches(loaded, frames, how.batch_tokens):
            hidden = batch.source.like(_features(loaded, batch, layers).float())
            if pool == "words":
                hidden = by_word(hidden, [frames[i].words for i in batch.rows], how.word or "first")
            for row, vectors in zip(batch.rows, _pooled(hidden, pool), strict=True):
                out[row] = (torch.nn.functional.normalize(vectors, dim=-1) if unit else vectors).cpu()
    return out


def _features(loaded: Loaded, batch: Packed, layers: Layers | int) -> Tensor:
    model = loaded.model
    if isinstance(model, Decoder):
        body, x = model.decoder, model.target(batch.source)
    elif isinstance(model, Encoder):
        body, x = model.encoder, model.embed(batch.source, batch.segments)
    else:
        body, x = model.encoder, model.source(batch.source)
    if layers == "last":
        hidden: Tensor = body(x).hidden.values
        return hidden
    if not isinstance(body, Stack):
        raise InputError("layers: a recurrent encoder gives its last layer only")
    found = body.layers(x)
    if isinstance(layers, int):
        if not 0 <= layers < len(found):
            raise InputError(f"layers: {layers} is none of this model's, which are 0 to {len(found) - 1}")
        return found[layers]
    last = found[-_LAST:]
    return torch.stack(last).sum(0) if layers == "sum" else torch.cat(last, -1)


def _pooled(hidden: Ragged, pool: Pool) -> list[Tensor]:
    if pool in ("tokens", "words"):
        return hidden.sequences()
    if pool == "first":
        return [sequence[0] for sequence in hidden.sequences()]
    return [sequence.mean(0) for sequence in hidden.sequences()]
