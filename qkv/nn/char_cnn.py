"""Words from their characters: convolutions, highway layers and a projection, as in ELMo (Peters et al. 2018).

A word is the bytes of its text between a beginning and an end. The layers are the same for every occurrence of a word,
so that each is computed once per batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.dropout import dropout
from qkv.nn.embedding import check_token_ids
from qkv.nn.feedforward import ACTIVATIONS
from qkv.nn.ragged import BatchLayout, Ragged
from qkv.spec.characters import NUM_CHARACTERS, NUM_LETTERS

# characters after those of the bytes
SENTENCE_BEGIN, SENTENCE_END, WORD_BEGIN, WORD_END, PADDING = range(NUM_LETTERS, NUM_CHARACTERS)
_BOS_ID, _EOS_ID = 2, 3  # tokens that are a word of one such character
_GATE_BIAS = -2.0  # highway layers begin as nearly the identity
_WORDS_PER_CHUNK = 1024  # limits the memory of the convolutions in prediction


@dataclass
class WordRagged(Ragged):
    """Values [W, …] of words, some of which are spelled with several tokens."""

    tokens: BatchLayout  # of the tokens
    word_ids: Tensor  # [T] word of each token

    def with_values(self, values: Tensor) -> WordRagged:
        return WordRagged(values, self.layout, self.tokens, self.word_ids)

    def to_tokens(self) -> Ragged:
        return Ragged(self.values[self.word_ids], self.tokens)


@dataclass(eq=False)
class Words:
    """The words of a packed batch of tokens."""

    layout: BatchLayout
    first_tokens: Tensor  # [W] index of the token that each word begins with
    word_ids: Tensor  # [T] word of each token
    is_letter: Tensor  # [T] whether the token is one of the letters


def find_words(ids: Ragged, s: spec.CharacterEmbedding) -> Words:
    """Return the words of token ids [T]: a token that is no letter, or letters from a space to the next one."""
    tokens, layout = ids.values, ids.layout
    is_letter = tokens >= s.first_letter_id
    continues = is_letter & (tokens != s.first_letter_id + ord(" ")) & is_letter.roll(1) & (layout.positions > 0)
    if not bool(continues.any()):
        index = torch.arange(layout.num_tokens, device=tokens.device)
        return Words(layout, index, index, is_letter)
    layout.use_on_host("words")
    lengths = ids.sum_sequences((~continues).long()).tolist()
    word_ids = (~continues).cumsum(0) - 1
    return Words(BatchLayout(lengths, tokens.device), (~continues).nonzero().flatten(), word_ids, is_letter)


class CharacterEmbedding(nn.Module):
    """Front end whose vector of a word depends on its characters alone."""

    token_weight: None = None  # there is no matrix with a row per token to share
    spelling: Tensor

    def __init__(self, s: spec.CharacterEmbedding):
        super().__init__()
        self.spec = s
        self.register_buffer("spelling", _spell_words(s), persistent=False)  # [words, characters]
        self.characters = nn.Parameter(torch.empty(NUM_CHARACTERS, s.char_dim))
        groups = zip(s.filter_widths, s.filter_counts, strict=True)
        self.filters = nn.ModuleList(nn.Conv1d(s.char_dim, count, width) for width, count in groups)
        self.highway = nn.ModuleList(Highway(s.num_filters, s.activation) for _ in range(s.num_highway))
        self.projection = nn.Linear(s.num_filters, s.d_model)
        self.init_weights(None)

    def init_weights(self, std: float | None) -> None:  # noqa: ARG002  # it depends on what the filters read
        """Draw characters and filters so that words differ (He et al. 2015); the layers above do it themselves."""
        nn.init.normal_(self.characters)
        for module in self.filters:
            assert isinstance(module, nn.Conv1d)
            assert module.bias is not None
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens per sequence."""
        return self.spec.max_length

    def forward(self, ids: Ragged, token_type_ids: Tensor | None = None) -> Ragged:
        """Return one vector per word.  # [T] -> [W, width]"""
        check_token_ids(ids, self.max_length)
        if token_type_ids is not None:
            raise InputError("this model has no segment embeddings; leave out token_type_ids")
        words = find_words(ids, self.spec)
        values = self._embed_distinct(self.spell(ids.values, words))
        if self.training and self.spec.dropout:
            values = dropout(values, self.spec.dropout)
        if words.layout is ids.layout:
            return ids.with_values(values)
        return WordRagged(values, words.layout, ids.layout, words.word_ids)

    def spell(self, ids: Tensor, words: Words) -> Tensor:
        """Return the characters of each word, with padding at its end.  # [T] -> [W, max_characters]"""
        s, first_tokens = self.spec, words.first_tokens
        last_word = max(len(self.spelling) - 1, 0)
        characters = self.spelling[ids[first_tokens].clamp(max=last_word)].long()
        spelled = words.is_letter.nonzero().flatten()  # tokens
        if not len(spelled):
            return characters
        space = s.first_letter_id + ord(" ")
        first_of_word = first_tokens[words.word_ids[spelled]]
        # the place of a space is that of the word's beginning; a cut-off word has letters only
        places = spelled - first_of_word + (ids[first_of_word] != space).long()
        num_letters = torch.zeros(len(first_tokens), dtype=torch.long, device=ids.device)
        num_letters = num_letters.scatter_reduce(0, words.word_ids[spelled], places, "amax")
        num_letters = num_letters.clamp(max=s.max_characters - 2)
        rows = words.is_letter[first_tokens].nonzero().flatten()  # spelled words
        characters[rows] = PADDING
        characters[rows, 0] = WORD_BEGIN
        is_read = (places > 0) & (places <= s.max_characters - 2)
        tokens, places = spelled[is_read], places[is_read]
        characters[words.word_ids[tokens], places] = ids[tokens] - s.first_letter_id
        characters[rows, num_letters[rows] + 1] = WORD_END
        return characters

    def _embed_distinct(self, characters: Tensor) -> Tensor:
        """Return the vectors of words, computing those of equal words once.  # [W, max_characters] -> [W, width]"""
        distinct, inverse = torch.unique(characters, dim=0, return_inverse=True)
        # windows behind the first one of padding alone add nothing to a maximum
        length = int((distinct != PADDING).sum(1).max()) + max(self.spec.filter_widths)
        distinct = distinct[:, : min(length, self.spec.max_characters)]
        return torch.cat([self._embed(chunk) for chunk in distinct.split(_WORDS_PER_CHUNK)])[inverse]

    def _embed(self, characters: Tensor) -> Tensor:
        x = F.embedding(characters, self.characters).transpose(1, 2)  # [words, char_dim, characters]
        x = torch.cat([filters(x).amax(-1) for filters in self.filters], 1)  # [words, filters]
        x = ACTIVATIONS[self.spec.activation](x)
        for layer in self.highway:
            x = layer(x)
        vectors: Tensor = self.projection(x)
        return vectors  # [words, width]


