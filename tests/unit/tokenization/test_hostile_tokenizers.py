"""Tokenizers that would panic, multiply texts or name ids that no model has are refused in one line when loaded."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import BERT, bert, must_refuse, put, read, spm

from qkv.errors import InputError
from qkv.tokenization.backend import FastBackend
from qkv.tokenization.checks import check_charsmap
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer


def content(**changes: Any) -> dict[str, Any]:
    """Return the content of a small tokenizer.json with other components."""
    vocabulary = {token: number for number, token in enumerate(BERT)}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocabulary}
    plain: dict[str, Any] = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    plain["model"] = model | {"max_input_chars_per_word": 100} | changes.pop("model", {})
    return plain | {"post_processor": None, "decoder": None} | changes


def replace(pattern: dict[str, str], text: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": text}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(type_id: Any) -> dict[str, Any]:
    parts = [{"Sequence": {"id": "A", "type_id": type_id}}]
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {}}


def added(name: str, key: str, token_id: int) -> dict[str, Any]:
    """Return a template that adds a special token to pairs only."""
    pair = [*template(0)["pair"], {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special_tokens = {key: {"id": key, "ids": [token_id], "tokens": [key]}}
    return template(0) | {"pair": pair, "special_tokens": special_tokens}


TWICE = replace({"String": "a"}, "aa")


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"model": {"unk_token": "[GONE]"}}, r"cannot encode texts \(.*Missing \[UNK\] token"),
        (
            {"normalizer": replace({"String": "a"}, "a" * 900)},
            "900 times longer; .*QKV_LIMIT_TEXT_GROWTH",
        ),
        ({"normalizer": replace({"Regex": ""}, "a" * 99)}, "100 times longer"),
        ({"normalizer": sequence(*[TWICE] * 60)}, "billions of times longer"),
        ({"normalizer": replace({"String": "a"}, "a" * 10**6)}, "'content' has 1,000,000 characters"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "'prepend' has 1,000,000 characters"),
        ({"pre_tokenizer": split("(a+)+$")}, "cannot encode texts"),
        ({"pre_tokenizer": split("(")}, "damaged or not a tokenizer.json"),
        ({"model": {"max_input_chars_per_word": 10**9}}, "max_input_chars_per_word is 1000000000"),
        ({"model": {"vocab": {"a": 0, "[UNK]": 2**40}}}, "a token has the id 1099511627776; the limit is 16,777,216"),
        ({"model": {"vocab": {"a": "x"}}}, "an id of its vocabulary is not a number"),
        ({"added_tokens": [{"id": 2**31, "content": "x"}]}, "a token has the id 2147483648"),
        ({"post_processor": template(10**9)}, "type_id is 1000000000; it is a number from 0 to 9"),
        (
            {"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3000], "cls": ["[CLS]", 2]}},
            "adds the id 3000",
        ),
        ({"post_processor": added("[SEP]", "[SEP]", 3000)}, "adds the id 3000, which is not one of its 12 ids"),
        ({"post_processor": added("[SEP]", "[GONE]", 3)}, "damaged or not a tokenizer.json|cannot encode texts"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "character map is damaged"),
        ({"model": {"type": "Nothing"}}, "damaged or not a tokenizer.json"),
    ],
)
def test_a_hostile_tokenizer_json_is_refused_without_a_panic(
    changes: dict[str, Any], pattern: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, tokenizer=content(**changes))
    must_refuse(tmp_path, pattern)
    assert capfd.readouterr().err == ""
    with pytest.raises(InputError, match=pattern):
        Tokenizer.load(tmp_path / "tokenizer.json")
    assert capfd.readouterr().err == ""


def test_the_plain_tokenizer_json_of_these_tests_is_read(tmp_path: Path) -> None:
    assert read(put(tmp_path, tokenizer=content())).encode("the") == [BERT.index("the")]


def test_a_panic_while_a_text_is_encoded_is_one_line(tmp_path: Path) -> None:
    # the expression fails only for a run of a letter that the trial texts do not have
    tokenizer = read(put(tmp_path, tokenizer=content(pre_tokenizer=split("(q+)+$"))))
    with pytest.raises(InputError, match="the tokenizer cannot process it") as problem:
        tokenizer.encode("q" * 40 + "!")
    assert "\n" not in str(problem.value)


def test_the_size_of_a_vocabulary_with_missing_ids_is_its_largest_id_plus_one(tmp_path: Path) -> None:
    vocabulary = {token: number for number, token in enumerate(BERT)} | {"cat": 500}
    assert read(put(tmp_path, tokenizer=content(model={"vocab": vocabulary}))).vocab_size == 501


def test_a_role_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    read(bert(tmp_path)).save(path)
    raw_json = json.loads(path.read_text())
    for bad_id in (10**9, -1, "3", None, 1.0):
        raw_json["qkv"]["roles"]["pad"] = bad_id
        path.write_text(json.dumps(raw_json))
        with pytest.raises(InputError, match=r"the role 'pad' has the id .*, which is not one of its 12 ids"):
            Tokenizer.load(path)


def test_a_compressed_bomb_in_a_tokenizer_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    read(bert(tmp_path)).save(path)
    raw_json = json.loads(path.read_text())
    raw_json["qkv"]["files"]["vocab.txt"] = base64.b64encode(zlib.compress(bytes(10**6))).decode()
    path.write_text(json.dumps(raw_json))
    monkeypatch.setenv("QKV_LIMIT_CONFIG_BYTES", "100000")
    with pytest.raises(InputError, match="a file in it has too many bytes"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("vocabulary", "pattern"),
    [({"</s>": 0, "<unk>": 2**40}, "a token has the id 1099511627776"), ({"</s>": -1}, "one is below 0")],
)
def test_huge_and_negative_ids_of_a_vocab_json_are_refused(
    vocabulary: dict[str, int], pattern: str, tmp_path: Path
) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    must_refuse(put(tmp_path, vocab=vocabulary), pattern)


def test_more_sentinels_than_a_vocabulary_can_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(spm(("▁", -3.0, 1)))
    must_refuse(put(tmp_path, tokenizer_config={"extra_ids": 10**12}), "'extra_ids' is 1000000000000; make it a count")


@pytest.mark.parametrize(
    "units", [[1 << 30], [0xFFFFFFFF], [(300 << 10) | 0x100] + [0] * 255, [0x100] + [0x80000000 | 10**6] * 255, []]
)
def test_a_character_map_that_points_outside_of_itself_is_refused(units: list[int]) -> None:
    trie = struct.pack(f"<{len(units)}I", *units)
    with pytest.raises(InputError, match="character map is damaged"):
        check_charsmap(struct.pack("<I", len(trie)) + trie + b"x\0", "file")


def test_native_tokenizers_pass_the_checks_of_foreign_ones(tmp_path: Path) -> None:
    for kind in ("character", "whitespace", "bpe"):
        tokenizer = train_tokenizer(kind, ["the cat sat"], vocab_size=300)
        assert isinstance(tokenizer.backend, FastBackend)
        tokenizer.save(tmp_path / "a.json")
        assert Tokenizer.load(tmp_path / "a.json").encode("the cat") == tokenizer.encode("the cat")


@pytest.mark.parametrize(
    "content", [b"\xff" * 10**6, spm(("a", float("nan"), 1)), spm(("a", float("inf"), 1)), b"\0" * 99]
)
def test_numbers_without_end_or_value_in_a_sentencepiece_model_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(content)
    must_refuse(tmp_path, "spiece.model: (damaged or not a|not a complete) SentencePiece model")
