"""Tokenisers of checkpoint folders: the template, the roles, what is refused, and what comes back from a file.

That the ids are transformers' own is in tests/parity/test_parity_tokenizer.py.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizer_folders import BERT, bert, bpe, field, must_refuse, pieces, put, read, spm, varint
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from qkv import families
from qkv.errors import InputError
from qkv.families import bart, gpt2, t5
from qkv.tokenization.backend import Encoding
from qkv.tokenization.hf import load_tokenizer, load_tokenizers, save_tokenizers
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer


def test_a_folder_without_a_tokeniser_has_none(tmp_path: Path) -> None:
    assert load_tokenizers(put(tmp_path, config={"model_type": "vit"})) is None


def test_bert_frames_a_pair_with_segments_spans_words_and_parts(tmp_path: Path) -> None:
    found = read(bert(tmp_path)).encode_plus("The  cats", "sat")
    assert found == Encoding(
        ids=[2, 5, 6, 7, 3, 8, 3],
        token_type_ids=[0, 0, 0, 0, 0, 1, 1],
        offsets=[(0, 0), (0, 3), (5, 8), (8, 9), (0, 0), (0, 3), (0, 0)],
        word_ids=[None, 0, 1, 1, None, 0, None],
        sequence_ids=[None, 0, 0, 0, None, 1, None],
    )


def test_roles_are_ids_and_what_a_family_lacks_is_none(tmp_path: Path) -> None:
    tokeniser = read(bert(tmp_path))
    assert tokeniser.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert (tokeniser.bos_id, tokeniser.eos_id, tokeniser.cls_id) == (None, None, 2)
    assert tokeniser.ids_to_display([2, 7, 4, 99]) == ["[CLS]", "##s", "[MASK]", "<99>"]


def test_a_mask_is_a_mask_only_on_request(tmp_path: Path) -> None:
    tokeniser = read(bert(tmp_path))
    assert tokeniser.encode("the [MASK]") == [5, 10, 9, 11]
    assert tokeniser.encode_plus("the [MASK]").ids == [2, 5, 10, 9, 11, 3]
    marked = tokeniser.encode_plus("the [MASK]", parse_special_tokens=True)
    assert marked.ids == [2, 5, 4, 3]
    assert (marked.offsets[2], marked.sequence_ids[2]) == ((4, 10), 0)
    assert tokeniser.encode_plus_batch(["[MASK]", ("the", "[MASK]")], parse_special_tokens=True)[1].ids == [
        2,
        5,
        3,
        4,
        3,
    ]


def test_threads_that_read_in_different_ways_do_not_disturb_each_other(tmp_path: Path) -> None:
    tokeniser = read(bert(tmp_path))
    wanted = {special: [2, 5, 4, 3] if special else [2, 5, 10, 9, 11, 3] for special in (True, False)}
    with ThreadPoolExecutor(8) as pool:
        ways = [number % 2 == 0 for number in range(400)]
        found = list(
            pool.map(lambda special: tokeniser.encode_plus("the [MASK]", parse_special_tokens=special).ids, ways)
        )
    assert found == [wanted[special] for special in ways]


def test_given_words_are_counted_as_given(tmp_path: Path) -> None:
    found = read(bert(tmp_path)).encode_pretokenized(["the", "", "cats [", "sat"])
    assert found.word_ids == [None, 0, 2, 2, 2, 3, None]
    assert found.offsets[2:5] == [(0, 3), (3, 4), (5, 6)]


def test_one_of_ours_adds_nothing_and_takes_words_too() -> None:
    tokeniser = train_tokenizer("bpe", ["the cat sat"] * 5, vocab_size=270)
    assert tokeniser.encode_plus("the <s> cat").ids == tokeniser.encode("the <s> cat")
    assert tokeniser.encode_pretokenized(["the", "cat"]).ids == tokeniser.encode(" the cat")
    assert tokeniser.encode_plus("the</s>", parse_special_tokens=True).ids == [
        *tokeniser.encode("the"),
        tokeniser.eos_id,
    ]


@pytest.mark.parametrize("use", ["encode_plus", "encode_plus_batch", "encode_pretokenized"])
def test_a_lone_surrogate_is_refused_before_it_is_framed(use: str, tmp_path: Path) -> None:
    tokeniser = read(bert(tmp_path))
    with pytest.raises(InputError, match="character 2"):
        getattr(tokeniser, use)("a\ud800" if use == "encode_plus" else ["a\ud800"])


ROBERTA, GPT2 = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], ["<|endoftext|>"]


@pytest.mark.parametrize(("specials", "template"), [(ROBERTA, "<s> the </s> </s> the </s>"), (GPT2, "the the")])
def test_bare_byte_level_files_are_told_apart_by_their_special_tokens(
    specials: list[str], template: str, tmp_path: Path
) -> None:
    tokeniser = read(bpe(tmp_path, specials))
    assert tokeniser.ids_to_display(tokeniser.encode_plus("the", "the").ids) == template.split()
    assert tokeniser.bos_id == 0
    assert tokeniser.unk_id == (3 if len(specials) > 1 else None)


@pytest.mark.parametrize("says", ["class", "family"])
def test_the_class_then_the_family_decide_the_template(says: str, tmp_path: Path) -> None:
    bpe(tmp_path, ROBERTA + GPT2)
    if says == "class":
        put(tmp_path, tokenizer_config={"tokenizer_class": "BartTokenizerFast"})
    tokeniser = read(tmp_path, bart.TOKENIZER_TEMPLATE if says == "family" else gpt2.TOKENIZER_TEMPLATE)
    assert tokeniser.ids_to_display(tokeniser.encode_plus("the").ids) == ["<s>", "the", "</s>"]
    assert (tokeniser.pad_id, tokeniser.mask_id) == (1, 4)


def test_a_family_with_another_familys_class_is_cut_as_the_class_cuts(tmp_path: Path) -> None:
    tokeniser = read(bert(tmp_path, tokenizer_class="BertTokenizer"), gpt2.TOKENIZER_TEMPLATE)
    assert tokeniser.encode_plus("The cats").ids == [2, 5, 6, 7, 3]
    (tmp_path / "tokenizer_config.json").unlink()
    must_refuse(tmp_path, "vocab.txt: cannot be read for a family of kind 'byte_bpe'", gpt2.TOKENIZER_TEMPLATE)


def test_files_without_a_family_are_read_by_one_who_knows_the_families_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vocab.json: its special tokens are not those of a known family"):
        load_tokenizers(bpe(tmp_path, ROBERTA))


@pytest.mark.parametrize("name", ["tokenizer.json", "other.json"])
def test_a_tokenizer_json_alone_is_read_whoever_wrote_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    foreign = read(bpe(tmp_path / "in", ROBERTA))
    save_tokenizers(tmp_path, foreign, foreign)
    (tmp_path / "tokenizer.json").rename(tmp_path / "in" / name)
    (tmp_path / "in" / "vocab.json").unlink()
    found = load_tokenizer(tmp_path / "in" / name, families.tokenizer_templates())
    assert (found.special_ids, found.is_native) == (foreign.special_ids, False)
    assert found.encode_plus("the <mask>", parse_special_tokens=True) == foreign.encode_plus(
        "the <mask>", parse_special_tokens=True
    )
    train_tokenizer("whitespace", ["a b"]).save(tmp_path / "ours" / name)
    assert load_tokenizer(tmp_path / "ours" / name, families.tokenizer_templates()).is_native


def test_gpt2_starts_with_its_token_only_where_the_folder_asks_for_it(tmp_path: Path) -> None:
    put(bpe(tmp_path, GPT2), tokenizer_config={"add_bos_token": True})
    assert read(tmp_path).ids_to_display(read(tmp_path).encode_plus("the").ids) == ["<|endoftext|>", "the"]


def test_robertas_mask_takes_the_space_before_it(tmp_path: Path) -> None:
    tokeniser = read(bpe(tmp_path, ROBERTA))
    assert tokeniser.ids_to_display(tokeniser.encode_plus("the <mask>", parse_special_tokens=True).ids) == [
        "<s>",
        "the",
        "<mask>",
        "</s>",
    ]


def test_a_word_bpe_is_recognised_by_its_ends_of_words(tmp_path: Path) -> None:
    names = ["<unk>", *"the", "e</w>", "th", "the</w>"]
    (tmp_path / "merges.txt").write_text("t h\nth e</w>\n", encoding="utf-8")
    tokeniser = read(put(tmp_path, vocab={name: number for number, name in enumerate(names)}))
    assert tokeniser.encode("THE the") == [6, 6]
    assert tokeniser.first_unknown("the x") == "x"
    assert tokeniser.decode([6, 6]) == "the the"


def test_t5_needs_no_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    tokeniser = read(pieces(tmp_path))
    assert tokeniser.ids_to_display(tokeniser.encode_plus("the  cat").ids) == ["␣the", "␣", "c", "a", "t", "</s>"]
    assert (tokeniser.pad_id, tokeniser.eos_id, tokeniser.unk_id, tokeniser.vocab_size) == (0, 1, 2, 115)
    assert tokeniser.first_unknown("the Q") == "Q"


def test_t5_sentinels_come_after_the_pieces_last_one_first(tmp_path: Path) -> None:
    tokeniser = read(pieces(tmp_path))
    assert (tokeniser.token_to_id("<extra_id_0>"), tokeniser.token_to_id("<extra_id_99>")) == (
        tokeniser.vocab_size - 1,
        tokeniser.vocab_size - 100,
    )
    assert tokeniser.token_to_id("<extra_id_100>") is None
    assert tokeniser.decode([tokeniser.vocab_size - 1, *tokeniser.encode("the")]) == "the"
    put(tmp_path, tokenizer_config={"extra_ids": 3})
    assert read(tmp_path).vocab_size == tokeniser.vocab_size - 97


def test_nobody_spells_an_end_in_pieces(tmp_path: Path) -> None:
    tokeniser = read(pieces(tmp_path))
    assert tokeniser.ids_to_display(tokeniser.encode("the </s>")) == ["␣the", "␣", "<", "/", "s", ">"]
    assert tokeniser.encode_plus("the </s>", parse_special_tokens=True).ids.count(tokeniser.eos_id) == 2


def test_nobody_spells_a_special_word_either(tmp_path: Path) -> None:
    names = {"UNK": 0, "MASK": 1, "the": 2}
    tokenizer = HFTokenizer(models.WordLevel(names, unk_token="UNK"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    put(tmp_path, tokenizer_config={"unk_token": "UNK", "mask_token": "MASK"})
    tokeniser = read(tmp_path)
    assert tokeniser.encode("the MASK") == [2, 0]
    assert tokeniser.encode_plus("the MASK", parse_special_tokens=True).ids == [2, 1]
    assert tokeniser.special_ids == {"unk": 0, "mask": 1}


@pytest.mark.parametrize("make", [bert, pieces])
def test_a_foreign_tokeniser_comes_back_whole_from_one_file_and_from_a_pickle(make: object, tmp_path: Path) -> None:
    tokeniser = read(make(tmp_path))  # type: ignore[operator]
    tokeniser.save(tmp_path / "kept.json")
    for copy in (Tokenizer.load(tmp_path / "kept.json"), pickle.loads(pickle.dumps(tokeniser))):
        assert (copy.special_ids, copy.files, copy.is_native) == (tokeniser.special_ids, tokeniser.files, False)
        assert copy.encode_plus("the [MASK] </s>", "the") == tokeniser.encode_plus("the [MASK] </s>", "the")
        assert copy.encode_plus("the [MASK] </s>", parse_special_tokens=True) == tokeniser.encode_plus(
            "the [MASK] </s>", parse_special_tokens=True
        )


@pytest.mark.parametrize(
    "damage", ['{"qkv": 1}', '{"qkv": {"files": {}}, "tokenizer": {}}', '{"qkv": {"files": {"a": "b"}}}']
)
def test_a_damaged_file_of_a_foreign_tokeniser_is_named(damage: str, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(damage, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "kept.json"))):
        Tokenizer.load(tmp_path / "kept.json")


def test_a_file_with_the_roles_of_an_older_qkv_is_refused_in_one_line(tmp_path: Path) -> None:
    read(bpe(tmp_path, ROBERTA)).save(tmp_path / "kept.json")
    written = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    written["qkv"]["roles"]["start"] = written["qkv"]["roles"].pop("bos")
    (tmp_path / "kept.json").write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(InputError, match=r"kept.json: special-token role 'start' is unknown; .*again") as problem:
        Tokenizer.load(tmp_path / "kept.json")
    assert "\n" not in str(problem.value)


def test_what_came_is_written_back_with_a_tokenizer_json_beside_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    tokeniser = read(bert(tmp_path / "in", do_lower_case=False))
    save_tokenizers(tmp_path / "out", tokeniser, pickle.loads(pickle.dumps(tokeniser)))
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"vocab.txt", "tokenizer_config.json", "tokenizer.json"}
    assert all(written[name] == content for name, content in tokeniser.files.items())
    assert read(tmp_path / "out").encode_plus("The cat") == tokeniser.encode_plus("The cat")


def test_a_files_own_padding_and_cutting_are_kept_but_never_done(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_tokenizers(tmp_path, *[read(bert(tmp_path / "in"))] * 2)
    tokenizer = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokeniser = pickle.loads(pickle.dumps(read(tmp_path)))
    assert [len(tokeniser.encode_plus(text).ids) for text in ("the", "the " * 9)] == [3, 11]
    save_tokenizers(tmp_path / "out", tokeniser, tokeniser)
    again = HFTokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert (again.truncation, again.padding) == (tokenizer.truncation, tokenizer.padding)


def test_two_different_tokenisers_do_not_fit_one_folder(tmp_path: Path) -> None:
    one, other = (train_tokenizer("whitespace", [line]) for line in ("a b", "c d"))
    with pytest.raises(InputError, match="source and target differ"):
        save_tokenizers(tmp_path / "out", one, other)
    assert not (tmp_path / "out").exists()


def test_bad_vocabularies_of_bert_are_named(tmp_path: Path) -> None:
    must_refuse(bert(tmp_path, [*BERT, "cat"]), "vocab.txt: line 13 repeats 'cat' of line 7")
    must_refuse(bert(tmp_path, [word for word in BERT if word != "[UNK]"]), r"vocab.txt: has no '\[UNK\]'")
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff\xfe\n")
    must_refuse(tmp_path, "vocab.txt, line 2: byte 0xFF is not UTF-8")


def test_bad_merges_are_named(tmp_path: Path) -> None:
    must_refuse(bpe(tmp_path, GPT2, "#version: 0.2\nt h\nq u\n"), "merges.txt: line 3 names 'qu'")
    must_refuse(bpe(tmp_path, GPT2, "t h e\n"), "merges.txt: line 1 is not two tokens")
    must_refuse(bpe(tmp_path, []), "vocab.json: its special tokens are not those of a known family")
    put(tmp_path, vocab={"a": 0, "b": 0})
    must_refuse(tmp_path, "vocab.json: two tokens share an id")
    put(tmp_path, vocab=["a"])
    must_refuse(tmp_path, "vocab.json: not a table")
    (tmp_path / "merges.txt").unlink()
    must_refuse(tmp_path, "has vocab.json but no merges.txt")


def test_bad_pieces_are_named(tmp_path: Path) -> None:
    content = spm(("a", -1.0, 1))
    settings = content.index(field(2, varint(3 << 3) + varint(1)))
    for end in (0, 3, settings // 2, settings, len(content) - 1):
        must_refuse(pieces(tmp_path, content[:end]), "spiece.model: .*copy it again")
    must_refuse(pieces(tmp_path, spm(kind=2)), "not a unigram one")
    must_refuse(pieces(tmp_path, spm(("<0x00>", 0.0, 6))), "single bytes")
    must_refuse(pieces(tmp_path, spm(charsmap=b"123")), "character map is damaged")
    put(pieces(tmp_path), tokenizer_config={"extra_ids": -1})
    must_refuse(tmp_path, "'extra_ids' is -1")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"model": 3}'])
def test_a_damaged_tokenizer_json_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    must_refuse(tmp_path, "tokenizer.json(: damaged|, column 1: not JSON|, line 1: byte 0xFF)")


def test_a_damaged_table_of_characters_in_a_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "::"}, "model": {}}), encoding="utf-8"
    )
    must_refuse(tmp_path, "tokenizer.json: its character map is damaged")


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"tokenizer_config": {"tokenizer_class": "BertJapaneseTokenizer"}}, "'BertJapaneseTokenizer' tokenizer"),
        ({"tokenizer_config": {"do_lower_case": "no"}}, "'do_lower_case' is 'no'"),
        ({"tokenizer_config": {"pad_token": 3}}, "3 is not a token"),
        ({"tokenizer_config": {"additional_special_tokens": "x"}}, "is not a list"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "not a table of tokens"),
        ({"tokenizer_config": [1]}, "not a JSON object"),
        ({"added_tokens": {"new": 40}}, "adds 'new' with id 40, but the vocabulary gives it 12"),
        ({"added_tokens": {"new": "x"}}, "added_tokens.json: not a table"),
    ],
)
def test_what_the_files_beside_a_vocabulary_say_wrong_is_named(
    tables: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    must_refuse(put(bert(tmp_path), **tables), complaint)


def test_a_vocabulary_of_another_kind_than_the_familys_is_refused(tmp_path: Path) -> None:
    must_refuse(bert(tmp_path), "vocab.txt: cannot be read for a family of kind 'unigram'", t5.TOKENIZER_TEMPLATE)
