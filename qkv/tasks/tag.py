"""Token classification: a tag for each word, where a model reads pieces of words (Devlin et al. 2019, 5.3).

A sentence that is longer than the model takes is read in windows that overlap; a word is judged, and learned, in that
window alone in which it stands furthest from an edge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qkv.data.examples import Labelled, Span, Tagged
from qkv.data.labels import check_labels, labels_of
from qkv.data.tags import OUTSIDE, scheme_of, tagged
from qkv.decode.frames import only
from qkv.errors import InputError
from qkv.evaluate.classification import F1, TokenAccuracy, label_set
from qkv.evaluate.entities import SCHEMES, EntityF1, Scheme, entities, entity_types
from qkv.evaluate.metric import Metric
from qkv.objectives import label
from qkv.objectives.label import Inputs
from qkv.objectives.term import Term
from qkv.tasks.task import Asked, pack, places, refuse_others, refuse_unlabelled
from qkv.text.engine import Framed
from qkv.text.tokeniser import Tokeniser

Tags = tuple[str, ...]


class Window(NamedTuple):
    """The words [begin, end) of a sentence that a model reads at once, and those of them that it judges there."""

    begin: int
    end: int
    judged: tuple[int, ...]


class About(NamedTuple):
    """Which word each row of logits is of and, where the mean of its pieces is judged, of which each token is one."""

    words: tuple[int, ...]  # [M]
    pieces: tuple[int | None, ...]  # [T]; None: a token that is read and not judged


@dataclass(frozen=True, kw_only=True)
class Tag:
    """See `qkv.tasks.task.Task`. A prediction is a tag for each of the example's words."""

    word: Literal["first", "all", "mean"] = "first"  # of a word's pieces: which learn its tag, and what then says it
    stride: int | None = None  # words from one window to the next; None: half a window
    too_long: Literal["windows", "truncate", "refuse"] = "windows"
    scheme: Scheme = "lenient"  # how broken chunks are read, where tags are chunks
    metric: str | None = None  # None: f1_micro of entities where tags are chunks (BIO, BIOES), else accuracy

    name = "tag"
    kind = "token"
    example = Tagged

    def __post_init__(self) -> None:
        for key, known in (("word", ("first", "all", "mean")), ("too_long", ("windows", "truncate", "refuse"))):
            if getattr(self, key) not in known:
                raise InputError(f"task.{key}: one of {', '.join(known)}, not '{getattr(self, key)}'")
        if self.scheme not in SCHEMES:
            raise InputError(f"task.scheme: one of {', '.join(SCHEMES)}, not '{self.scheme}'")
        if self.stride is not None and self.stride < 1:
            raise InputError(f"task.stride: at least one word, not {self.stride}")

    @property
    def head_fields(self) -> dict[str, str]:
        return {"word": "mean" if self.word == "mean" else "first"}

    def decides(self, labels: Sequence[str]) -> str:
        return self.metric or ("f1_micro" if _are_chunks(labels) else "accuracy")

    def labels(self, examples: Sequence[Tagged | Labelled]) -> tuple[str, ...]:
        refuse_unlabelled(self, examples, Tagged, Labelled)
        found = tuple(labels_of([_tagged(one) for one in examples]))
        if found in ((), (OUTSIDE,)):
            raise InputError(f"{places(examples)}: no word of any example has a tag; is it the right column or format?")
        return found

    def ask(
        self, examples: Sequence[Tagged | Labelled], tokeniser: Tokeniser, labels: Sequence[str], longest: int
    ) -> list[Asked]:
        refuse_others(self.name, examples, Tagged, Labelled)
        known = [_tagged(one) for one in examples]
        for one in known:
            _check(one)
        check_labels(labels, known)
        found: list[Asked] = []
        for number, one in enumerate(known):
            frame = tokeniser.frame_words(one.words)
            found += self._asked(number, one, frame, labels, longest)
        return found

    def _asked(
        self, number: int, example: Tagged, frame: Framed, labels: Sequence[str], longest: int
    ) -> Iterator[Asked]:
        """Its windows; none where no word of it has a token."""
        places: dict[int, list[int]] = {}  # of a word's tokens
        for place, word in enumerate(frame.words):
            if word is not None:
                places.setdefault(word, []).append(place)
        if not places:
            return
        added = [place for place, word in enumerate(frame.words) if word is None]
        room = longest - len(added)
        cut = len(frame.ids) > longest
        if cut and self.too_long == "refuse":
            said = f"{len(frame.ids)} tokens, and the model takes at most {longest}"
            raise InputError(f"{example.where}: {said}; shorten it, or set task.too_long: windows")
        words = sorted(places)
        windows = spread([min(len(places[word]), room) for word in words], room, self.stride)
        for window in windows[:1] if self.too_long == "truncate" else windows:
            read = {words[i]: places[words[i]][:room] for i in range(window.begin, window.end)}
            kept = sorted([*added, *(place for own in read.values() for place in own)])
            judged = [words[i] for i in window.judged] if len(windows) > 1 and self.too_long == "windows" else [*read]
            yield self._window(number, example, frame, kept, judged, labels, cut and self.too_long == "truncate")

    def _window(
        self,
        number: int,
        example: Tagged,
        frame: Framed,
        kept: Sequence[int],
        judged: Sequence[int],
        labels: Sequence[str],
        cut: bool,
    ) -> Asked:
        own = only(frame, kept)
        wanted = set(judged)
        pieces = tuple(word if word in wanted else None for word in own.words)
        at = [place for place, word in enumerate(pieces) if word is not None]
        firsts = [place for place in at if place == 0 or pieces[place - 1] != pieces[place]]
        chosen = at if self.word == "all" else firsts
        words = tuple(word for place in chosen if (word := pieces[place]) is not None)
        right: tuple[float, ...] = ()
        if example.tags is not None:
            place_of = {name: float(i) for i, name in enumerate(labels)}
            begins = set(firsts)
            names = [example.tags[word] for word in words]
            right = tuple(
                place_of[name] if place in begins else place_of.get(_further(name), place_of[name])
                for name, place in zip(names, chosen, strict=True)
            )
        about = About(words, pieces if self.word == "mean" else ())
        return Asked.of(number, [own], right, at=tuple(chosen), about=about, cut=cut)

    def prepare(self, asked: Sequence[Asked], segments: bool) -> Inputs:
        source, kinds, at = pack(asked, segments)
        right = torch.tensor([int(x) for one in asked for x in one.labels])
        if self.word != "mean":
            return Inputs(source, kinds, at, right)
        return Inputs(source, kinds, None, right, words=tuple(one.about.pieces for one in asked))

    def loss(self, logits: Tensor, batch: Inputs) -> Term:
        return label.classes(logits, batch)

    def read(
        self, asked: Sequence[tuple[Asked, Tensor]], example: Tagged | Labelled, labels: Sequence[str]
    ) -> tuple[str, ...]:
        said: dict[int, str] = {}
        for one, logits in asked:
            for word, best in zip(one.about.words, logits.argmax(-1).tolist(), strict=True):
                said.setdefault(word, labels[best])  # a word's first piece comes first
        commonest = Counter(said.values()).most_common(1)
        # a word without any token, or behind the cut: outside of all chunks, or what most words of its sentence are
        other = OUTSIDE if OUTSIDE in labels else commonest[0][0] if commonest else labels[0]
        return tuple(said.get(number, other) for number in range(len(_tagged(example).words)))

    def truth(self, example: Tagged | Labelled) -> Tags:
        tags = _tagged(example).tags
        if tags is None:
            raise InputError(f"{example.where}: has no tags; give them")
        return tags

    def metrics(
        self, labels: Sequence[str], predictions: Sequence[Tags], truths: Sequence[Tags]
    ) -> list[Metric[Any, Any]]:
        if _are_chunks(labels):
            types = entity_types(predictions, truths, scheme=self.scheme)
            return [EntityF1(types, self.scheme), TokenAccuracy()]
        return [TokenAccuracy(), F1(label_set(labels, predictions, truths), "macro")]