class Highway(nn.Module):
    """gate * activation(W x + b) + (1 - gate) * x (Srivastava et al. 2015)."""

    def __init__(self, width: int, activation: spec.Activation):
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.gate = nn.Linear(width, width, bias=False)
        self.gate_bias = nn.Parameter(torch.empty(width))
        self.activation = ACTIVATIONS[activation]
        self.init_weights(None)

    def init_weights(self, std: float | None) -> None:  # noqa: ARG002  # a constant
        """Let the gate be nearly closed; its matrix is initialized like any other."""
        nn.init.constant_(self.gate_bias, _GATE_BIAS)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x) + self.gate_bias)
        return x + gate * (self.activation(self.transform(x)) - x)


def spell_word(word: bytes | list[int], max_characters: int) -> list[int]:
    """Return the characters of one word; those that are too many are left out."""
    characters = [WORD_BEGIN, *word[: max_characters - 2], WORD_END]
    return characters + [PADDING] * (max_characters - len(characters))


def _spell_words(s: spec.CharacterEmbedding) -> Tensor:
    """Return the characters of all tokens but the letters.  # [words, max_characters]"""
    special: dict[int, list[int]] = {_BOS_ID: [SENTENCE_BEGIN], _EOS_ID: [SENTENCE_END]}
    texts = [*s.words, *map(str, range(len(s.words), s.first_letter_id))]
    rows = [spell_word(special.get(i) or text.encode(), s.max_characters) for i, text in enumerate(texts)]
    # on the CPU even inside `torch.device("meta")`: the table is no parameter, so no checkpoint fills it later
    return torch.tensor(rows or [spell_word(b"", s.max_characters)], dtype=torch.int16, device="cpu")
