"""`qkv predict` and `qkv embed` of files: the name decides how they are read, and the rows of the input are kept."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))
sys.path.append(str(Path(__file__).parents[1] / "tasks"))
sys.path.append(str(Path(__file__).parent))
import yaml
from reviews import reviews, write_model, write_reviews
from task_models import model
from test_cli import must_refuse, qkv

from qkv import save
from qkv.cli.stdin_lines import StdinLines
from qkv.errors import InputError
from qkv.tasks import get_task

TRAIN = {"max_steps": 1, "batch_tokens": 64, "learning_rate": 0.1}


def write_run(folder: Path, task: str, labels: tuple[str, ...], data: dict[str, Any], **settings: Any) -> Path:
    """A run of a task that was never trained: prediction needs no more than its files."""
    save(model(get_task(task, **settings), labels), folder)
    recipe = {"model": {"init_from": "none"}, "task": {"name": task, **settings}, "data": data, "train": TRAIN}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    data = {"format": "csv", "train": "train.csv", "columns": {"text": "review", "label": "stars"}}
    write_run(folder / "stars", "text_classification", ("1", "5"), data)
    write_run(folder / "tagger", "token_classification", ("O", "B-PER", "I-PER"), {"format": "conll", "train": "x"})
    write_run(folder / "answers", "question_answering", ("start", "end"), {"format": "squad", "train": "x"})
    write_reviews(folder / "dev.csv", 20, [('a "quoted"; cell, and\na line', "5")])
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def test_a_table_is_read_by_the_columns_of_the_run_without_any_option(home: Path) -> None:
    done = qkv("predict", home / "stars", "--file", home / "dev.csv", "--json")
    assert done.returncode == 0, done.stderr
    inputs = [json.loads(line)["input"] for line in done.stdout.splitlines()]
    assert inputs == [row["review"] for row in rows_of(home / "dev.csv")]


@pytest.mark.parametrize("name", ["dev.tsv", "dev.jsonl", "dev.parquet"])
def test_other_tables_are_read_by_their_suffix_with_the_same_columns(home: Path, tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / name, [{"review": text, "n": index} for index, (text, _) in enumerate(reviews(5))]
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text("review\tn\n" + "".join(f"{row['review']}\t{row['n']}\n" for row in rows))
    done = qkv("predict", home / "stars", "--file", path, "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["input"] for line in done.stdout.splitlines()] == [row["review"] for row in rows]


def test_semicolons_and_latin_1_need_no_option(home: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.csv").write_bytes("review;stars\ncafé tea;5\nbad, sad tea;1\n".encode("latin-1"))
    done = qkv("predict", home / "stars", "--file", tmp_path / "dev.csv", "--json")
    assert [json.loads(line)["input"] for line in done.stdout.splitlines()] == ["café tea", "bad, sad tea"]


def test_a_file_with_another_delimiter_than_the_run_s_is_read_and_noted(tmp_path: Path) -> None:
    data = {"format": "csv", "train": "x.csv", "delimiter": ",", "columns": {"text": "review", "label": "stars"}}
    write_run(tmp_path / "commas", "text_classification", ("1", "5"), data)
    (tmp_path / "dev.csv").write_text("review;stars\nbad, sad tea;1\n")
    done = qkv("predict", tmp_path / "commas", "--file", tmp_path / "dev.csv", "--json")
    assert [json.loads(line)["input"] for line in done.stdout.splitlines()] == ["bad, sad tea"]
    assert "dev.csv: delimiter ';' (detected)" in done.stderr


def test_text_files_and_format_lines_have_one_text_per_line(home: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("review,stars\nbad tea\n")
    (tmp_path / "in.csv").write_text("review,stars\nbad tea\n")
    for words in (("--file", tmp_path / "in.txt"), ("--file", tmp_path / "in.csv", "--format", "lines")):
        done = qkv("predict", home / "stars", *words, "--json")
        assert [json.loads(line)["input"] for line in done.stdout.splitlines()] == ["review,stars", "bad tea"]


def test_embed_gives_one_vector_per_row_of_a_table(home: Path, tmp_path: Path) -> None:
    done = qkv("embed", home / "stars", "--file", home / "dev.csv", "-o", tmp_path / "v.jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [(row["review"], row["stars"]) for row in rows] == [tuple(r.values()) for r in rows_of(home / "dev.csv")]
    assert {len(row["vector"]) for row in rows} == {32}
    qkv("embed", home / "stars", "--file", home / "dev.csv", "-o", tmp_path / "v.csv")
    assert list(rows_of(tmp_path / "v.csv")[0])[:3] == ["review", "stars", "vector_1"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ".txt"])
def test_a_file_of_predictions_keeps_the_columns_and_the_order_of_the_input(
    home: Path, tmp_path: Path, suffix: str
) -> None:
    output = tmp_path / f"out{suffix}"
    done = qkv("predict", home / "stars", "--file", home / "dev.csv", "-o", output)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}: 21 predictions\n"
    printed = qkv("predict", home / "stars", "--file", home / "dev.csv").stdout.splitlines()
    if suffix == ".txt":
        assert output.read_text().splitlines() == printed
        return
    if suffix == ".parquet":
        rows = pytest.importorskip("pyarrow.parquet").read_table(output).to_pylist()
    elif suffix == ".jsonl":
        rows = [json.loads(line) for line in output.read_text().splitlines()]
    else:
        rows = rows_of(output)
    assert list(rows[0]) == ["review", "stars", "prediction", "probability"]
    assert [row["prediction"] for row in rows] == printed
    reviews_read = [row["review"] for row in rows_of(home / "dev.csv")]
    expected = [" ".join(text.split()) for text in reviews_read] if suffix == ".tsv" else reviews_read
    assert [row["review"] for row in rows] == expected


def test_a_file_of_predictions_appears_when_it_is_complete(home: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("review,stars\n" + "bad tea,1\n" * 70 + ",1\n")
    (tmp_path / "out.csv").write_text("old")
    must_refuse(
        qkv("predict", home / "stars", "--file", tmp_path / "bad.csv", "-o", tmp_path / "out.csv"), "bad.csv:72"
    )
    assert (tmp_path / "out.csv").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "out.csv"]
    done = qkv("predict", home / "stars", "--file", tmp_path / "bad.csv", "-o", tmp_path / "out.csv", "--skip-bad")
    assert len(rows_of(tmp_path / "out.csv")) == 70
    assert "1 bad example was skipped" in done.stderr


def test_a_column_with_the_name_of_the_prediction_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("review,prediction\nbad tea,x\n")
    words = ("predict", home / "stars", "--file", tmp_path / "in.csv", "-o")
    must_refuse(qkv(*words, tmp_path / "out.csv"), "in.csv:2", "'prediction'", "rename")
    must_refuse(qkv(*words, tmp_path / "in.csv"), "is the input file")
    must_refuse(qkv(*words, tmp_path / "out.xlsx"), "should end in .csv")


def test_our_own_predictions_can_be_scored_for_labels_tags_and_answers(home: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.conll").write_text("king O\nof B-PER\nspain I-PER\n\nthe O\nhouse O\n")
    questions = [
        {"id": f"q{i}", "question": "where ?", "answers": [{"text": "tea", "answer_start": 2}]} for i in (1, 2)
    ]
    squad = {"data": [{"title": "", "paragraphs": [{"context": "a tea with bees", "qas": questions}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(squad))
    cases = [
        ("stars", home / "dev.csv", ("-m", "accuracy", "--ref-column", "stars"), 21),
        ("tagger", tmp_path / "dev.conll", ("-m", "token_accuracy"), 2),
        ("answers", tmp_path / "dev.json", ("-m", "squad"), 2),
    ]
    for run, data, options, count in cases:
        values = []
        (tmp_path / "out.json.jsonl").write_text(qkv("predict", home / run, "--file", data, "--json").stdout)
        for suffix in ("jsonl", "csv", "tsv", "parquet"):
            assert qkv("predict", home / run, "--file", data, "-o", tmp_path / f"out.{suffix}").returncode == 0
        for name in ("out.json.jsonl", "out.jsonl", "out.csv", "out.tsv", "out.parquet"):
            words = ("--hyp", tmp_path / name, "--ref", data, "--num-resamples", 0, "--json")
            done = qkv("score", *options, *words)
            assert done.returncode == 0, (run, name, done.stderr)
            assert json.loads(done.stdout)["examples"] == count
            values.append(json.loads(done.stdout)["metrics"])
        assert values == values[:1] * len(values), run


def test_truncation_of_a_prompt_leaves_room_for_the_new_tokens(tmp_path: Path) -> None:
    decoder, prompt = write_model("gpt2", tmp_path / "gpt2"), "good tea " * 60
    must_refuse(qkv("predict", decoder, prompt), "--on-too-long truncate")
    words = ("predict", decoder, prompt, "--on-too-long", "truncate", "--json")
    texts = [json.loads(qkv(*words, "--max-new-tokens", number).stdout)["text"] for number in (1, 8)]
    given, shorter = (text[: len(prompt)] for text in texts)
    assert given[:40] in prompt  # the end of the prompt, which begins at any of its tokens
    assert all(len(text) < len(prompt) for text in texts)
    assert given != shorter  # the more is generated, the less of the prompt is read


# ---- pipes ----------------------------------------------------------------------------------------------------------


def test_a_slow_pipe_is_answered_line_by_line(home: Path) -> None:
    command = [sys.executable, "-m", "qkv.cli", "predict", str(home / "stars"), "-", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in (b"bad tea\n", b"good tea\n", b"a cat\n"):
            process.stdin.write(text)
            process.stdin.flush()
            assert process.stdout.readline().strip() in (b"1", b"5")  # before the next line is sent
        process.stdin.close()
        assert process.wait(30) == 0


def test_lines_that_have_arrived_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reader))
    lines = StdinLines()
    os.write(writer, b"\xef\xbb\xbfa\nb\r\nc")
    assert lines.take(10) == [("stdin:1", b"a"), ("stdin:2", b"b\r")]
    os.write(writer, b"d\ne\nf\n")
    assert lines.take(2) == [("stdin:3", b"cd"), ("stdin:4", b"e")]
    assert lines.take(10) == [("stdin:5", b"f")]
    os.write(writer, b"end")
    os.close(writer)
    assert lines.take(10) == [("stdin:6", b"end")]
    assert lines.take(10) == []


def test_a_line_of_stdin_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_LIMIT_LINE_BYTES", "10")
    monkeypatch.setattr(sys, "stdin", io.StringIO("short\n" + "x" * 100))
    with pytest.raises(InputError, match=r"stdin:2: .*QKV_LIMIT_LINE_BYTES"):
        StdinLines().take(10)
