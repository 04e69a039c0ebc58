"""What a model in training says of text that it was not trained on: a filled mask, a continuation, a restored text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from qkv.data.chance import Ints
from qkv.data.framing import frame_of
from qkv.decode.predict import generate
from qkv.decode.settings import Decoding
from qkv.nn import Decoder, Encoder, EncoderDecoder, Ragged
from qkv.objectives.seq2seq import Inputs
from qkv.text.tokeniser import Tokeniser
from qkv.weights.folder import AnyModel

LENGTH = 32  # tokens of a text that a sample shows
_PROMPT = 12
_BEST = 3  # how many words are offered for a mask


def said(model: AnyModel, tokeniser: Tokeniser, ids: Ints, prepare: Callable[[Ints], Any]) -> str:
    """One sample. `ids` are those of a text, `prepare` makes of them what is to be restored."""
    ids = ids[:LENGTH]
    if isinstance(model, Encoder):
        told = _filled(model, tokeniser, ids.tolist())
    elif isinstance(model, Decoder):
        told = _continued(model, tokeniser, ids.tolist())
    else:
        told = _restored(model, tokeniser, prepare(ids))
    return " ".join(told.split())


def _restored(model: EncoderDecoder, tokeniser: Tokeniser, given: Inputs) -> str:
    limit = min(len(given.labels) + len(given.labels) // 4, _length(model))  # what is not trained yet hardly ever ends
    written = generate(model, given.source.to(model.device), Decoding(limit=limit))[0][0]
    return f"{spelled(tokeniser, given.source.values.tolist())} → {spelled(tokeniser, written.tokens)}"


def _filled(model: Encoder, tokeniser: Tokeniser, ids: list[int]) -> str:
    """The middle token is masked; the likeliest words stand in its place, the right one behind them."""
    assert tokeniser.mask is not None  # the objective needs it
    frame, middle = frame_of(tokeniser), len(ids) // 2
    whole = [*frame.ids[0], *ids, *frame.ids[2]]
    at = len(frame.ids[0]) + middle
    whole[at] = tokeniser.mask
    source = Ragged.of(torch.tensor(whole), [len(whole)]).to(model.device)
    logits = model(source, None, torch.tensor([at], device=model.device))  # [1, vocabulary]
    best = logits[0].topk(min(_BEST, logits.shape[1])).indices.tolist()
    words = "/".join(tokeniser.decode([number]).strip() or tokeniser.tokens([number])[0] for number in best)
    truth = tokeniser.decode([ids[middle]]).strip() or tokeniser.tokens([ids[middle]])[0]
    before, behind = tokeniser.decode(ids[:middle]), tokeniser.decode(ids[middle + 1 :])
    return f"{before} [{words} (was: {truth})] {behind}"


def _continued(model: Decoder, tokeniser: Tokeniser, ids: list[int]) -> str:
    start = [] if tokeniser.start is None else [tokeniser.start]
    prompt = [*start, *ids][: max(1, min(_PROMPT, _length(model) // 2))]
    room = min(LENGTH, _length(model) - len(prompt))
    source = Ragged.of(torch.tensor(prompt), [len(prompt)]).to(model.device)
    # sampled: the likeliest words alone go round in circles
    how = Decoding(sample=True, temperature=0.8, top_k=40, limit=room)
    written = generate(model, source, how)[0][0]
    whole, before = tokeniser.decode([*prompt, *written.tokens]), tokeniser.decode(prompt)
    return f"{before} → {whole.removeprefix(before).strip()}"


def _length(model: AnyModel) -> int:
    assert model.spec.target is not None
    return model.spec.target.length


def spelled(tokeniser: Tokeniser, ids: Sequence[int]) -> str:
    """A text with its special tokens, which `decode` leaves out."""
    special = set(tokeniser.engine.specials)
    parts = []
    for is_special, run in groupby(ids, lambda number: tokeniser.engine.name(number) in special):
        numbers = list(run)
        parts += tokeniser.tokens(numbers) if is_special else [tokeniser.decode(numbers).strip()]
    return " ".join(part for part in parts if part)
