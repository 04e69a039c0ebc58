"""Documents as ids: cut by a tokeniser, held in memory or in mapped files, one interface for both."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qkv.data.ahead import ahead
from qkv.data.corpus import Document
from qkv.errors import InputError
from qkv.text.tokeniser import Tokeniser

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_GROUP = 2**18  # characters that are handed to a worker together
# Each stands before white space, as sentences do, and what decides how a text is read: case, accents, digits, spaces.
_PROBE = (
    "One sentence's end.",
    ' "Another, 2nd?"',
    " (Yes!)",
    "\nÀ la line 123",
    "\n\nThe END…",
    "  Zwölf Bücher 你好.",
)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Documents end to end, with where each of them and each of their sentences ends; no sentence is empty."""

    ids: Ids  # [tokens]
    documents: Ints  # [documents]
    sentences: Ints  # [sentences]

    def between(self, first: int, last: int) -> Part:
        """Documents `first` up to, not including, `last`."""
        ends = self.documents[first:last]
        begin = int(self.documents[first - 1]) if first else 0
        end = int(ends[-1]) if len(ends) else begin
        low, high = np.searchsorted(self.sentences, (begin, end), side="right")
        return Part(self.ids[begin:end], ends - begin, self.sentences[low:high] - begin)

    def digest(self) -> str:
        """The same for the same ids, documents and sentences."""
        found = hashlib.blake2b(
            f"{self.ids.dtype} {len(self.documents)} {len(self.sentences)}".encode(), digest_size=16
        )
        for array in (self.ids, self.documents, self.sentences):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def join(parts: Sequence[Part]) -> Part:
    """The documents of all parts, of which there is one at least."""
    sizes = [len(part.ids) for part in parts]
    befores = list(itertools.accumulate(sizes, initial=0))[:-1]
    moved = [(part.documents + before, part.sentences + before) for part, before in zip(parts, befores, strict=True)]
    ends = [np.concatenate(side) for side in zip(*moved, strict=True)]
    return Part(np.concatenate([part.ids for part in parts]), *ends)


