"""Parallel text and summaries: two columns, two files, several references."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_files import json_lines, refused, written

from qkv.data.formats import read
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError


def test_parallel_text_is_read_out_of_two_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "deu.txt", "Go.\tGeh.\nHi!\tHallo!\n")
    pairs = read("parallel", path, columns={"source": "1", "target": "2"}, header=False)
    assert pairs == [Pair("Go.", "Geh.", f"{path}:1"), Pair("Hi!", "Hallo!", f"{path}:2")]


def test_aligned_files_are_read_line_by_line_and_skipped_in_pairs(tmp_path: Path) -> None:
    sources = written(tmp_path / "a.en", b"one\nt\xe9o\nthre\xc3\xa9\nfour\n")
    targets = written(tmp_path / "a.de", "ein\nzwei\n\nvier\n")
    refused(f"{sources}:2", "0xE9, is not UTF-8", "aligned", sources, targets=str(targets))
    pairs = read("aligned", sources, targets=str(targets), skip_bad=True)
    assert [(pair.source, pair.target) for pair in pairs] == [("one", "ein"), ("four", "vier")]
    assert [said.partition(": ")[0] for said in pairs.skipped] == [f"{sources}:2", f"{targets}:3"]


def test_aligned_files_need_as_many_lines(tmp_path: Path) -> None:
    sources, targets = written(tmp_path / "a.en", "one\ntwo\n"), written(tmp_path / "a.de", "ein\n")
    with pytest.raises(InputError, match=f"^{sources} has 2 lines and {targets} has 1; aligned files need"):
        read("aligned", sources, targets=str(targets), skip_bad=True)


def test_scitldr_joins_the_sentences_and_keeps_every_reference(tmp_path: Path) -> None:
    record = {"source": ["We do.", "It works."], "source_labels": [0, 1], "rouge_scores": [0.1, 0.2]}
    record |= {"paper_id": "x", "target": ["It works.", "We do it.", "It works."], "title": "T"}
    path = json_lines(tmp_path / "dev.jsonl", record)
    expected = SourceWithReferences("We do. It works.", ("It works.", "We do it."), f"{path}:1")
    assert read("scitldr", tmp_path, split="dev") == [expected]


def test_summaries_are_read_out_of_any_table(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.csv", 'article,highlights\n"Long\ntext.",Short.\n')
    columns = {"source": "article", "target": "highlights"}
    assert read("summaries", path, columns=columns) == [SourceWithReferences("Long\ntext.", ("Short.",), f"{path}:2")]


def test_a_document_without_a_summary_is_named(tmp_path: Path) -> None:
    good = {"document": "a", "summary": ["b"]}
    path = json_lines(tmp_path / "a.jsonl", good, {"document": "a", "summary": [" "]}, {"document": "", "summary": "b"})
    refused(f"{path}:2", "the column 'summary' is empty", "summaries", path)
    assert [said.partition(": ")[0] for said in read("summaries", path, skip_bad=True).skipped] == [
        f"{path}:2",
        f"{path}:3",
    ]
