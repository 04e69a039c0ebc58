"""qkv prompt: what it prints, and for every slip one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_cli import must_refuse, qkv

from qkv import ModelBundle, build, save
from qkv.families import gpt2
from qkv.tokenization.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 and two files of reviews."""
    folder = tmp_path_factory.mktemp("prompt")
    rows = [("a good film", "pos"), ("a bad film", "neg"), ("so good", "pos"), ("no good", "neg"), ("fine", "pos")]
    for name, some in (("train", rows), ("test", [*rows[2:], ("as bad as it gets", "neg")])):
        lines = "".join(f"{text},{mood}\n" for text, mood in some)
        (folder / f"{name}.csv").write_text(f"review,mood\n{lines}")
    tokeniser = train_tokenizer(
        "byte_bpe", [text for text, _ in rows] * 5, vocab_size=280, template=gpt2.TOKENIZER_TEMPLATE
    )
    torch.manual_seed(4)
    shape = gpt2.Config(d_model=16, heads=2, layers=1, max_length=200, init_std=0.3)
    save(
        ModelBundle(build(gpt2.make_spec(shape, target_vocab_size=tokeniser.vocab_size)), tokeniser, tokeniser),
        folder / "gpt2",
    )
    return folder


def prompt(home: Path, *words: object):
    columns = ("--text", "review", "--label", "mood")
    return qkv("prompt", home / "gpt2", "--data", home / "test.csv", *columns, *words)


def test_it_prints_accuracy_and_f1_with_intervals(home):
    done = prompt(home, "--shots", 2, "--train", home / "train.csv", "--template", r"Review: {text}\nMood: {label}\n\n")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["metric", "accuracy", "f1_macro"]
    assert "4 examples" in done.stdout


def test_the_figures_are_those_of_what_it_writes_down(home, tmp_path):
    done = prompt(
        home, "--json", "--num-resamples", 0, "-o", tmp_path / "said.tsv", "--verbalizer", "pos=good", "--calibrate"
    )
    rows = [line.split("\t") for line in (tmp_path / "said.tsv").read_text().splitlines()[1:]]
    assert [row[3] for row in rows] == ["pos", "neg", "pos", "neg"]
    found = json.loads(done.stdout)
    assert found["accuracy"] == sum(row[1] == row[3] for row in rows) / 4
    assert set(found) == {"examples", "accuracy", "f1_macro"}


def test_examples_that_are_shown_are_not_asked_about(home):
    assert json.loads(prompt(home, "--json", "--shots", 3, "--seed", 5).stdout)["examples"] == 1
    assert json.loads(prompt(home, "--json", "--max-examples", 2).stdout)["examples"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--template", "{text}"), "template: needs {text} and, once, {label}"),
        (("--shots", 9), "9 demonstrations from 4 examples"),
        (("--shots", 4), "no example is left to classify"),
        (("--verbalizer", "pos"), "--verbalizer: 'pos' is not LABEL=WORD"),
        (("--verbalizer", "Pos=good"), "--verbalizer: no example has the label 'Pos'; known: "),
        (("--format", "squad"), "--format squad has no labeled texts"),
        (("--max-examples", 0), "--max-examples is 1 or more"),
        (("--label", "stars"), "stars"),
    ],
)
def test_a_slip_is_one_line(home, words, said):
    must_refuse(prompt(home, *words), said)


def test_a_label_that_no_shown_example_could_have_is_named(home, tmp_path):
    (tmp_path / "train.csv").write_text("review,mood\nfine,pos\nnice,very pos\n")
    must_refuse(prompt(home, "--train", tmp_path / "train.csv"), "label 'neg' was never seen in training")
    done = prompt(home, "--train", tmp_path / "train.csv", "--skip-bad")
    assert f"2 bad examples were skipped:\n  {home / 'test.csv'}:3: label 'neg' was never seen" in done.stdout