def spread(sizes: Sequence[int], room: int, stride: int | None) -> list[Window]:
    """Windows over words of these many tokens, each of at most `room`; every word is judged in exactly one."""
    edges: list[tuple[int, int]] = []
    begin = 0
    while not edges or edges[-1][1] < len(sizes):
        end, taken = begin, 0
        while end < len(sizes) and (end == begin or taken + sizes[end] <= room):
            taken += sizes[end]
            end += 1
        edges.append((begin, end))
        # never further than the window goes, and where it can be half of it, so that a word has company on both sides
        begin += max(1, min(stride or end - begin, (end - begin + 1) // 2))
    judged: list[list[int]] = [[] for _ in edges]
    for word in range(len(sizes)):
        there = [i for i, (first, last) in enumerate(edges) if first <= word < last]
        judged[max(there, key=lambda i: _depth(word, *edges[i], len(sizes)))].append(word)
    return [Window(*edge, tuple(own)) for edge, own in zip(edges, judged, strict=True) if own]


def _depth(word: int, begin: int, end: int, count: int) -> float:
    """How far a word stands from an edge of a window; the sentence's own ends are none."""
    left = word - begin if begin else math.inf
    right = end - 1 - word if end < count else math.inf
    return min(left, right)


def chunks(example: Tagged | Labelled, tags: Sequence[str], scheme: Scheme = "lenient") -> tuple[Span, ...]:
    """The entities that tags mark, as characters of the example's text."""
    known = _tagged(example)
    ends = [start + len(word) for start, word in zip(known.starts, known.words, strict=True)]
    found = entities(tags, scheme)
    return tuple(Span(known.starts[entity.start], ends[entity.end - 1], entity.type) for entity in found)


def _are_chunks(labels: Sequence[str]) -> bool:
    return scheme_of([labels]) is not None


def _further(tag: str) -> str:
    """The tag of a word's further pieces: a chunk begins once."""
    return f"I-{tag[2:]}" if tag.startswith("B-") else tag


def _tagged(example: Tagged | Labelled) -> Tagged:
    """A text with spans is one whose words are tagged."""
    return tagged(example) if isinstance(example, Labelled) else example


def _check(example: Tagged) -> None:
    if not example.words:
        raise InputError(f"{example.where}: has no words; fill it in, or remove it")
    if example.tags is not None and len(example.tags) != len(example.words):
        counted = f"{len(example.words)} words have {len(example.tags)} tags"
        raise InputError(f"{example.where}: {counted}; give each word one")


def make(**settings: Any) -> Tag:
    return Tag(**settings)
