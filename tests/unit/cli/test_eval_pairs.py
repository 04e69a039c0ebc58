"""qkv eval of a run that learned from pairs of texts: figures, intervals, signatures, sets."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from test_cli import must_refuse, qkv

sys.path.append(str(Path(__file__).parents[1] / "train"))
from sentences import mixed, write_recipe

from qkv.metrics.sacrebleu import Bleu
from qkv.recipe import read_recipe
from qkv.train.fit import fit


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    list(fit(read_recipe(write_recipe(folder)), folder / "run", device="cpu"))
    return folder


def test_it_prints_cased_and_lower_cased_bleu_with_intervals_and_signatures(home):
    done = qkv("eval", home / "run", "--num-resamples", 50)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[3:6]] == ["bleu", "bleu_lowercase", "chrf"]
    assert "bleu: nrefs:1|case:mixed|eff:no|tok:13a" in done.stdout
    assert "bleu_lowercase: nrefs:1|case:lc" in done.stdout


def test_the_figures_are_those_of_what_it_writes_down(home, tmp_path):
    done = qkv("eval", home / "run", "--json", "--num-resamples", 0, "-o", tmp_path / "out.tsv")
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text("utf-8").splitlines()]
    found = json.loads(done.stdout)
    assert found["bleu"] == pytest.approx(Bleu()([row[1] for row in rows], [row[2:] for row in rows])["bleu"])
    assert found["examples"] == len(rows) == 8
    assert "intervals" not in found


def test_another_file_is_scored_as_the_recipe_has_it(home):
    files = ("--data", home / "train.en", "--target", home / "train.de")
    found = json.loads(qkv("eval", home / "run", *files, "--json", "--num-resamples", 10, "--free-running").stdout)
    assert found["examples"] == 60
    assert found["loss"] > 0
    assert found["intervals"]["bleu"][0] <= found["bleu"] <= found["intervals"]["bleu"][1]


def test_perplexity_is_that_of_the_references(home):
    found = json.loads(qkv("eval", home / "run", "-m", "perplexity", "--json", "--free-running").stdout)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_each_set_of_several_has_its_own_figures(tmp_path):
    list(fit(read_recipe(mixed(tmp_path)), tmp_path / "run", device="cpu"))
    found = json.loads(qkv("eval", tmp_path / "run", "--json", "--num-resamples", 0).stdout)
    assert {name: one["examples"] for name, one in found.items()} == {"translate English to German": 8, "tldr": 5}
    assert all("chrf" in one for one in found.values())
    printed = qkv("eval", tmp_path / "run", "--num-resamples", 0).stdout
    assert "\ntldr\n" in printed


def test_a_slip_is_one_line(home):
    must_refuse(qkv("eval", home / "run", "--format", "tsv"), "--format is for the file of --data")
    must_refuse(
        qkv("eval", home / "run", "--data", home / "train.en", "--format", "squad"),
        "format 'squad' has no pairs of texts; known: aligned, tsv",
    )
    must_refuse(qkv("eval", home / "run", "--num-resamples", -1), "--num-resamples must be 0 or more")


def test_predict_puts_the_prefix_of_the_run_before_a_text_that_lacks_it(tmp_path):
    recipe = read_recipe(write_recipe(tmp_path), ["data.prefix='to German: '"])
    list(fit(recipe, tmp_path / "run", device="cpu"))
    plain, written = (
        qkv("predict", tmp_path / "run", text, "--scores").stdout.split("\t")
        for text in ("a man.", "to German: a man.")
    )
    assert (plain[0], written[0]) == ("a man.", "to German: a man.")
    assert plain[1:] == written[1:]
    other = qkv("predict", tmp_path / "run", "for German: a man.", "--scores").stdout.split("\t")
    assert other[1] != plain[1]
