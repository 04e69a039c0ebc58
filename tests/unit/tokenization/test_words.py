"""Vocabularies of whole words."""

from __future__ import annotations

import pytest

from qkv.errors import InputError
from qkv.families import get_family
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer

TEXT = ["The whale, the sea; the whale!", "Ahab's whale"]


def train(**options: int) -> Tokenizer:
    template = get_family("word2vec").TOKENIZER_TEMPLATE
    return train_tokenizer("word", TEXT, template=template, **({"vocab_size": 100} | options))


def test_words_are_in_the_order_of_their_frequency_after_the_special_tokens() -> None:
    tokenizer = train()
    names = [tokenizer.backend.id_to_token(i) for i in range(tokenizer.vocab_size)]
    assert names[:6] == ["<pad>", "<unk>", "<s>", "</s>", "the", "whale"]
    assert set(names[6:]) == {"sea", "ahab", "s", "'", ",", ";", "!"}


def test_rare_and_unseen_words_are_unknown() -> None:
    tokenizer = train(min_count=2)
    assert tokenizer.vocab_size == 6
    assert tokenizer.encode("The SEA whale") == [4, tokenizer.unk_id, 5]
    assert train(vocab_size=5).encode("the whale") == [4, 1]


def test_the_names_of_special_tokens_in_a_text_are_ordinary_characters() -> None:
    tokenizer = train()
    assert not {0, 2, 3} & set(tokenizer.encode("<pad> <s> </s>"))


def test_a_pair_of_texts_has_a_token_between_them() -> None:
    tokenizer = train()
    assert tokenizer.encode_plus("the sea", "whale").ids == [*tokenizer.encode("the sea"), 3, 5]


def test_min_count_needs_words() -> None:
    with pytest.raises(InputError, match="min_count is for a vocabulary of words"):
        train_tokenizer("wordpiece", TEXT, vocab_size=100, min_count=2)
    with pytest.raises(InputError, match="no word occurs 9 times"):
        train(min_count=9)
