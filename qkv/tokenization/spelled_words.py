"""Vocabularies of whole words in which every other word is spelled: one letter per byte, after a space.

The space begins every word: "Ġthe" is a token, and a word that is none becomes "Ġ", "x", "y". So the words of a text
can be told apart, and no word is unknown. The letters are the last tokens of the vocabulary, in the order of their
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from qkv.errors import InputError
from qkv.tokenization import build
from qkv.tokenization.template import Template, find_special_ids, special_tokens_around_vocab

if TYPE_CHECKING:
    from qkv.tokenization.tokenizer import Tokenizer as TextTokenizer

NUM_LETTERS = 256
_VISIBLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))  # bytes that are their own letters


@cache
def byte_letters() -> tuple[str, ...]:
    """Return the letter of each byte in byte-level vocabularies (Radford et al. 2019): "Ġ" for the space."""
    visible = {byte for bytes_ in _VISIBLE for byte in bytes_}
    others = [byte for byte in range(NUM_LETTERS) if byte not in visible]
    return tuple(chr(byte) if byte in visible else chr(NUM_LETTERS + others.index(byte)) for byte in range(NUM_LETTERS))


def spell(word: str) -> str:
    """Return a word as the token that it would be, in letters after the one of the space."""
    letters = byte_letters()
    return "".join(letters[byte] for byte in b" " + word.encode())


def build_spelled_words(
    template: Template, words: Iterable[str], *, lowercase: bool, split_punctuation: bool
) -> Tokenizer:
    """Return a tokenizer of whole words.

    Args:
        template: the special tokens, which come first.
        words: the words that are tokens, in the order of their ids.
        lowercase: lowercase texts.
        split_punctuation: separate words from punctuation, as BERT does; otherwise words end at white space only.
    """
    special_tokens = special_tokens_around_vocab(template)[0]
    tokens = [*special_tokens, *dict.fromkeys(map(spell, words)), *byte_letters()]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))  # a word that is no token falls into letters
    if split_punctuation:
        tokenizer.normalizer = build.build_bert_normalizer(lowercase=lowercase, strip_accents=False)
    words_splitter = pre_tokenizers.BertPreTokenizer() if split_punctuation else pre_tokenizers.WhitespaceSplit()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words_splitter, letters])
    tokenizer.decoder = decoders.ByteLevel()
    build.set_post_processor(tokenizer, template, template.special_tokens)
    return tokenizer


def build_letters(template: Template) -> tuple[Tokenizer, dict[str, int]]:
    """Return a tokenizer that spells every word, and the id of each role; words end at white space."""
    tokenizer = build_spelled_words(template, (), lowercase=False, split_punctuation=False)
    special_tokens = special_tokens_around_vocab(template)[0]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special_tokens])
    return tokenizer, find_special_ids(template.special_tokens, tokenizer.token_to_id)


def vocabulary_words(tokenizer: TextTokenizer) -> tuple[str, ...]:
    """Return the text of each token before the letters; special tokens have none."""
    num_words = tokenizer.vocab_size - NUM_LETTERS
    names = [tokenizer.backend.id_to_token(token_id) or "" for token_id in range(tokenizer.vocab_size)]
    if num_words < 0 or tuple(names[num_words:]) != byte_letters():
        reason = "a model of characters needs whole words and letters, which this tokenizer does not have"
        raise InputError(f"tokenizer: {reason}; train one with qkv tokenizer train --family elmo")
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    special_ids = set(tokenizer.special_ids.values())
    spelled = (
        b"" if token_id in special_ids else bytes(byte_of[letter] for letter in name)[1:]
        for token_id, name in enumerate(names[:num_words])
    )
    return tuple(word.decode(errors="replace") for word in spelled)
