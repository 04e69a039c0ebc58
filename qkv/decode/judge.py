"""What a model says about a text without writing one: fill a mask, classify, tag, answer, choose, follow.

The heads are those of the notes' table of tasks; which one a model has, its spec says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qkv import spec
from qkv.decode.frames import Packed, Text, batches, encoded, framed, input_length, tokeniser_of
from qkv.decode.settings import Decoding, Part, Prediction, check
from qkv.errors import InputError
from qkv.nn import Encoder
from qkv.nn.words import by_word
from qkv.text.engine import Framed
from qkv.weights import Loaded

Given = str | tuple[str, ...]
FOLLOWS = ("follows", "does not follow")
_ANSWER = 30  # tokens that an answer may have


def judge(loaded: Loaded, inputs: Sequence[Given], how: Decoding, places: Sequence[str]) -> list[list[Prediction]]:
    """The `how.best` things that a model's head says about each input, likeliest first."""
    check(how)
    head = loaded.model.spec.head
    if head is None or head.kind == "pooler":
        raise InputError(f"this {loaded.model.spec.family} has no head to predict with; qkv embed gives its vectors")
    if isinstance(loaded.model.spec.source, spec.Patches):
        return _see(loaded, [_one(given, place) for given, place in zip(inputs, places, strict=True)], how)
    return _KINDS[head.kind](loaded, inputs, how, places)


def _fill(loaded: Loaded, inputs: Sequence[Given], how: Decoding, places: Sequence[str]) -> list[list[Prediction]]:
    """The likeliest words where the text has masks; of several masks each is filled for itself."""
    tokeniser = tokeniser_of(loaded)
    if tokeniser.mask is None:
        raise InputError("this model's tokeniser has no mask token, so there is nothing to fill")
    frames = framed(loaded, [_one(g, p) for g, p in zip(inputs, places, strict=True)], places, how, special=True)
    name = tokeniser.tokens([tokeniser.mask])[0]
    for frame, place in zip(frames, places, strict=True):
        if tokeniser.mask not in frame.ids:
            raise InputError(f"{place}: has no {name}; write it where a word is to be filled in")

    def fill(batch: Packed, hidden: Tensor) -> list[list[Prediction]]:
        at = (batch.source.values == tokeniser.mask).nonzero().flatten()
        chances = _log_softmax(loaded, hidden[at])
        scores, tokens = chances.topk(min(how.best, chances.shape[-1]))  # [masks, best]
        out, done = [], 0
        for row in batch.rows:
            places_in = [i for i, token in enumerate(frames[row].ids) if token == tokeniser.mask]
            mine = slice(done, done + len(places_in))
            done += len(places_in)
            filled = []
            for rank in range(scores.shape[1]):
                ids = list(frames[row].ids)
                for place, token in zip(places_in, tokens[mine, rank].tolist(), strict=True):
                    ids[place] = token
                filled.append(Prediction(tokeniser.decode(ids), float(scores[mine, rank].sum())))
            out.append(filled)
        return out

    return _over(loaded, frames, how, fill)


def _classify(loaded: Loaded, inputs: Sequence[Given], how: Decoding, places: Sequence[str]) -> list[list[Prediction]]:
    frames = framed(loaded, [_text(g, p) for g, p in zip(inputs, places, strict=True)], places, how)
    return _over(loaded, frames, how, lambda batch, hidden: _labelled(loaded, _pooled(loaded, batch, hidden), how))


def _follow(loaded: Loaded, inputs: Sequence[Given], how: Decoding, places: Sequence[str]) -> list[list[Prediction]]:
    for given, place in zip(inputs, places, strict=True):
        _several(given, place, "two sentences")
    return _classify(loaded, inputs, how, places)


