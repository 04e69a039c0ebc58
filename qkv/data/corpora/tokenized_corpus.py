"""Documents as ids: cut by a tokeniser, held in memory or in mapped files, one interface for both."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qkv.data.corpora.corpus import Document
from qkv.data.prefetch import prefetch_map
from qkv.errors import InputError
from qkv.tokenization.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_GROUP_CHARACTERS = 2**18  # characters that are handed to a worker together
# Each stands before white space, as sentences do, and what decides how a text is read: case, accents, digits, spaces.
_PROBE_TEXTS = (
    "One sentence's end.",
    ' "Another, 2nd?"',
    " (Yes!)",
    "\nÀ la line 123",
    "\n\nThe END…",
    "  Zwölf Bücher 你好.",
)


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """Documents end to end, with where each of them and each of their sentences ends; no sentence is empty."""

    ids: Ids  # [tokens]
    document_ends: Ints  # [documents]
    sentence_ends: Ints  # [sentences]

    def slice_documents(self, first: int, last: int) -> TokenBlock:
        """Documents `first` up to, not including, `last`."""
        ends = self.document_ends[first:last]
        begin = int(self.document_ends[first - 1]) if first else 0
        end = int(ends[-1]) if len(ends) else begin
        low, high = np.searchsorted(self.sentence_ends, (begin, end), side="right")
        return TokenBlock(self.ids[begin:end], ends - begin, self.sentence_ends[low:high] - begin)

    def fingerprint(self) -> str:
        """The same for the same ids, documents and sentences."""
        hasher = hashlib.blake2b(
            f"{self.ids.dtype} {len(self.document_ends)} {len(self.sentence_ends)}".encode(), digest_size=16
        )
        for array in (self.ids, self.document_ends, self.sentence_ends):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()


def concat(blocks: Sequence[TokenBlock]) -> TokenBlock:
    """The documents of all parts, of which there is one at least."""
    token_counts = [len(block.ids) for block in blocks]
    offsets = list(itertools.accumulate(token_counts, initial=0))[:-1]
    shifted_ends = [(block.document_ends + offset, block.sentence_ends + offset) for block, offset in zip(blocks, offsets, strict=True)]
    ends = [np.concatenate(end_arrays) for end_arrays in zip(*shifted_ends, strict=True)]
    return TokenBlock(np.concatenate([block.ids for block in blocks]), *ends)


class TokenizedCorpus:
    """All documents of a corpus as ids. A token's place is its number when all documents stand end to end."""

    def __init__(self, blocks: Sequence[TokenBlock]) -> None:
        self._blocks = list(blocks)
        document_counts = [len(block.document_ends) for block in self._blocks]
        token_counts = [len(block.ids) for block in self._blocks]
        self._document_offsets = np.cumsum([0, *document_counts])  # before each part, and in all
        self._token_offsets = np.cumsum([0, *token_counts])
        lengths = [np.diff(block.document_ends, prepend=0) for block in self._blocks]
        self.lengths: Ints = np.concatenate([np.zeros(0, np.int64), *lengths])  # [documents]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self._token_offsets[-1])

    @property
    def document_starts(self) -> Ints:
        """The place of each document's first token [documents]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def sentence_ends(self) -> Ints:
        """The place behind each sentence [sentences]; no sentence is empty."""
        shifted_ends = [block.sentence_ends + offset for block, offset in zip(self._blocks, self._token_offsets[:-1], strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *shifted_ends])

    def document(self, index: int) -> Ids:
        """The ids of a document: a view, not a copy."""
        block, begin, end = self._locate_document(index)
        return block.ids[begin:end]

    def sentences(self, index: int) -> list[Ids]:
        """The ids of each sentence of a document."""
        block, begin, end = self._locate_document(index)
        low, high = np.searchsorted(block.sentence_ends, (begin, end), side="right")
        return [block.ids[first:last] for first, last in itertools.pairwise((begin, *block.sentence_ends[low:high].tolist()))]

    def tokens_at(self, positions: Ints) -> Ints:
        """The tokens at places [T]."""
        block_indices = np.searchsorted(self._token_offsets, positions, side="right") - 1
        tokens = np.empty(len(positions), dtype=np.int64)
        for block_index in np.unique(block_indices):
            in_block = block_indices == block_index
            tokens[in_block] = self._blocks[block_index].ids[positions[in_block] - self._token_offsets[block_index]]
        return tokens

    def gather_spans(self, begins: Ints, ends: Ints) -> Ints:
        """The tokens from each place to its end, one stretch after the other.  # [(ends - begins).sum()]"""
        span, offset = expand_counts(ends - begins)
        return self.tokens_at(begins[span] + offset)

    def fingerprint(self) -> str:
        """The same for the same documents in the same parts."""
        fingerprints = " ".join(block.fingerprint() for block in self._blocks)
        return hashlib.blake2b(fingerprints.encode(), digest_size=16).hexdigest()

    def _locate_document(self, index: int) -> tuple[TokenBlock, int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        block_index = int(np.searchsorted(self._document_offsets, index, side="right")) - 1
        block, index_in_block = self._blocks[block_index], index - int(self._document_offsets[block_index])
        return block, int(block.document_ends[index_in_block - 1]) if index_in_block else 0, int(block.document_ends[index_in_block])


def expand_counts(counts: Ints) -> tuple[Ints, Ints]:
    """Of `counts[i]` items of owner i: each item's owner, and its number there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def encode(documents: Iterable[Document], tokenizer: Tokenizer, *, num_workers: int = 0) -> TokenizedCorpus:
    """A small corpus, in memory."""
    blocks = list(encode_blocks(documents, tokenizer, num_workers=num_workers))
    if not blocks:
        raise InputError("no documents to encode; give at least one")
    return TokenizedCorpus([concat(blocks)])


def encode_blocks(documents: Iterable[Document], tokenizer: Tokenizer, *, num_workers: int = 0) -> Iterator[TokenBlock]:
    """The documents in parts of some hundreds of thousands of characters, each encoded in a thread of its own.

    The ids of a document are those that the tokeniser gives its text, nothing added.
    """
    encode_block = make_block_encoder(tokenizer)
    return prefetch_map(encode_block, _group_documents(documents), num_workers, "encode")


def _group_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def make_block_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[Document]], TokenBlock]:
    """What makes a part of documents. Most tokenisers give a text the tokens of its sentences; others are asked where
    each token stands, which takes longer."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    separate_ids = [token_id for text in _PROBE_TEXTS for token_id in tokenizer.encode(text)]
    encode_sentences = _encode_separately if tokenizer.encode("".join(_PROBE_TEXTS)) == separate_ids else _encode_by_offsets

    def encode_block(documents: Sequence[Document]) -> TokenBlock:
        sentences = [document.sentences for document in documents]
        ids, counts = encode_sentences(sentences, tokenizer)
        ends = np.cumsum(counts, dtype=np.int64)
        last_sentences = np.cumsum([len(document_sentences) for document_sentences in sentences]) - 1  # each document's last sentence
        return TokenBlock(np.fromiter(ids, dtype=dtype), ends[last_sentences], ends[np.asarray(counts) > 0])

    return encode_block


def _encode_separately(sentences: Sequence[list[str]], tokenizer: Tokenizer) -> tuple[Iterable[int], list[int]]:
    """The ids, and how many each sentence has."""
    batch_ids = tokenizer.encode_batch(list(itertools.chain.from_iterable(sentences)))
    return itertools.chain.from_iterable(batch_ids), list(map(len, batch_ids))


def _encode_by_offsets(sentences: Sequence[list[str]], tokenizer: Tokenizer) -> tuple[Iterable[int], list[int]]:
    ids: list[int] = []
    counts: list[int] = []
    for document_sentences in sentences:
        encoding = tokenizer.backend.encode("".join(document_sentences), None, add_special_tokens=False, parse_special_tokens=False)
        char_ends = list(itertools.accumulate(map(len, document_sentences)))
        token_starts = np.searchsorted([first for first, _ in encoding.offsets], char_ends[:-1], side="left").tolist()
        edges = [0, *token_starts, len(encoding.ids)]
        ids += encoding.ids
        counts += [last - first for first, last in itertools.pairwise(edges)]
    return ids, counts


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """The same for tokenisers that give the same ids: every name in the vocabulary, and how a probe is cut.

    Not of the tokeniser's file, which another release of the library may write in another way.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for token_id in range(tokenizer.vocab_size):
        hasher.update(f"{tokenizer.backend.id_to_token(token_id)}\n".encode(errors="surrogatepass"))
    hasher.update(str([tokenizer.encode(text) for text in ("".join(_PROBE_TEXTS), *_PROBE_TEXTS)]).encode())
    return hasher.hexdigest()
