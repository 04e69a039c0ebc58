"""qkv tokenizer train and show, as a person types them."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qkv import families
from qkv.tokenization.hf import load_tokenizers
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from checkpoints import checkpoint

Run = Callable[..., tuple[int, str, str]]
LINES = ["the cat sat on the mat", "The dog sat on a log", "a naïve café in Zürich"] * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return tmp_path / "text.txt"


def read(folder: Path) -> Tokenizer:
    found = load_tokenizers(folder)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("family", ["bert", "roberta", "bart", "gpt", "gpt2", "t5"])
def test_train_for_a_family_writes_the_tokeniser_that_the_library_trains(
    run: Run, text: Path, tmp_path: Path, family: str
) -> None:
    code, out, err = run("tokenizer", "train", text, "--family", family, "--vocab-size", "300", "-o", tmp_path / "out")
    template = families.get_family(family).TOKENIZER_TEMPLATE
    assert (code, err) == (0, "")
    assert template.kind in out
    same = train_tokenizer(template.kind, LINES, vocab_size=300, template=template)
    made = read(tmp_path / "out")
    assert (made.special_ids, made.vocab_size) == (same.special_ids, same.vocab_size)
    assert made.encode_plus("the cat", "a dog") == same.encode_plus("the cat", "a dog")


@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe", "word_bpe", "unigram"])
def test_train_of_a_kind_has_the_usual_four_special_tokens(run: Run, text: Path, tmp_path: Path, kind: str) -> None:
    assert run("tokenizer", "train", text, "--kind", kind, "--vocab-size", "300", "-o", tmp_path / "out")[0] == 0
    made = read(tmp_path / "out")
    assert made.special_ids == {"pad": 0, "unk": 1, "bos": 2, "eos": 3}
    assert made.encode_plus("the cat").ids == made.encode("the cat")


def test_train_reads_packed_files_and_json_lines_alike(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress(text.read_bytes()))
    rows = "".join(json.dumps({"body": line, "n": 1}) + "\n" for line in LINES)
    (tmp_path / "text.jsonl").write_text(rows, encoding="utf-8")
    written = []
    for name, *options in (["text.txt"], ["text.gz"], ["text.jsonl", "--text-field", "body"]):
        folder = tmp_path / f"out-{name}"
        words = [
            "tokenizer",
            "train",
            tmp_path / name,
            "--family",
            "bert",
            "--vocab-size",
            "120",
            "-o",
            folder,
            *options,
        ]
        assert run(*words)[0] == 0
        written.append((folder / "tokenizer.json").read_bytes())
    assert written[0] == written[1] == written[2]


def test_train_takes_several_files_in_any_order(run: Run, tmp_path: Path) -> None:
    for number, line in enumerate(LINES[:3]):
        (tmp_path / f"{number}.txt").write_text(f"{line}\n", encoding="utf-8")
    written = []
    for order in ("012", "210"):
        files = [tmp_path / f"{number}.txt" for number in order]
        assert (
            run("tokenizer", "train", *files, "--family", "bert", "--vocab-size", "90", "-o", tmp_path / order)[0] == 0
        )
        written.append((tmp_path / order / "tokenizer.json").read_bytes())
    assert written[0] == written[1]


def test_train_can_keep_capitals(run: Run, text: Path, tmp_path: Path) -> None:
    words = ["tokenizer", "train", text, "--family", "bert", "--vocab-size", "120"]
    assert run(*words, "-o", tmp_path / "small")[0] == 0
    assert run(*words, "--cased", "-o", tmp_path / "cased")[0] == 0
    assert read(tmp_path / "small").encode("The") == read(tmp_path / "small").encode("the")
    assert read(tmp_path / "cased").encode("The") != read(tmp_path / "cased").encode("the")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vocab-size", "300"], "give --family (such as bert) or --kind"),
        (["--vocab-size", "300", "--kind", "unigram", "--family", "bert"], "and not both"),
        (
            ["--vocab-size", "300", "--kind", "bpe"],
            "--kind must be wordpiece, byte_bpe, word_bpe, unigram, word or spelled_word, not 'bpe'",
        ),
        (["--vocab-size", "300", "--family", "birt"], "did you mean 'bert'?"),
        (["--vocab-size", "300", "--family", "rnn"], "'rnn' has no tokenizer template"),
        (["--vocab-size", "300", "--family", "marian"], "which qkv cannot train"),
        (["--vocab-size", "10", "--family", "bert"], "too small for the letters of this text"),
        (["--vocab-size", "100", "--family", "gpt2"], "set the size to 257 or more"),
        (["--vocab-size", "many", "--family", "gpt2"], "'--vocab-size'"),
        (["--family", "gpt2"], "--vocab-size"),
    ],
)
def test_train_refuses_in_one_line_and_writes_nothing(
    run: Run, text: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    code, out, err = run("tokenizer", "train", text, *words, "-o", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nowhere.txt", None, "nowhere.txt: no such file"),
        ("empty.txt", b"\n \n", "no text to train"),
        ("latin.txt", "caf\u00e9\n".encode("latin-1"), "latin.txt:1: byte 4 of the line, 0xE9, is not UTF-8"),
        ("cut.gz", gzip.compress(b"the cat " * 999, mtime=0)[:-9], "cut.gz"),
        ("rows.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "rows.jsonl:2: no field 'text'"),
        ("rows.jsonl", b"the cat\n", "not JSON"),
    ],
)
def test_train_names_the_file_that_cannot_be_read(
    run: Run, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    words = ["tokenizer", "train", tmp_path / name, "--family", "bert", "--vocab-size", "300", "-o", tmp_path / "out"]
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "out").exists()


def test_train_does_not_write_over_a_folder(run: Run, text: Path, tmp_path: Path) -> None:
    code, _, err = run("tokenizer", "train", text, "--family", "bert", "--vocab-size", "120", "-o", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "already exists" in err


def test_show_prints_each_token_with_its_id_and_characters(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("tokenizer", "show", checkpoint(tmp_path / "model"), "The  unhappy cat", "--text-pair", "dog?")
    assert code == 0
    rows = [line.split(maxsplit=3) for line in out.splitlines()]
    assert rows[0] == ["token", "id", "token_type_id", "characters"]
    assert rows[1] == ["[CLS]", "2", "0"]
    assert rows[2] == ["the", "10", "0", "0-3 'The'"]
    assert rows[4] == ["##happy", "13", "0", "7-12 'happy'"]
    assert rows[6] == ["[SEP]", "3", "0"]
    assert rows[7] == ["dog", "7", "1", "0-3 'dog'"]
    assert out.splitlines()[-1] == "9 tokens of 15, 1 unknown"


def test_show_prints_json(run: Run, tmp_path: Path) -> None:
    words = ["tokenizer", "show", checkpoint(tmp_path / "model"), "the [MASK] sat", "--parse-special-tokens", "--json"]
    found = json.loads(run(*words)[1])
    assert (found["text"], found["text_pair"], found["vocab_size"]) == ("the [MASK] sat", None, 15)
    assert [row["token"] for row in found["tokens"]] == ["[CLS]", "the", "[MASK]", "sat", "[SEP]"]
    mask = found["tokens"][2]
    assert (mask["id"], mask["start"], mask["end"], mask["characters"], mask["sequence_id"]) == (4, 4, 10, "[MASK]", 0)
    assert found["tokens"][0]["characters"] is None


def test_show_reads_a_trained_folder_a_file_of_ours_and_a_foreign_one(run: Run, text: Path, tmp_path: Path) -> None:
    run("tokenizer", "train", text, "--family", "roberta", "--vocab-size", "300", "-o", tmp_path / "out")
    made = read(tmp_path / "out")
    made.save(tmp_path / "ours.json")
    (tmp_path / "bare.json").write_bytes((tmp_path / "out" / "tokenizer.json").read_bytes())
    wanted = [made.backend.id_to_token(number) for number in made.encode_plus("the cat").ids]
    for name in ("out", "ours.json", "bare.json", "out/tokenizer.json"):
        code, out, err = run("tokenizer", "show", tmp_path / name, "the cat", "--json")
        assert (code, err) == (0, "")
        assert [row["token"] for row in json.loads(out)["tokens"]] == wanted


def test_show_tells_source_and_target_of_a_run_apart(run: Run, tmp_path: Path) -> None:
    for side, line in (("source", "abc"), ("target", "xyz")):
        train_tokenizer("character", [line]).save(tmp_path / "run" / f"{side}.tokenizer.json")
    shown = [run("tokenizer", "show", tmp_path / "run", "ax", *options)[1] for options in ([], ["--target"])]
    assert [out.splitlines()[-1] for out in shown] == ["2 tokens of 7, 1 unknown"] * 2
    assert "'a'" in shown[0].splitlines()[1]
    assert shown[1].splitlines()[1].startswith("<unk>")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("./nowhere", None, "no such folder"),
        ("folder", None, "has no tokenizer"),
        ("bad.json", "{", "bad.json, column 2: not JSON"),
    ],
)
def test_show_refuses_in_one_line(run: Run, tmp_path: Path, name: str, content: str | None, said: str) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_text(content)
    code, out, err = run("tokenizer", "show", tmp_path / name if "/" not in name else name, "the cat")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_show_refuses_half_a_character(run: Run, tmp_path: Path) -> None:
    code, out, err = run("tokenizer", "show", checkpoint(tmp_path / "model"), "a\udc80")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "lone surrogate" in err
