"""Metrics of texts beyond their libraries: METEOR's variant, missing packages, several references, edge cases."""

from __future__ import annotations

import sys

import nltk.translate.meteor_score
import pytest

from qkv.errors import InputError
from qkv.metrics import meteor
from qkv.metrics.error_rate import ErrorRate
from qkv.metrics.meteor import Meteor
from qkv.metrics.registry import METRICS, MetricOptions, metrics_of_kind
from qkv.metrics.rouge import Rouge
from qkv.metrics.sacrebleu import Bleu, Chrf


class Synonyms:
    """A WordNet with one word."""

    class Lemma:
        def name(self) -> str:
            return "pet"

    class Set:
        def lemmas(self) -> list[Synonyms.Lemma]:
            return [Synonyms.Lemma()]

    def synsets(self, word: str) -> list[Synonyms.Set]:
        return [Synonyms.Set()] if word == "cat" else []


def test_meteor_by_hand_without_wordnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meteor, "load_wordnet", lambda: None)
    # 3 of 4 words match ("cats" by its stem), in order but for the gap: 2 chunks
    matches, chunks = 3, 2
    mean = (3 / 4) * (3 / 4) / (0.9 * 3 / 4 + 0.1 * 3 / 4)
    wanted = mean * (1 - 0.5 * (chunks / matches) ** 3)
    assert Meteor()(["the cats sat down"], [["The cat lay down"]])["meteor"] == pytest.approx(wanted)
    assert "exact and stem only: WordNet is not installed" in Meteor().signature([["a"]])


def test_meteor_with_wordnet_matches_synonyms_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Meteor()(["a cat here"], [["a pet here"]])["meteor"]
    monkeypatch.setattr(meteor, "load_wordnet", Synonyms)
    assert Meteor()(["a cat here"], [["a pet here"]])["meteor"] > plain
    assert "exact, stem and synonym" in Meteor().signature([["a"]])


def test_meteor_is_nltks_and_takes_the_best_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meteor, "load_wordnet", Synonyms)
    hypothesis, references = "the cat is on a mat", ["there is a pet", "the cat is on it"]
    theirs = nltk.translate.meteor_score.meteor_score(
        [r.split() for r in references], hypothesis.split(), wordnet=Synonyms()
    )
    assert Meteor()([hypothesis], [references])["meteor"] == pytest.approx(theirs)
    assert Meteor()(["", "x"], [["a"], [""]])["meteor"] == 0.0


def test_lsum_takes_lines_for_sentences() -> None:
    predicted, gold = "b c\na", "a\nb c"
    result = Rouge()([predicted], [[gold]])
    assert result["rougeLsum"] == 1.0 > result["rougeL"]
    assert Rouge(sentence_separator="<q>")(["b c <q> a"], [["a <q> b c"]])["rougeLsum"] == 1.0


def test_the_closest_reference_counts_in_an_error_rate() -> None:
    result = ErrorRate()(["a b c"], [["x y", "a b d e"]])
    assert result == {"wer": 0.5, "substitutions": 0.25, "deletions": 0.25, "insertions": 0.0}
    assert ErrorRate("word", lowercase=True)(["A"], [["a"]])["wer"] == 0.0


def test_lower_case_stands_in_the_signature() -> None:
    assert "case:lc" in Bleu(lowercase=True).signature([["a"]])
    assert "case:mixed" in Bleu().signature([["a"]])
    assert "nrefs:var" in Chrf().signature([["a"], ["a", "b"]])


@pytest.mark.parametrize(("name", "package"), [("bleu", "sacrebleu"), ("rouge", "rouge_score"), ("meteor", "nltk")])
def test_a_missing_package_is_one_line_that_names_the_extra(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r"needs the package [a-z-]+; pip install 'qkv\[metrics\]'"):
        METRICS.get(name).make(MetricOptions(), ())(["a"], [["a"]])


def test_texts_need_references() -> None:
    for metric in (Bleu(), Rouge(), Meteor(), ErrorRate()):
        with pytest.raises(InputError, match="example 2: no list of references"):
            metric(["a", "b"], [["a"], []])
        with pytest.raises(InputError, match="example 1: no list of references"):
            metric(["a"], ["a"])


@pytest.mark.parametrize("name", [name for name in metrics_of_kind("texts") if name != "bertscore"])
def test_empty_texts_have_a_score(name: str) -> None:
    metric = METRICS.get(name).make(MetricOptions(), ())
    assert all(value >= 0 for value in metric(["", "a b", ""], [["a"], [""], [""]]).values())


def test_an_unknown_tokeniser_and_metric_are_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean '13a'"):
        Bleu(tokenize="v13a")(["a"], [["a"]])
    with pytest.raises(InputError, match="did you mean 'rouge'"):
        METRICS.get("rouge1")
