"""Tokenisers: what goes in comes out, special tokens are never text, one file is enough, bad files are named."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models

from qkv.errors import InputError
from qkv.tokenization.tokenizer import SPECIAL_TOKENS, Tokenizer, train_tokenizer

KINDS = ["character", "whitespace", "bpe"]
LINES = ["the cat sat on the mat", "the dog sat on the log", "a naïve café, 漢字 and 🙂"]


def trained(kind: str, lines: list[str] = LINES, *, lowercase: bool = False) -> Tokenizer:
    return train_tokenizer(kind, lines, vocab_size=300 if kind == "bpe" else None, lowercase=lowercase)


def one_line(problem: pytest.ExceptionInfo[InputError]) -> str:
    message = str(problem.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_the_first_four_ids(kind: str) -> None:
    tokeniser = trained(kind)
    assert (tokeniser.pad_id, tokeniser.unk_id, tokeniser.bos_id, tokeniser.eos_id) == (0, 1, 2, 3)
    assert tokeniser.ids_to_display([0, 1, 2, 3]) == list(SPECIAL_TOKENS)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_characters_come_back_as_they_went_in(text: str) -> None:
    tokeniser = train_tokenizer("character", [text, "x"])
    ids = tokeniser.encode(text)
    assert len(ids) == len(text)
    assert tokeniser.decode(ids) == text
    assert tokeniser.first_unknown(text) is None


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1) | st.sampled_from(SPECIAL_TOKENS))
)
def test_symbols_come_back_joined_with_single_spaces(symbols: list[str]) -> None:
    tokeniser = train_tokenizer("whitespace", [" ".join(symbols), "x"])
    ids = tokeniser.encode("  ".join(symbols) + " ")
    assert len(ids) == len(symbols)
    assert tokeniser.decode(ids) == " ".join(symbols)


BPE = trained("bpe")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_gives_back_any_text_and_knows_every_piece(text: str) -> None:
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert BPE.first_unknown(text) is None
    assert len(BPE.display_tokens(text)) == len(ids)


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, *map(str.upper, SPECIAL_TOKENS), "a", " ", "<", ">", "s"])))
def test_no_text_becomes_a_special_id(kind: str, lowercase: bool, parts: list[str]) -> None:
    tokeniser = injectable(kind, lowercase)
    text = "".join(parts)
    specials = {tokeniser.pad_id, tokeniser.bos_id, tokeniser.eos_id}
    assert not specials & set(tokeniser.encode(text))
    assert not specials & set(tokeniser.encode_batch([text])[0])


_INJECTABLE: dict[tuple[str, bool], Tokenizer] = {}


def injectable(kind: str, lowercase: bool) -> Tokenizer:
    """Trained on the very strings of the attack, often enough for BPE to merge what it can."""
    if (kind, lowercase) not in _INJECTABLE:
        lines = [" ".join(SPECIAL_TOKENS), "".join(SPECIAL_TOKENS), "a <s>b"] * 50
        _INJECTABLE[kind, lowercase] = trained(kind, lines, lowercase=lowercase)
    return _INJECTABLE[kind, lowercase]


@pytest.mark.parametrize("kind", KINDS)
def test_special_names_that_were_in_the_training_text_survive_as_text(kind: str) -> None:
    text = "a <s> </s> <pad> <unk>"
    tokeniser = injectable(kind, lowercase=False)
    assert tokeniser.unk_id not in tokeniser.encode(text)
    assert tokeniser.decode(tokeniser.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_or_pickled_tokeniser_still_refuses_special_ids(kind: str, tmp_path: Path) -> None:
    tokeniser = trained(kind)
    tokeniser.save(tmp_path / "tokenizer.json")
    copies = [Tokenizer.load(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(tokeniser))]
    for copy in copies:
        assert not {copy.pad_id, copy.bos_id, copy.eos_id} & set(copy.encode("<s> the </s> <pad>"))


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_alone_gives_the_same_tokeniser(kind: str, lowercase: bool, tmp_path: Path) -> None:
    tokeniser = trained(kind, lowercase=lowercase)
    path = tmp_path / "tokenizer.json"
    tokeniser.save(path)
    loaded = Tokenizer.load(path)
    text = "The CAT sat, <s> zebra"
    assert loaded.encode(text) == tokeniser.encode(text)
    assert loaded.display_tokens(text) == tokeniser.display_tokens(text)
    assert loaded.vocab_size == tokeniser.vocab_size
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("kind", KINDS)
def test_training_does_not_depend_on_the_order_of_lines(kind: str, tmp_path: Path) -> None:
    lines = [f"{word} {word[::-1]}" for word in ["one", "two", "three", "four", "five", "six", "seven"]] * 3
    trained(kind, lines).save(tmp_path / "first.json")
    random.Random(1).shuffle(lines)
    trained(kind, lines).save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()


def test_frequent_symbols_come_first_and_ties_are_alphabetical() -> None:
    tokeniser = train_tokenizer("whitespace", ["c b b a", "b d"])
    assert tokeniser.ids_to_display(range(4, tokeniser.vocab_size)) == ["b", "a", "c", "d"]


def test_size_limits_a_symbol_vocabulary_to_the_most_frequent() -> None:
    tokeniser = train_tokenizer("whitespace", ["a a b"], vocab_size=5)
    assert tokeniser.vocab_size == 5
    assert tokeniser.encode("a b") == [4, tokeniser.unk_id]


def test_bpe_reaches_its_size_and_shortens_frequent_words() -> None:
    tokeniser = train_tokenizer("bpe", LINES * 10, vocab_size=280)
    assert tokeniser.vocab_size == 280
    assert len(tokeniser.encode("the")) < 3


@pytest.mark.parametrize("kind", KINDS)
def test_lowercase_reads_capitals_as_small_letters(kind: str) -> None:
    tokeniser = trained(kind, lowercase=True)
    assert tokeniser.encode("THE cat") == tokeniser.encode("the cat")
    assert tokeniser.decode(tokeniser.encode("THE cat")) == "the cat"


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_encodes_as_its_texts_do_one_by_one(kind: str) -> None:
    tokeniser = trained(kind)
    texts = [*LINES, "", "zebra <s>"]
    assert tokeniser.encode_batch(texts) == [tokeniser.encode(text) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_skips_special_ids(kind: str) -> None:
    tokeniser = trained(kind)
    ids = tokeniser.encode("the cat")
    assert tokeniser.decode([tokeniser.bos_id, *ids, tokeniser.eos_id, tokeniser.pad_id]) == "the cat"


def test_the_unknown_piece_is_named_as_the_user_wrote_it() -> None:
    symbols = trained("whitespace", lowercase=True)
    assert symbols.first_unknown("the Zebra Yak") == "Zebra"
    assert symbols.first_unknown("the </S> cat") == "</S>"
    assert symbols.display_tokens("THE Zebra") == ["the", "Zebra"]
    assert trained("character").first_unknown("the Q") == "Q"


def test_pieces_show_white_space_and_half_characters() -> None:
    assert trained("character", ["a b\nc\td"]).display_tokens("a b\nc\td") == ["a", "␣", "b", "⏎", "c", "⇥", "d"]
    assert trained("bpe").display_tokens("z q") == ["z", "␣", "q"]
    assert len(set(trained("bpe", ["x"]).display_tokens("é"))) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("charcter", ["a"], None), "did you mean 'character'"),
        (("bpe", ["a"], None), "260 or more"),
        (("bpe", ["a"], 259), "260 or more"),
        (("whitespace", ["a"], 4), "5 or more"),
        (("whitespace", [], None), "no text"),
        (("character", [""], None), "no text"),
        (("bpe", [" ", "\n"], 300), "no text"),
        (("whitespace", ["a", "b\ud800"], None), "line 2 .* character 2"),
    ],
)
def test_bad_training_arguments_are_named(arguments: tuple[str, list[str], int | None], complaint: str) -> None:
    kind, lines, size = arguments
    with pytest.raises(InputError, match=complaint) as problem:
        train_tokenizer(kind, lines, vocab_size=size)
    one_line(problem)


@pytest.mark.parametrize(
    "use",
    [
        lambda tokeniser, text: tokeniser.encode(text),
        lambda tokeniser, text: tokeniser.encode_batch(["fine", text]),
        lambda tokeniser, text: tokeniser.display_tokens(text),
        lambda tokeniser, text: tokeniser.first_unknown(text),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_place(use: Callable[[Tokenizer, str], object]) -> None:
    with pytest.raises(InputError, match="character 3"):
        use(trained("character"), "ab\udc80")


def foreign() -> str:
    return HFTokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).to_str()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "damaged"),
        (b"{}", "damaged"),
        (b"[1, 2]", "damaged"),
        (b'{"model": {"type": "WordLevel"}}', "damaged"),
        (b"\xff\xfe{", "not UTF-8"),
        (foreign().encode(), "has no <pad>, <unk>, <s>, </s>"),
    ],
)
def test_a_damaged_or_foreign_file_is_named(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint) as problem:
        Tokenizer.load(path)
    assert str(path) in one_line(problem)


@given(place=st.floats(0, 1, exclude_max=True))
def test_half_a_file_is_always_an_input_error(place: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "half.json"
    trained("whitespace", ["a b"]).save(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: int(place * len(text))], encoding="utf-8")
    with pytest.raises(InputError, match=re.escape("half.json")):
        Tokenizer.load(path)


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(InputError, match=re.escape(str(path))):
            Tokenizer.load(path)


def test_saving_over_a_folder_names_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="taken"):
        trained("whitespace").save(tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_the_file_is_tokenizers_own_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    trained("whitespace").save(path)
    assert json.loads(path.read_text(encoding="utf-8"))["model"]["type"] == "WordLevel"
    assert HFTokenizer.from_file(str(path)).token_to_id("</s>") == 3