class Encoded:
    """All documents of a corpus as ids. A token's place is its number when all documents stand end to end."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        documents = [len(part.documents) for part in self._parts]
        tokens = [len(part.ids) for part in self._parts]
        self._documents = np.cumsum([0, *documents])  # before each part, and in all
        self._tokens = np.cumsum([0, *tokens])
        lengths = [np.diff(part.documents, prepend=0) for part in self._parts]
        self.lengths: Ints = np.concatenate([np.zeros(0, np.int64), *lengths])  # [documents]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self._tokens[-1])

    @property
    def starts(self) -> Ints:
        """The place of each document's first token [documents]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def sentence_ends(self) -> Ints:
        """The place behind each sentence [sentences]; no sentence is empty."""
        moved = [part.sentences + before for part, before in zip(self._parts, self._tokens[:-1], strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *moved])

    def document(self, number: int) -> Ids:
        """The ids of a document: a view, not a copy."""
        part, begin, end = self._find(number)
        return part.ids[begin:end]

    def sentences(self, number: int) -> list[Ids]:
        """The ids of each sentence of a document."""
        part, begin, end = self._find(number)
        low, high = np.searchsorted(part.sentences, (begin, end), side="right")
        return [part.ids[first:last] for first, last in itertools.pairwise((begin, *part.sentences[low:high].tolist()))]

    def take(self, places: Ints) -> Ints:
        """The tokens at places [T]."""
        at = np.searchsorted(self._tokens, places, side="right") - 1
        found = np.empty(len(places), dtype=np.int64)
        for number in np.unique(at):
            here = at == number
            found[here] = self._parts[number].ids[places[here] - self._tokens[number]]
        return found

    def gather(self, begins: Ints, ends: Ints) -> Ints:
        """The tokens from each place to its end, one stretch after the other.  # [(ends - begins).sum()]"""
        stretch, offset = each(ends - begins)
        return self.take(begins[stretch] + offset)

    def digest(self) -> str:
        """The same for the same documents in the same parts."""
        found = " ".join(part.digest() for part in self._parts)
        return hashlib.blake2b(found.encode(), digest_size=16).hexdigest()

    def _find(self, number: int) -> tuple[Part, int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        at = int(np.searchsorted(self._documents, number, side="right")) - 1
        part, inside = self._parts[at], number - int(self._documents[at])
        return part, int(part.documents[inside - 1]) if inside else 0, int(part.documents[inside])


def each(counts: Ints) -> tuple[Ints, Ints]:
    """Of `counts[i]` items of owner i: each item's owner, and its number there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def encode(documents: Iterable[Document], tokeniser: Tokeniser, *, workers: int = 0) -> Encoded:
    """A small corpus, in memory."""
    parts = list(encode_parts(documents, tokeniser, workers=workers))
    if not parts:
        raise InputError("no documents to encode; give at least one")
    return Encoded([join(parts)])


def encode_parts(documents: Iterable[Document], tokeniser: Tokeniser, *, workers: int = 0) -> Iterator[Part]:
    """The documents in parts of some hundreds of thousands of characters, each encoded in a thread of its own.

    The ids of a document are those that the tokeniser gives its text, nothing added.
    """
    cut = encoder(tokeniser)
    return ahead(cut, _groups(documents), workers, "encode")


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def encoder(tokeniser: Tokeniser) -> Callable[[Sequence[Document]], Part]:
    """What makes a part of documents. Most tokenisers give a text the tokens of its sentences; others are asked where
    each token stands, which takes longer."""
    kind = np.uint16 if tokeniser.size <= 2**16 else np.uint32
    apart = [number for text in _PROBE for number in tokeniser.encode(text)]
    lengths = _apart if tokeniser.encode("".join(_PROBE)) == apart else _by_place

    def part(documents: Sequence[Document]) -> Part:
        sentences = [document.sentences for document in documents]
        ids, counts = lengths(sentences, tokeniser)
        ends = np.cumsum(counts, dtype=np.int64)
        lasts = np.cumsum([len(cut) for cut in sentences]) - 1  # each document's last sentence
        return Part(np.fromiter(ids, dtype=kind), ends[lasts], ends[np.asarray(counts) > 0])

    return part


def _apart(sentences: Sequence[list[str]], tokeniser: Tokeniser) -> tuple[Iterable[int], list[int]]:
    """The ids, and how many each sentence has."""
    cut = tokeniser.encode_batch(list(itertools.chain.from_iterable(sentences)))
    return itertools.chain.from_iterable(cut), list(map(len, cut))


def _by_place(sentences: Sequence[list[str]], tokeniser: Tokeniser) -> tuple[Iterable[int], list[int]]:
    ids: list[int] = []
    counts: list[int] = []
    for cut in sentences:
        found = tokeniser.engine.cut("".join(cut), None, template=False, special=False)
        ends = list(itertools.accumulate(map(len, cut)))
        tokens = np.searchsorted([first for first, _ in found.offsets], ends[:-1], side="left").tolist()
        edges = [0, *tokens, len(found.ids)]
        ids += found.ids
        counts += [last - first for first, last in itertools.pairwise(edges)]
    return ids, counts


def tokeniser_digest(tokeniser: Tokeniser) -> str:
    """The same for tokenisers that give the same ids: every name in the vocabulary, and how a probe is cut.

    Not of the tokeniser's file, which another release of the library may write in another way.
    """
    found = hashlib.blake2b(digest_size=16)
    for number in range(tokeniser.size):
        found.update(f"{tokeniser.engine.name(number)}\n".encode(errors="surrogatepass"))
    found.update(str([tokeniser.encode(text) for text in ("".join(_PROBE), *_PROBE)]).encode())
    return found.hexdigest()
