"""Text in, text out: tokenise, decode in batches of similar length, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from qkv.data.batches import evaluation_batches
from qkv.decode.beam import beam
from qkv.decode.frames import framed, input_length, place_of, tokeniser_of
from qkv.decode.judge import Given, judge
from qkv.decode.settings import Decoding, Prediction, check_search
from qkv.decode.write import Hypothesis, Writer, greedy, sample
from qkv.errors import InputError
from qkv.nn import Decoder, Encoder, EncoderDecoder, Ragged
from qkv.text.tokeniser import Tokeniser
from qkv.weights import Loaded

_CONTINUATION = 64  # tokens that a prompt is continued by where no limit is given


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


@torch.inference_mode()
def generate(
    model: Writer, source: Ragged, how: Decoding, numbers: Sequence[int] | None = None
) -> list[list[Hypothesis]]:
    """`how.best` outputs for each source of ids, best first: sources to encode, or prompts to go on from.

    `numbers` tell sources apart where they are drawn for: the same number and seed give the same draws.
    """
    check_search(how)
    limits = _limits(model, source, how)
    if how.sample:
        cuts = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
        drawn = sample(model, source, limits=limits, seed=how.seed, rows=how.best, numbers=numbers, **cuts)
        return [sorted(rows, key=lambda h: -h.score) for rows in drawn]
    if how.beams > 1:
        ranked = isinstance(model, Decoder) if how.unfinished is None else how.unfinished == "ranked"
        found = beam(model, source, beams=how.beams, limits=limits, length_penalty=how.length_penalty, ranked=ranked)
        return [rows[: how.best] for rows in found]
    return greedy(model, source, limits=limits)


def _limits(model: Writer, source: Ragged, how: Decoding) -> list[int]:
    """How long each output may become, whoever its batch mates are."""
    assert model.spec.target is not None
    most, sizes = model.spec.target.length, source.layout.sizes
    if isinstance(model, EncoderDecoder):
        return [min(most, how.limit or 2 * n + 16) for n in sizes]
    if max(sizes) >= most:
        raise InputError(f"a prompt of {max(sizes)} tokens leaves no room; this model takes {most} in all")
    return [min(most - n, how.limit or _CONTINUATION) for n in sizes]


def predict(
    loaded: Loaded,
    texts: Sequence[Given],
    how: Decoding | None = None,
    places: Sequence[str] | None = None,
    first: int = 0,
) -> list[list[Prediction]]:
    """The `how.best` outputs for each input, best first: what a model writes, or what its head says about a text.

    An input is a text, or several that belong together: a question and a text, a sentence and its choices. `places`
    name the inputs in messages. `first` is the first one's number, by which it is told apart where outputs are drawn.
    """
    how, model = how or Decoding(), loaded.model
    if isinstance(texts, str):
        raise InputError("predict takes a list of texts; put the one text into a list")
    if not texts:
        return []
    named = places or [place_of(text) for text in texts]
    writes = model.spec.head is not None and model.spec.head.kind == "lm" and not isinstance(model, Encoder)
    with evaluating(model), torch.inference_mode():
        if not writes:
            return judge(loaded, texts, how, named)
        check_search(how)
        if not all(isinstance(text, str) for text in texts):
            raise InputError("this model takes one text at a time")
        return _written(loaded, [str(text) for text in texts], how, named, first)


def _written(
    loaded: Loaded, texts: Sequence[str], how: Decoding, places: Sequence[str], first: int
) -> list[list[Prediction]]:
    model, target = loaded.model, loaded.target
    assert not isinstance(model, Encoder)
    ids = sequences(loaded, texts, places, how)
    assert target is not None  # a model that came with one tokeniser came with both
    out: list[list[Prediction]] = [[] for _ in texts]
    budget = max(1, how.batch_tokens // max(how.beams, how.best))
    for rows in evaluation_batches([len(x) for x in ids], budget):
        packed = Ragged.pack([torch.tensor(ids[i]) for i in rows]).to(model.device)
        for i, hypotheses in zip(rows, generate(model, packed, how, (rows + first).tolist()), strict=True):
            before = ids[i] if isinstance(model, Decoder) else []  # a continuation is read with what it continues
            out[i] = [Prediction(target.decode([*before, *h.tokens]), h.score, h.finished) for h in hypotheses]
    return out


def sequences(loaded: Loaded, texts: Sequence[str], places: Sequence[str], how: Decoding) -> list[list[int]]:
    """What the model reads of each text: in its checkpoint's template, or, trained here, closed by the end token."""
    model, tokeniser = loaded.model, tokeniser_of(loaded)
    if not tokeniser.ours:
        return [frame.ids for frame in framed(loaded, texts, places, how)]
    closing = [model.spec.end] if isinstance(model, EncoderDecoder) else []  # a prompt is to be gone on from
    longest = input_length(model.spec) - len(closing)
    return [[*ids, *closing] for ids in source_ids(tokeniser, texts, places, longest, how)]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off, and back to what it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
