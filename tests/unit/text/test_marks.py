"""What pretraining asks of a vocabulary: structure, words that go on, sentences that end, sentinels."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from qkv.errors import InputError
from qkv.text.marks import Marks, marks
from qkv.text.tokeniser import Tokeniser, train_tokeniser

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##related", "words", ".", "##.", "?", "Ġ"]


def wordpiece() -> Tokeniser:
    made = Tokenizer(models.WordPiece({name: number for number, name in enumerate(PIECES)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(PIECES[:5])
    return Tokeniser(made, {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4})


def unigram() -> Tokeniser:
    names = ["<pad>", "</s>", "<unk>", "▁un", "related", "▁words", ".", "▁.", "▁"]
    made = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=2, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.add_tokens([AddedToken(f"<extra_id_{n}>", special=True, normalized=False) for n in (11, 10, 1, 0)])
    return Tokeniser(made, {"pad": 0, "end": 1, "unk": 2})


def names(tokeniser: Tokeniser, table: np.ndarray | None) -> set[str | None]:
    assert table is not None
    assert len(table) == tokeniser.size
    return {tokeniser.engine.name(number) for number in np.flatnonzero(table).tolist()}


def test_special_tokens_are_structure_and_all_others_text() -> None:
    tokeniser = wordpiece()
    found = marks(tokeniser)
    assert names(tokeniser, found.special) == set(PIECES[:5])
    assert found.ordinary.tolist() == list(range(5, 12))
    assert found.mask == 4
    assert found.sentinels == ()


def test_wordpiece_goes_on_behind_two_hashes() -> None:
    tokeniser = wordpiece()
    assert names(tokeniser, marks(tokeniser).continues) == {"##related", "##."}


def test_byte_level_bpe_begins_a_word_with_its_space() -> None:
    tokeniser = train_tokeniser("bpe", ["a word and another word.\nOne"] * 20, size=300)
    found = marks(tokeniser).continues
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
    begins = ~marks(tokeniser).continues  # type: ignore[operator]
    assert names(tokeniser, begins) >= {"▁un", "▁words", "▁.", "▁"}
    assert not names(tokeniser, begins) & {"related", "."}


def test_symbols_are_words() -> None:
    found = marks(train_tokeniser("symbol", ["AH0 B K"])).continues
    assert found is not None
    assert not found.any()


def test_a_vocabulary_that_marks_a_words_end_cannot_tell_its_beginning() -> None:
    made = Tokenizer(models.BPE({"<unk>": 0, "a": 1, "b</w>": 2}, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["<unk>"])
    assert marks(Tokeniser(made, {"unk": 0})).continues is None


def test_full_stops_end_sentences_however_they_are_written() -> None:
    one, other = wordpiece(), unigram()
    assert names(one, marks(one).stops) == {".", "##.", "?"}
    assert names(other, marks(other).stops) == {".", "▁."}


def test_sentinels_come_by_number_and_are_structure() -> None:
    tokeniser = unigram()
    found = marks(tokeniser)
    assert [tokeniser.engine.name(number) for number in found.sentinels] == [
        f"<extra_id_{number}>" for number in (0, 1, 10, 11)
    ]
    assert found.special[list(found.sentinels)].all()


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    table = Marks(np.zeros(3, dtype=bool))
    table.check(np.array([0, 2]))
    for wrong in (-1, 3):
        with pytest.raises(InputError, match=f"token {wrong} is none of the vocabulary's 3"):
            table.check(np.array([0, wrong]))
