"""Tokenized documents, in memory or in mapped files, with one interface for both."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qkv.data.corpora.corpus import Document
from qkv.data.prefetch import prefetch_map
from qkv.errors import NoTextError
from qkv.tokenization.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_GROUP_CHARACTERS = 2**18  # characters per block, which one worker encodes
# sentences with everything that affects tokenization: case, accents, digits, white space, punctuation
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
    """Concatenated documents with the ends of documents and of sentences; no sentence is empty."""

    ids: Ids  # [tokens]
    document_ends: Ints  # [documents]
    sentence_ends: Ints  # [sentences]

    def slice_documents(self, first: int, last: int) -> TokenBlock:
        """Return the documents from `first` up to, but not including, `last`."""
        ends = self.document_ends[first:last]
        begin = int(self.document_ends[first - 1]) if first else 0
        end = int(ends[-1]) if len(ends) else begin
        low, high = np.searchsorted(self.sentence_ends, (begin, end), side="right")
        return TokenBlock(self.ids[begin:end], ends - begin, self.sentence_ends[low:high] - begin)

    def fingerprint(self) -> str:
        """Return a hash of ids, documents and sentences."""
        header = f"{self.ids.dtype} {len(self.document_ends)} {len(self.sentence_ends)}"
        hasher = hashlib.blake2b(header.encode(), digest_size=16)
        for array in (self.ids, self.document_ends, self.sentence_ends):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()


def concat(blocks: Sequence[TokenBlock]) -> TokenBlock:
    """Concatenate one or more blocks."""
    token_counts = [len(block.ids) for block in blocks]
    offsets = list(itertools.accumulate(token_counts, initial=0))[:-1]
    shifted_ends = [
        (block.document_ends + offset, block.sentence_ends + offset)
        for block, offset in zip(blocks, offsets, strict=True)
    ]
    ends = [np.concatenate(end_arrays) for end_arrays in zip(*shifted_ends, strict=True)]
    return TokenBlock(np.concatenate([block.ids for block in blocks]), *ends)


class TokenizedCorpus:
    """All documents of a corpus as ids. A position is an index into the concatenation of all documents."""

    def __init__(self, blocks: Sequence[TokenBlock]) -> None:
        self._blocks = list(blocks)
        document_counts = [len(block.document_ends) for block in self._blocks]
        token_counts = [len(block.ids) for block in self._blocks]
        self._document_offsets = np.cumsum([0, *document_counts])  # before each block, and in total
        self._token_offsets = np.cumsum([0, *token_counts])
        lengths = [np.diff(block.document_ends, prepend=0) for block in self._blocks]
        self.lengths: Ints = np.concatenate([np.zeros(0, np.int64), *lengths])  # [documents]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self._token_offsets[-1])

    @property
    def document_starts(self) -> Ints:
        """Position of the first token of each document [documents]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def sentence_ends(self) -> Ints:
        """Position after the last token of each sentence [sentences]; no sentence is empty."""
        offsets = zip(self._blocks, self._token_offsets[:-1], strict=True)
        shifted_ends = [block.sentence_ends + offset for block, offset in offsets]
        return np.concatenate([np.zeros(0, np.int64), *shifted_ends])

    def document(self, index: int) -> Ids:
        """Return the ids of a document, as a view."""
        block, begin, end = self._locate_document(index)
        return block.ids[begin:end]

    def sentences(self, index: int) -> list[Ids]:
        """Return the ids of each sentence of a document."""
        block, begin, end = self._locate_document(index)
        low, high = np.searchsorted(block.sentence_ends, (begin, end), side="right")
        edges = (begin, *block.sentence_ends[low:high].tolist())
        return [block.ids[first:last] for first, last in itertools.pairwise(edges)]

    def tokens_at(self, positions: Ints) -> Ints:
        """Return the tokens at the given positions [T]."""
        if len(self._blocks) == 1:
            return self._blocks[0].ids[positions].astype(np.int64)
        block_indices = np.searchsorted(self._token_offsets, positions, side="right") - 1
        tokens = np.empty(len(positions), dtype=np.int64)
        for block_index in np.unique(block_indices):
            in_block = block_indices == block_index
            tokens[in_block] = self._blocks[block_index].ids[positions[in_block] - self._token_offsets[block_index]]
        return tokens

    def count_tokens(self, vocab_size: int) -> Ints:
        """Return the number of occurrences of each token [vocab_size]."""
        counts = np.zeros(vocab_size, np.int64)
        for block in self._blocks:
            counts += np.bincount(block.ids, minlength=vocab_size)
        return counts

    def gather_spans(self, begins: Ints, ends: Ints) -> Ints:
        """Return the tokens of the spans [begin, end), concatenated.  # [(ends - begins).sum()]"""
        span, offset = expand_counts(ends - begins)
        return self.tokens_at(begins[span] + offset)

    def fingerprint(self) -> str:
        """Return a hash of the documents and their blocks."""
        fingerprints = " ".join(block.fingerprint() for block in self._blocks)
        return hashlib.blake2b(fingerprints.encode(), digest_size=16).hexdigest()

    def _locate_document(self, index: int) -> tuple[TokenBlock, int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        block_index = int(np.searchsorted(self._document_offsets, index, side="right")) - 1
        block, index_in_block = self._blocks[block_index], index - int(self._document_offsets[block_index])
        begin = int(block.document_ends[index_in_block - 1]) if index_in_block else 0
        return block, begin, int(block.document_ends[index_in_block])


def expand_counts(counts: Ints) -> tuple[Ints, Ints]:
    """For `counts[i]` items of owner i, return the owner of each item and its index within the owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def encode(documents: Iterable[Document], tokenizer: Tokenizer, *, num_workers: int = 0) -> TokenizedCorpus:
    """Encode a small corpus in memory."""
    blocks = list(encode_blocks(documents, tokenizer, num_workers=num_workers))
    if not blocks:
        raise NoTextError("no documents to encode; give at least one")
    return TokenizedCorpus([concat(blocks)])


def encode_blocks(documents: Iterable[Document], tokenizer: Tokenizer, *, num_workers: int = 0) -> Iterator[TokenBlock]:
    """Yield the documents in encoded blocks of about 2**18 characters, which threads encode in parallel.

    No special tokens are added.
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
    """Return a function that encodes documents to a block.

    With most tokenizers, the tokens of a text are those of its sentences. For others, the sentence of each token is
    found by its character offset, which is slower.
    """
    fits_uint16 = tokenizer.vocab_size <= 2**16
    separate_ids = [token_id for text in _PROBE_TEXTS for token_id in tokenizer.encode(text)]
    is_separable = tokenizer.encode("".join(_PROBE_TEXTS)) == separate_ids
    encode_sentences = _encode_separately if is_separable else _encode_by_offsets

    def encode_block(documents: Sequence[Document]) -> TokenBlock:
        sentences = [document.sentences for document in documents]
        ids, counts = encode_sentences(sentences, tokenizer)
        ends = np.cumsum(counts, dtype=np.int64)
        last_sentences = np.cumsum([len(document_sentences) for document_sentences in sentences]) - 1
        flat_ids: Ids = np.fromiter(ids, dtype=np.uint16) if fits_uint16 else np.fromiter(ids, dtype=np.uint32)
        return TokenBlock(flat_ids, ends[last_sentences], ends[np.asarray(counts) > 0])

    return encode_block


def _encode_separately(sentences: Sequence[list[str]], tokenizer: Tokenizer) -> tuple[Iterable[int], list[int]]:
    """Return the ids of all documents, and the number of tokens of each sentence."""
    batch_ids = tokenizer.encode_batch(list(itertools.chain.from_iterable(sentences)))
    return itertools.chain.from_iterable(batch_ids), list(map(len, batch_ids))


def _encode_by_offsets(sentences: Sequence[list[str]], tokenizer: Tokenizer) -> tuple[Iterable[int], list[int]]:
    """Return what `_encode_separately` returns, for a tokenizer that merges across sentences."""
    ids: list[int] = []
    counts: list[int] = []
    for document_sentences in sentences:
        text = "".join(document_sentences)
        encoding = tokenizer.backend.encode(text, None, add_special_tokens=False, parse_special_tokens=False)
        char_ends = list(itertools.accumulate(map(len, document_sentences)))
        token_starts = np.searchsorted([first for first, _ in encoding.offsets], char_ends[:-1], side="left").tolist()
        edges = [0, *token_starts, len(encoding.ids)]
        ids += encoding.ids
        counts += [last - first for first, last in itertools.pairwise(edges)]
    return ids, counts


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of the vocabulary and of the ids of some probe texts.

    The tokenizer's file is not hashed, because another version of the library may write it differently.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for token_id in range(tokenizer.vocab_size):
        hasher.update(f"{tokenizer.backend.id_to_token(token_id)}\n".encode(errors="surrogatepass"))
    hasher.update(str([tokenizer.encode(text) for text in ("".join(_PROBE_TEXTS), *_PROBE_TEXTS)]).encode())
    return hasher.hexdigest()
