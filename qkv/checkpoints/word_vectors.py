"""Word vectors of a file or of a model's token embeddings: neighbors, analogies, and initial embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qkv import spec
from qkv.checkpoints.bundle import ModelBundle
from qkv.checkpoints.model_folder import load
from qkv.checkpoints.state import AnyModel
from qkv.checkpoints.vector_files import Vectors, read_vectors, vector_width
from qkv.errors import InputError, did_you_mean, quote
from qkv.tokenization.tokenizer import Tokenizer

_MIN_NORM = 1e-5  # a sum of unit vectors that is shorter is rounding


class Neighbor(NamedTuple):
    """A word with its cosine similarity to a query."""

    word: str
    cosine: float


@dataclass(frozen=True)
class WordVectors:
    """Words with their vectors [V, width]."""

    words: Sequence[str]
    vectors: Tensor
    find: Callable[[str], int | None]
    """Returns the row of a word; None if it is unknown."""
    location: str
    """The file or folder in messages."""
    hidden_rows: Sequence[int] = ()
    """Rows that are never neighbors, such as special tokens."""

    def similar(self, query: str, n: int = 10) -> list[Neighbor]:
        """Return the `n` words with the largest cosine to a word, or to an analogy such as "king - man + woman".

        The words of the query are not among them. An analogy adds and subtracts vectors of length 1 (Mikolov et al.
        2013).
        """
        terms = [(sign, self.row(word)) for sign, word in parse_query(query)]
        unit = F.normalize(self.vectors, dim=-1)
        target = torch.stack([sign * unit[row] for sign, row in terms]).sum(0)
        if target.norm() < _MIN_NORM:
            reason = "the vectors of its words add up to zero, which has no direction"
            raise InputError(f"{self.location}: {quote(query)}: {reason}; name other words")
        cosines = unit @ F.normalize(target, dim=0)  # [V]
        cosines[[*self.hidden_rows, *(row for _, row in terms)]] = -torch.inf
        num_words = min(n, len(cosines) - int(cosines.isinf().sum()))
        best = cosines.topk(num_words)
        rows, scores = best.indices.tolist(), best.values.tolist()
        return [Neighbor(self.words[row], score) for row, score in zip(rows, scores, strict=True)]

    def row(self, word: str) -> int:
        """Return the row of a word, or refuse a word that is unknown."""
        row = self.find(word)
        if row is None:
            hint = did_you_mean(word[:60], self.words) if len(self.words) <= 1000 else "words are case-sensitive"
            raise InputError(f"{self.location}: has no vector of {quote(word)}; {hint}")
        return row


def parse_query(query: str) -> list[tuple[int, str]]:
    """Return the signed words of "a - b + c"."""
    fields = query.split()
    words, operators = fields[::2], fields[1::2]
    if not fields or len(words) == len(operators) or not all(operator in ("+", "-") for operator in operators):
        raise InputError(f"{quote(query)}: expected a word, or words with + and - between them: king - man + woman")
    return [(1 if operator == "+" else -1, word) for operator, word in zip(["+", *operators], words, strict=True)]


def load_word_vectors(name: str) -> WordVectors:
    """Return the vectors of a file, or the token embeddings of a run or checkpoint."""
    if not Path(name).is_file():
        return model_vectors(load(name), name)
    words, vectors = read_vectors(name)
    rows = {word: row for row, word in enumerate(words)}
    return WordVectors(words, torch.from_numpy(vectors), rows.get, name)


def model_vectors(bundle: ModelBundle, location: str) -> WordVectors:
    """Return the token embeddings of a model's input, under the names that its tokenizer shows."""
    weight, tokenizer = bundle.model.front_end.token_weight, bundle.source_tokenizer
    if isinstance(bundle.model.spec.source_embedding, spec.CharacterEmbedding):
        reason = f"{bundle.model.spec.family} makes the vector of a word from its characters and its sentence"
        raise InputError(f"{location}: {reason}, and has no table of words; qkv embed gives vectors of texts and words")
    if weight is None or tokenizer is None:
        reason = "reads no text" if weight is None else "has no tokenizer"
        raise InputError(f"{location}: this model {reason}, so that no word has an embedding; name another model")
    num_tokens = min(len(weight), tokenizer.vocab_size)
    words = tokenizer.ids_to_display(range(num_tokens))
    special_ids = [row for row in tokenizer.special_ids.values() if row < num_tokens]

    def find(word: str) -> int | None:
        row = _single_token(tokenizer, word)
        return row if row is not None and row < num_tokens and row not in special_ids else None

    return WordVectors(words, weight.detach()[:num_tokens].float().cpu(), find, location, special_ids)


def plain_words(vectors: WordVectors) -> tuple[list[str], Vectors]:
    """Return the words that a vector file can hold, and their vectors; special tokens are left out."""
    hidden, seen = set(vectors.hidden_rows), set()
    rows = []
    for row, word in enumerate(vectors.words):
        if row not in hidden and word and word not in seen and not any(char.isspace() for char in word):
            rows.append(row)
            seen.add(word)
    return [vectors.words[row] for row in rows], vectors.vectors[rows].numpy()


def _single_token(tokenizer: Tokenizer, word: str) -> int | None:
    """Return the token that is a whole word, at the beginning of a text or after a space."""
    for text in (word, f" {word}"):
        ids = tokenizer.encode(text)
        if len(ids) == 1 and ids[0] != tokenizer.unk_id:
            return ids[0]
    return tokenizer.token_to_id(word)


@dataclass(frozen=True)
class InitialVectors:
    """Vectors of a file for words of a vocabulary."""

    rows: Sequence[int]  # of the vocabulary
    vectors: Tensor  # [rows, width]
    note: str  # a line for the user

    @staticmethod
    def read(path: str, tokenizer: Tokenizer, width: int) -> InitialVectors:
        """Read the vectors of the words that are tokens of a vocabulary."""
        file_width = vector_width(path)
        if file_width != width:
            reason = f"its vectors have {file_width} numbers, and the model's embeddings {width}"
            raise InputError(f"model.embeddings: {path}: {reason}; set model.d_model to {file_width}")
        names = tokenizer.ids_to_display(range(tokenizer.vocab_size))
        special_ids = set(tokenizer.special_ids.values())
        # a token that begins with a space is a word after a space, and more often a word than the same letters without
        rows = {name: row for row, name in enumerate(names) if row not in special_ids and not name.startswith("␣")}
        rows |= {name[1:]: row for row, name in enumerate(names) if name.startswith("␣") and len(name) > 1}
        words, vectors = read_vectors(path, rows)
        if not words:
            raise InputError(f"model.embeddings: {path}: has no word of the vocabulary; check language and case")
        note = f"embeddings: {len(words):,} of {tokenizer.vocab_size:,} tokens have a vector in {path}"
        return InitialVectors([rows[word] for word in words], torch.from_numpy(np.ascontiguousarray(vectors)), note)

    @torch.no_grad()
    def apply(self, model: AnyModel) -> None:
        """Replace the embeddings of these tokens; the others stay newly initialized."""
        weight = model.front_end.token_weight
        assert weight is not None  # a model with a tokenizer
        weight[torch.tensor(self.rows, device=weight.device)] = self.vectors.to(weight)
