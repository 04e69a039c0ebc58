"""What pretraining asks of a vocabulary: structure, words that go on, sentences that end, sentinels."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from qkv.errors import InputError
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer
from qkv.tokenization.vocab_tables import VocabTables, build_vocab_tables

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##related", "words", ".", "##.", "?", "Ġ"]


def wordpiece() -> Tokenizer:
    made = HFTokenizer(models.WordPiece({name: number for number, name in enumerate(PIECES)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(PIECES[:5])
    return Tokenizer(made, {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4})


def unigram() -> Tokenizer:
    names = ["<pad>", "</s>", "<unk>", "▁un", "related", "▁words", ".", "▁.", "▁"]
    made = HFTokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=2, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.add_tokens([AddedToken(f"<extra_id_{n}>", special=True, normalized=False) for n in (11, 10, 1, 0)])
    return Tokenizer(made, {"pad": 0, "eos": 1, "unk": 2})


def names(tokeniser: Tokenizer, table: np.ndarray | None) -> set[str | None]:
    assert table is not None
    assert len(table) == tokeniser.vocab_size
    return {tokeniser.backend.id_to_token(number) for number in np.flatnonzero(table).tolist()}


def test_special_tokens_are_structure_and_all_others_text() -> None:
    tokeniser = wordpiece()
    found = build_vocab_tables(tokeniser)
    assert names(tokeniser, found.is_special) == set(PIECES[:5])
    assert found.text_ids.tolist() == list(range(5, 12))
    assert found.mask_id == 4
    assert found.sentinel_ids == ()


def test_wordpiece_goes_on_behind_two_hashes() -> None:
    tokeniser = wordpiece()
    assert names(tokeniser, build_vocab_tables(tokeniser).is_subword_continuation) == {"##related", "##."}


def test_byte_level_bpe_begins_a_word_with_its_space() -> None:
    tokeniser = train_tokenizer("bpe", ["a word and another word.\nOne"] * 20, vocab_size=300)
    found = build_vocab_tables(tokeniser).is_subword_continuation
    assert found is not None
    ids = tokeniser.encode("a word and another word.\nOne")
    words, last = [], ""
    for number in ids:
        if not found[number] and last:
            words.append(last)
            last = ""
        last += tokeniser.decode([number])
    assert [*words, last] == ["a", " word", " and", " another", " word.", "\nOne"]


def test_unigram_begins_a_word_with_its_bar() -> None:
    tokeniser = unigram()
    begins = ~build_vocab_tables(tokeniser).is_subword_continuation  # type: ignore[operator]
    assert names(tokeniser, begins) >= {"▁un", "▁words", "▁.", "▁"}
    assert not names(tokeniser, begins) & {"related", "."}


def test_symbols_are_words() -> None:
    found = build_vocab_tables(train_tokenizer("whitespace", ["AH0 B K"])).is_subword_continuation
    assert found is not None
    assert not found.any()


def test_a_vocabulary_that_marks_a_words_end_cannot_tell_its_beginning() -> None:
    made = HFTokenizer(models.BPE({"<unk>": 0, "a": 1, "b</w>": 2}, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["<unk>"])
    assert build_vocab_tables(Tokenizer(made, {"unk": 0})).is_subword_continuation is None


def test_full_stops_end_sentences_however_they_are_written() -> None:
    one, other = wordpiece(), unigram()
    assert names(one, build_vocab_tables(one).is_sentence_end) == {".", "##.", "?"}
    assert names(other, build_vocab_tables(other).is_sentence_end) == {".", "▁."}


def test_sentinels_come_by_number_and_are_structure() -> None:
    tokeniser = unigram()
    found = build_vocab_tables(tokeniser)
    assert [tokeniser.backend.id_to_token(number) for number in found.sentinel_ids] == [
        f"<extra_id_{number}>" for number in (0, 1, 10, 11)
    ]
    assert found.is_special[list(found.sentinel_ids)].all()


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    table = VocabTables(np.zeros(3, dtype=bool))
    table.check_ids(np.array([0, 2]))
    for wrong in (-1, 3):
        with pytest.raises(InputError, match=f"token id {wrong} is outside the vocabulary of 3 tokens"):
            table.check_ids(np.array([0, wrong]))
