"""The front end that computes the vector of a word from its characters, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv.spec.model import Activation, Embedding

NUM_LETTERS = 256  # one per byte
NUM_CHARACTERS = NUM_LETTERS + 5  # and the beginning and end of a sentence, the beginning and end of a word, padding


@dataclass(frozen=True, kw_only=True)
class CharacterEmbedding(Embedding):
    """Front end for words: convolutions over their characters, highway layers and a projection (Peters et al. 2018).

    The characters are bytes, so that no word is unknown. The last tokens of the vocabulary are the letters, one per
    byte; a word that is no token is spelled with them, beginning with the space, and gets one vector.
    """

    position: Literal["sinusoid", "sinusoid_concat", "learned", "none"] = "none"
    words: tuple[str, ...] = ()  # text of each token but the letters, by id; one that is missing is spelled as its id
    letters: bool = True  # whether the vocabulary ends with the letters
    char_dim: int = 16  # width of the vector of a character
    filter_widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)  # characters that each group of filters reads
    filter_counts: tuple[int, ...] = (32, 32, 64, 128, 256, 512, 1024)  # number of filters of each group
    num_highway: int = 2  # number of highway layers (Srivastava et al. 2015)
    activation: Activation = "relu"  # activation of the filters and of the highway layers
    max_characters: int = 50  # characters of a word that are read, its beginning and end included

    @property
    def num_filters(self) -> int:
        return sum(self.filter_counts)

    @property
    def first_letter_id(self) -> int:
        """Id of the letter of byte 0; ids from it on are letters."""
        return self.vocab_size - NUM_LETTERS if self.letters else self.vocab_size
