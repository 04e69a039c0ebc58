"""`qkv data build`, as a person types it."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qkv.data.corpora.shards import Shards
from qkv.families import bert
from qkv.tokenization.hf import save_tokenizers
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer

Run = Callable[..., tuple[int, str, str]]
TEXT = "The cat sat.\nIt slept!\n\nA dog ran.\n\nNobody saw it.\nNot one.\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(TEXT.encode()))
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "tokeniser.json"
    train_tokenizer("bpe", [TEXT], vocab_size=280).save(path)
    return path


def test_build_says_documents_tokens_and_speed(run: Run, text: Path, saved: Path, tmp_path: Path) -> None:
    code, out, err = run(
        "data", "build", text, "--tokenizer", saved, "--format", "blank_line_separated", "-o", tmp_path / "out"
    )
    assert (code, err) == (0, "")
    shards = Shards(tmp_path / "out", Tokenizer.load(saved))
    assert out.startswith(f"{tmp_path / 'out'}: 3 documents, {shards.tokens} tokens, 1 shards; ")
    assert out.endswith(" tokens/s\n")
    assert len(shards.sentences(0)) == 2
    assert [source["size"] for source in shards.meta["files"]] == [text.stat().st_size]
    again = run("data", "build", text, "--tokenizer", saved, "--format", "blank_line_separated", "-o", tmp_path / "out")
    assert again[1].endswith("; already built\n")


def test_a_terminal_sees_a_bar(
    run: Run, text: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run("data", "build", text, "-t", saved, "--format", "blank_line_separated", "-o", tmp_path / "out")
    assert code == 0
    assert f"3 documents, {Shards(tmp_path / 'out').tokens} tokens" in err


def test_a_folder_in_hugging_faces_format_is_a_tokenizer(run: Run, text: Path, tmp_path: Path) -> None:
    tokeniser = train_tokenizer("wordpiece", [TEXT], vocab_size=100, template=bert.TOKENIZER_TEMPLATE)
    save_tokenizers(tmp_path / "bert", tokeniser, tokeniser)
    words = ("data", "build", text, "-t", tmp_path / "bert", "--format", "line_per_document", "-o", tmp_path / "out")
    assert run(*words, "--num-workers", "2", "--shard-tokens", "5")[0] == 0
    shards = Shards(tmp_path / "out", tokeniser)
    assert [tokeniser.decode(shards.document(number).tolist()) for number in (0, 2)] == ["the cat sat.", "a dog ran."]
    assert len(shards.meta["shards"]) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "line"), "format 'line' is unknown; known: "),
        ((), "the file name does not determine the format"),
        (("--format", "jsonl"), "text.txt.gz:1: "),
        (("--format", "line_per_document", "--num-workers", "-1"), "--num-workers must be 0 or more, not -1"),
        (("--format", "line_per_document", "--shard-tokens", "0"), "shard_tokens is 0"),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, text: Path, saved: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    code, out, err = run("data", "build", text, "-t", saved, "-o", tmp_path / "out", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_a_missing_tokenizer_is_one_line(run: Run, text: Path, tmp_path: Path) -> None:
    code, _, err = run(
        "data", "build", text, "-t", tmp_path / "no", "--format", "line_per_document", "-o", tmp_path / "out"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "out").exists()
