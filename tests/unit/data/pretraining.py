"""Random packed text over a small vocabulary, for the tests of pretraining noise."""

from __future__ import annotations

import numpy as np

from qkv.data.rng import PackedChunks
from qkv.tokenization.vocab_tables import VocabTables

PAD, CLS, SEP, UNK, MASK = range(5)
VOCABULARY = 1000
STOP = 10  # the full stop
SENTINELS = tuple(range(VOCABULARY - 1, VOCABULARY - 101, -1))


def marks(**changes: object) -> VocabTables:
    special = np.zeros(VOCABULARY, dtype=bool)
    special[:5] = True
    special[list(SENTINELS)] = True
    number = np.arange(VOCABULARY)
    fields = {
        "mask_id": MASK,
        "is_sentence_end": number == STOP,
        "is_subword_continuation": number % 3 == 0,
        "sentinel_ids": SENTINELS,
    }
    return VocabTables(special, **(fields | changes))  # type: ignore[arg-type]


MARKS = marks()


def text(lengths: list[int] | np.ndarray, *, framed: bool = False, seed: int = 1) -> PackedChunks:
    """Return random text tokens; with `framed`, between [CLS] and [SEP] and with another [SEP] inside."""
    random = np.random.default_rng(seed)
    parts = [random.integers(5, VOCABULARY - 100, n) for n in lengths]
    if framed:
        parts = [np.concatenate([[CLS], p[: len(p) // 2], [SEP], p[len(p) // 2 :], [SEP]]) for p in parts]
    return PackedChunks.from_arrays(np.concatenate(parts), [len(p) for p in parts], 7 + np.arange(len(parts)))


def counted(lengths: list[int] | np.ndarray) -> PackedChunks:
    """Return tokens 5, 6, 7 … in each chunk, so that a token shows its original position."""
    ids = np.concatenate([5 + np.arange(n) for n in lengths])
    return PackedChunks.from_arrays(ids, lengths, np.arange(len(lengths)))


def varied(count: int, least: int = 1, most: int = 200, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(least, most, count)


def cut(ids: object, lengths: object) -> list[list[int]]:
    """Return one list of tokens per chunk."""
    return [part.tolist() for part in np.split(np.asarray(ids), np.cumsum(np.asarray(lengths))[:-1])]


def alone(pieces: PackedChunks, row: int) -> PackedChunks:
    first = pieces.starts[row]
    return PackedChunks.from_arrays(
        pieces.ids[first : first + pieces.lengths[row]], [pieces.lengths[row]], [pieces.indices[row]]
    )