def _see(loaded: Loaded, files: Sequence[str], how: Decoding) -> list[list[Prediction]]:
    """Labels of pictures."""
    if loaded.images is None:
        raise InputError("this model came without a preprocessor_config.json, so it cannot read pictures")
    out, model = [], loaded.model
    assert isinstance(model, Encoder)
    each = max(1, how.batch_tokens // input_length(model.spec))
    for begin in range(0, len(files), each):
        pictures = loaded.images.read_batch([Path(f) for f in files[begin : begin + each]]).to(model.device)
        out += _labelled(loaded, model(pictures), how)
    return out


def _tag(loaded: Loaded, inputs: Sequence[Given], how: Decoding, places: Sequence[str]) -> list[list[Prediction]]:
    """Every word with its label; a word's vector is that of its first piece, or the mean of its pieces'."""
    assert loaded.model.spec.head is not None
    word = how.word or loaded.model.spec.head.word
    texts = [_one(given, place) for given, place in zip(inputs, places, strict=True)]
    frames = framed(loaded, texts, places, how)

    def tag(batch: Packed, hidden: Tensor) -> list[list[Prediction]]:
        chosen = [frames[i] for i in batch.rows]
        words = by_word(batch.source.like(hidden), [frame.words for frame in chosen], word)
        scores, labels = _log_softmax(loaded, words.values).max(-1)
        at, out = 0, []
        for row, frame, size in zip(batch.rows, chosen, words.layout.sizes, strict=True):
            said = zip(labels[at : at + size].tolist(), scores[at : at + size].tolist(), strict=True)
            at += size
            parts = [
                Part(texts[row][begin:end], _name(loaded, label), score, begin, end)
                for (begin, end), (label, score) in zip(_word_spans(frame), said, strict=True)
            ]
            whole = " ".join(f"{part.text}/{part.label}" for part in parts)
            out.append([Prediction(whole, sum(part.score for part in parts), parts=tuple(parts))])
        return out

    return _over(loaded, frames, how, tag)


def _answer(loaded: Loaded, inputs: Sequence[Given], how: Decoding, places: Sequence[str]) -> list[list[Prediction]]:
    """The likeliest stretches of the second text that answer the first (Devlin et al. 2019, 4.2)."""
    pairs = [_several(given, place, "a question and a text") for given, place in zip(inputs, places, strict=True)]
    frames = framed(loaded, [(pair[0], pair[1]) for pair in pairs], places, how)

    def answer(batch: Packed, hidden: Tensor) -> list[list[Prediction]]:
        out = []
        for row, rows in zip(batch.rows, batch.source.like(_said(loaded, hidden)).sequences(), strict=True):
            inside = torch.tensor([part == 1 for part in frames[row].parts], device=rows.device)
            begins, ends = torch.log_softmax(rows.float().masked_fill(~inside[:, None], float("-inf")), 0).unbind(-1)
            joint = (begins[:, None] + ends[None]).triu().tril(_ANSWER - 1)  # [n, n]
            allowed = torch.ones_like(joint).triu().tril(_ANSWER - 1).bool()
            scores, flat = joint.masked_fill(~allowed, float("-inf")).flatten().topk(min(how.best, joint.numel()))
            found = zip(scores.tolist(), flat.tolist(), strict=True)
            spans = [
                (s, frames[row].offsets[i // len(rows)][0], frames[row].offsets[i % len(rows)][1]) for s, i in found
            ]
            out.append([_answered(pairs[row][1], *span) for span in spans if span[0] > float("-inf")])
        return out

    return _over(loaded, frames, how, answer)


def _answered(text: str, score: float, begin: int, end: int) -> Prediction:
    return Prediction(text[begin:end], score, parts=(Part(text[begin:end], "answer", score, begin, end),))


def _choose(loaded: Loaded, inputs: Sequence[Given], how: Decoding, places: Sequence[str]) -> list[list[Prediction]]:
    """The choices by how well each goes on from the first text."""
    lists = [_several(given, place, "a text and its choices") for given, place in zip(inputs, places, strict=True)]
    pairs = [((first, choice), place) for (first, *rest), place in zip(lists, places, strict=True) for choice in rest]
    frames = framed(loaded, [pair for pair, _ in pairs], [place for _, place in pairs], how)
    scored = _over(
        loaded,
        frames,
        how,
        lambda batch, hidden: [[Prediction("", s)] for s in _pooled(loaded, batch, hidden).flatten().tolist()],
    )
    out, at = [], 0
    for _, *choices in lists:
        raw = torch.tensor([found[0].score for found in scored[at : at + len(choices)]])
        at += len(choices)
        scores, order = torch.log_softmax(raw, 0).sort(descending=True)
        ranked = zip(order.tolist()[: how.best], scores.tolist(), strict=False)
        out.append([Prediction(choices[i], score) for i, score in ranked])
    return out


_KINDS: dict[str, Callable[[Loaded, Sequence[Given], Decoding, Sequence[str]], list[list[Prediction]]]] = {
    "lm": _fill,
    "sequence": _classify,
    "next_sentence": _follow,
    "token": _tag,
    "span": _answer,
    "choice": _choose,
}


# ---- what they share ------------------------------------------------------------------------------------------------


def _over(
    loaded: Loaded,
    frames: Sequence[Framed],
    how: Decoding,
    read: Callable[[Packed, Tensor], list[list[Prediction]]],
) -> list[list[Prediction]]:
    """Hidden states batch by batch, read off by `read`, in the order of the inputs."""
    out: list[list[Prediction]] = [[] for _ in frames]
    for batch in batches(loaded, frames, how.batch_tokens):
        found = read(batch, encoded(loaded, batch).hidden.values)
        for row, predictions in zip(batch.rows, found, strict=True):
            out[row] = predictions
    return out


def _said(loaded: Loaded, rows: Tensor) -> Tensor:
    assert loaded.model.head is not None
    logits: Tensor = loaded.model.head(rows)
    return logits


def _log_softmax(loaded: Loaded, rows: Tensor) -> Tensor:
    return torch.log_softmax(_said(loaded, rows).float(), -1)


def _pooled(loaded: Loaded, batch: Packed, hidden: Tensor) -> Tensor:
    assert loaded.model.head is not None
    logits: Tensor = loaded.model.head(batch.source.like(hidden))
    return logits  # [B, outputs]


def _labelled(loaded: Loaded, logits: Tensor, how: Decoding) -> list[list[Prediction]]:
    assert loaded.model.spec.head is not None
    if loaded.model.spec.head.several:
        return [_above(loaded, row, how.threshold) for row in torch.nn.functional.logsigmoid(logits.float())]
    if logits.shape[-1] == 1:  # a regression: the number itself
        return [[Prediction(f"{value:.4f}", value)] for value in logits.flatten().tolist()]
    scores, labels = torch.log_softmax(logits.float(), -1).sort(descending=True)
    rows = zip(scores.tolist(), labels.tolist(), strict=True)
    return [[Prediction(_name(loaded, i), s) for s, i in list(zip(*row, strict=True))[: how.best]] for row in rows]


def _above(loaded: Loaded, scores: Tensor, threshold: float) -> list[Prediction]:
    """All labels that are likely enough, each for itself; perhaps none."""
    found = zip(*(side.tolist() for side in scores.sort(descending=True)), strict=True)
    return [Prediction(_name(loaded, label), score) for score, label in found if math.exp(score) >= threshold]


def _name(loaded: Loaded, label: int) -> str:
    head = loaded.model.spec.head
    assert head is not None
    names = FOLLOWS if head.kind == "next_sentence" else head.labels
    return names[label] if names else str(label)


def _word_spans(frame: Framed) -> list[tuple[int, int]]:
    """The characters of each word, from its first piece to its last."""
    spans: dict[int, tuple[int, int]] = {}
    for word, (begin, end) in zip(frame.words, frame.offsets, strict=True):
        if word is not None:
            spans[word] = (spans.get(word, (begin, end))[0], end)
    return list(spans.values())


def _one(given: Given, place: str) -> str:
    if not isinstance(given, str):
        raise InputError(f"{place}: this model takes one text, not {len(given)}")
    return given


def _text(given: Given, place: str) -> Text:
    if isinstance(given, str):
        return given
    if len(given) != 2:
        raise InputError(f"{place}: this model takes one text or two, not {len(given)}")
    return given[0], given[1]


def _several(given: Given, place: str, wanted: str) -> tuple[str, ...]:
    if isinstance(given, str) or len(given) < 2:
        raise InputError(f"{place}: this model takes {wanted}, with a tab between them")
    return given
