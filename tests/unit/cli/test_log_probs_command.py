"""`qkv log-probs`, and the options of `qkv predict` about several models, alignments and the settings in force."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Run

sys.path.append(str(Path(__file__).parents[1] / "generation"))
from writers import tiny

from qkv import ModelBundle, Predictor
from qkv.checkpoints import save
from qkv.tokenization.tokenizer import train_tokenizer

PAIRS = "a b\tu w\na b\tx\na b\tu w x\nc\tq q\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one vocabulary and one of another, and candidates to score."""
    folder = tmp_path_factory.mktemp("models")
    source = train_tokenizer("whitespace", ["a b c d e"])
    for name, family, words in (("a", "transformer", "u v w x y z q"), ("b", "rnn", "u v w x y z q"),
                                ("c", "transformer", "u v w x y z r")):  # fmt: skip
        save(ModelBundle(tiny(family), source, train_tokenizer("whitespace", [words])), folder / name)
    (folder / "pairs.tsv").write_text(PAIRS)
    return folder


def test_each_line_has_its_log_probability_and_the_total_goes_to_stderr(home: Path, run: Run) -> None:
    code, out, err = run("log-probs", home / "a", "--file", home / "pairs.tsv")
    pairs = [tuple(line.split("\t")) for line in PAIRS.splitlines()]
    results = Predictor.load(home / "a").log_probs(pairs)
    assert (code, out.splitlines()) == (0, [
        f"{result.log_prob:.4f}\t{len(result.tokens)}\t{result.perplexity:.3f}\t{source}\t{target}"
        for result, (source, target) in zip(results, pairs, strict=True)
    ])  # fmt: skip
    assert err.startswith("texts 4, tokens 12, log-probability -")


def test_candidates_of_a_source_are_ranked_best_first(home: Path, run: Run) -> None:
    _, out, _ = run("log-probs", home / "a", home / "b", "--file", home / "pairs.tsv", "--rank", "--json", "--tokens")
    rows = [json.loads(line) for line in out.splitlines()]
    scores = [row["log_prob"] for row in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)
    assert rows[3]["input"] == "c\tq q"
    assert rows[3]["tokens"] == ["q", "q", "</s>"]
    assert sum(rows[3]["token_log_probs"]) == pytest.approx(rows[3]["log_prob"])
    _, out, _ = run("log-probs", home / "a", "--file", home / "pairs.tsv", "--rank", "--length-penalty", "1", "--json")
    means = [row["log_prob"] / row["num_tokens"] for row in map(json.loads, out.splitlines())]
    assert means[:3] == sorted(means[:3], reverse=True)


def test_an_n_best_list_of_predict_is_ranked_by_another_model(home: Path, run: Run, tmp_path: Path) -> None:
    _, n_best, _ = run("predict", home / "a", "a b", "c", "--n-best", "3", "--max-new-tokens", "4")
    (tmp_path / "n_best.txt").write_text(n_best)
    _, same_model, _ = run("log-probs", home / "a", "--file", tmp_path / "n_best.txt", "--json")
    for line, row in zip(n_best.splitlines(), map(json.loads, same_model.splitlines()), strict=True):
        if row["num_tokens"] <= 4:  # not cut before EOS, which is scored too
            assert row["log_prob"] == pytest.approx(float(line.split("\t")[1]), abs=1e-3)
    _, ranked, _ = run("log-probs", home / "b", "--file", tmp_path / "n_best.txt", "--rank", "--json")
    scores = [row["log_prob"] for row in map(json.loads, ranked.splitlines())]
    assert scores == [*sorted(scores[:3], reverse=True), *sorted(scores[3:], reverse=True)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a b"], "'a b': this transformer scores a target after its source; give both, separated by a tab"),
        (["a\tu\tv"], "3 texts separated by tabs; give a source and its target, or one text"),
        (["a\tu", "--length-penalty", "1"], "--length-penalty ranks the candidates of --rank; add it"),
        (["a\tu", "--stride", "4", "--on-too-long", "truncate"], "none is too long; leave out --on-too-long"),
        (
            ["a\tu", "--with", "c"],
            "c: token 4 of the target vocabulary is 'r', and 'q' in a; the models of an ensemble",
        ),
    ],
)
def test_what_cannot_be_scored_is_one_line(
    home: Path, run: Run, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    code, out, err = run("log-probs", "a", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_texts_that_were_truncated_are_counted_in_a_warning(home: Path, run: Run) -> None:
    long_target = " ".join("u" for _ in range(5000))
    code, _, err = run("log-probs", home / "a", f"a\t{long_target}", "a\tu", "--on-too-long", "truncate")
    assert code == 0
    assert err.startswith("warning: 1 text was too long for the model, and only a part was scored")
    _, _, err = run("log-probs", home / "a", "a b\tu", "--on-too-long", "truncate")
    assert "warning" not in err


def test_a_bad_line_is_skipped_and_named(home: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tu\nb\tunknown\n")
    code, out, err = run("log-probs", home / "a", "--file", tmp_path / "pairs.tsv", "--skip-bad")
    assert (code, len(out.splitlines())) == (0, 1)
    assert "pairs.tsv:2: 'unknown' in 'unknown' was never seen in training" in err


def test_models_before_the_first_text_are_an_ensemble_as_with_the_option(home: Path, run: Run) -> None:
    _, by_position, _ = run("predict", home / "a", home / "b", "a b", "--scores")
    _, by_option, _ = run("predict", home / "a", "--with", home / "b", "a b", "--scores")
    _, alone, _ = run("predict", home / "a", "a b", "--scores")
    assert by_position == by_option != alone


def test_alignments_are_pairs_of_positions_or_a_list(home: Path, run: Run) -> None:
    options = ("--alignments", "--num-beams", "2", "--n-best", "2")
    _, out, err = run("predict", home / "a", "a b", *options, "-v", "--generation", "max_new_tokens=4")
    _, as_json, _ = run("predict", home / "a", "a b", *options, "--json", "--generation", "max_new_tokens=4")
    lists = [alternative["alignment"] for alternative in json.loads(as_json)["alternatives"]]
    assert [line.split("\t")[3] for line in out.splitlines()] == [
        " ".join(f"{source}-{target}" for target, source in enumerate(positions)) for positions in lists
    ]
    settings = "num_beams=2, n_best=2, return_alignments=true, max_new_tokens=4 (user)"
    assert err == f"generation: {settings}\n"
