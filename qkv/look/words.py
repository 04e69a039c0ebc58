"""What a model attends to between a text and its output: predict, then read the maps of one teacher-forced pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.decode import Decoding, predict
from qkv.decode.predict import evaluating, sequences
from qkv.errors import InputError, nearest
from qkv.look.capture import attentions, capture
from qkv.nn import EncoderDecoder, Ragged
from qkv.weights import Loaded


@dataclass(frozen=True)
class Alignment:
    """Weights [H, N, M] of each output token (down) over the input tokens (across)."""

    weights: Tensor
    source: list[str]
    target: list[str]
    layer: str


def alignments(
    loaded: Loaded,
    texts: Sequence[str],
    targets: Sequence[str] | None = None,
    layer: str | None = None,
    how: Decoding | None = None,
) -> list[Alignment]:
    """One a text, for the model's own output or for given targets; `layer` None: the last that looks at the source."""
    model, source, target = loaded.model, loaded.source, loaded.target
    how = how or Decoding()
    if source is None or target is None:
        raise InputError(f"this {model.spec.family} came without a tokeniser, so it cannot read text")
    if not isinstance(model, EncoderDecoder):
        raise InputError(f"a {model.spec.family} of this shape has no output to align; this needs an encoder-decoder")
    name = _layer(model, layer)
    if targets is None:
        targets = [rows[0].text for rows in predict(loaded, texts, how)]
    ids = sequences(loaded, texts, [f"'{text}'" for text in texts], how)
    said = target.encode_batch(list(targets))
    read = Ragged.pack([torch.tensor(row) for row in ids]).to(model.device)
    written = Ragged.pack([torch.tensor([model.spec.start, *row]) for row in said]).to(model.device)
    with evaluating(model), torch.no_grad(), capture(model, layers=[name]) as maps:
        model(read, written)
    down = [target.tokens([*row, model.spec.end]) for row in said]
    return [Alignment(*parts, name) for parts in zip(maps[name], map(source.tokens, ids), down, strict=True)]


def _layer(model: EncoderDecoder, layer: str | None) -> str:
    known = [n for n in attentions(model) if n.startswith("decoder.") and n.endswith(("cross", "decoder.attention"))]
    if not known:
        raise InputError("this model has no attention over its input (model.attention: none); there is nothing to see")
    if layer is None:
        return known[-1]
    if layer not in known:
        raise InputError(f"no attention '{layer}' over the input; {nearest(layer, known)}")
    return layer
