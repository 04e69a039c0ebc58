"""Text in, text out: tokenise, decode in batches of similar length, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from qkv.data.batches import evaluation_batches
from qkv.decode.beam import beam
from qkv.decode.write import Hypothesis, greedy, sample
from qkv.errors import InputError
from qkv.nn import EncoderDecoder, Ragged
from qkv.text.tokeniser import Tokeniser
from qkv.weights import Loaded


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How outputs are searched for."""

    beams: int = 1  # 1: greedy
    length_penalty: float = 1.0
    best: int = 1  # how many outputs an input gets
    sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    limit: int | None = None  # longest output in tokens; None: twice the input and a few more
    batch_tokens: int = 8192
    too_long: Literal["refuse", "truncate"] = "refuse"
    unknown: Literal["refuse", "replace"] = "refuse"


@dataclass(frozen=True)
class Prediction:
    """One output for one input."""

    text: str
    score: float  # sum of log-probabilities
    finished: bool = True


def source_ids(
    tokeniser: Tokeniser, texts: Sequence[str], places: Sequence[str], longest: int, how: Decoding
) -> list[list[int]]:
    """Ids of texts; one that the model cannot read is refused by its place, or mended as the user chose."""
    ids = tokeniser.encode_batch(texts)
    for i, (text, where) in enumerate(zip(texts, places, strict=True)):
        if how.unknown == "refuse" and tokeniser.unk in ids[i]:
            said = f"'{tokeniser.unknown(text)}' in '{text}' was never seen in training"
            raise InputError(f"{where}: {said}; remove it, or choose --unknown replace (data.unknown in a recipe)")
        if not ids[i]:
            raise InputError(f"{where}: is empty; give some text")
        if len(ids[i]) > longest and how.too_long == "refuse":
            said = f"{len(ids[i])} tokens, and the model takes at most {longest}"
            raise InputError(f"{where}: {said}; shorten it, or choose --too-long truncate")
        ids[i] = ids[i][:longest]
    return ids


def check(how: Decoding) -> None:
    """Refuses settings that contradict each other or mean nothing."""
    for name in ("beams", "best", "batch_tokens"):
        if getattr(how, name) < 1:
            raise InputError(f"{name} must be at least 1, not {getattr(how, name)}")
    if how.limit is not None and how.limit < 1:
        raise InputError(f"limit must be at least 1, not {how.limit}")
    if not -10 <= how.length_penalty <= 10:
        raise InputError(f"length_penalty must lie between -10 and 10, not {how.length_penalty}")
    if not 0 < how.temperature < math.inf:
        raise InputError(f"temperature must be above 0, not {how.temperature}; for the likeliest output do not sample")
    if how.top_k is not None and how.top_k < 1:
        raise InputError(f"top_k must be at least 1, not {how.top_k}")
    if how.top_p is not None and not 0 < how.top_p <= 1:
        raise InputError(f"top_p must lie above 0 and at most at 1, not {how.top_p}")
    if not how.sample and how.best > max(how.beams, 1):
        raise InputError(f"best={how.best} needs as many beams (beams={how.best}) or sampling")


@torch.inference_mode()
def generate(
    model: EncoderDecoder, source: Ragged, how: Decoding, numbers: Sequence[int] | None = None
) -> list[list[Hypothesis]]:
    """`how.best` outputs for each source of ids (each closed by the end token), best first.

    `numbers` tell sources apart where they are drawn for: the same number and seed give the same draws.
    """
    check(how)
    assert model.spec.target is not None
    most = model.spec.target.length
    limits = [min(most, how.limit or 2 * n + 16) for n in source.layout.sizes]  # each its own, whoever its mates are
    if how.sample:
        cuts = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
        drawn = sample(model, source, limits=limits, seed=how.seed, rows=how.best, numbers=numbers, **cuts)
        return [sorted(rows, key=lambda h: -h.score) for rows in drawn]
    if how.beams > 1:
        found = beam(model, source, beams=how.beams, limits=limits, length_penalty=how.length_penalty)
        return [rows[: how.best] for rows in found]
    return greedy(model, source, limits=limits)


def predict(
    loaded: Loaded, texts: Sequence[str], how: Decoding | None = None, places: Sequence[str] | None = None
) -> list[list[Prediction]]:
    """The `how.best` outputs for each text, best first; `places` name the texts in messages."""
    how = how or Decoding()
    check(how)
    model, source, target = loaded
    if not isinstance(model, EncoderDecoder):
        raise InputError(f"a {model.spec.family} of this shape does not write; predict needs an encoder-decoder")
    assert model.spec.source is not None
    if not texts:
        return []
    named = places or [f"'{text}'" for text in texts]
    ids = source_ids(source, texts, named, model.spec.source.length - 1, how)
    out: list[list[Prediction]] = [[] for _ in texts]
    budget = max(1, how.batch_tokens // max(how.beams, how.best))
    with evaluating(model):
        for rows in evaluation_batches([len(x) + 1 for x in ids], budget):
            packed = Ragged.pack([torch.tensor([*ids[i], model.spec.end]) for i in rows]).to(model.device)
            for i, hypotheses in zip(rows, generate(model, packed, how, rows.tolist()), strict=True):
                out[i] = [Prediction(target.decode(h.tokens), h.score, h.finished) for h in hypotheses]
    return out


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off, and back to what it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
