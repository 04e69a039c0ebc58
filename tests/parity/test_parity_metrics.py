"""Metrics against reference libraries, on random inputs and edge cases: empty texts, no entities, a single class."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import jiwer
import numpy as np
import pytest
import sacrebleu.metrics as sacrebleu
import scipy.stats
import seqeval.metrics
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.significance import PairedTest
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support as seqeval_lenient
from seqeval.metrics.v1 import precision_recall_fscore_support as seqeval_strict
from seqeval.scheme import IOB2, IOBES
from sklearn.preprocessing import MultiLabelBinarizer

from qkv.metrics.classification import (
    F1,
    Accuracy,
    MatthewsCorrelation,
    TokenAccuracy,
    collect_label_set,
    confusion_matrix,
)
from qkv.metrics.correlation import Pearson, Spearman
from qkv.metrics.entities import EntityF1, collect_entity_types, get_entities
from qkv.metrics.error_rate import ErrorRate
from qkv.metrics.rouge import Rouge
from qkv.metrics.sacrebleu import Bleu, Chrf, ChrfPlusPlus, Ter
from qkv.metrics.significance import compare

RATES = ("precision", "recall", "f1")
AVERAGES = ("micro", "macro", "weighted")
LABELS = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcde")), min_size=1, max_size=30)
SETS = st.lists(
    st.tuples(st.frozensets(st.sampled_from("abcd")), st.frozensets(st.sampled_from("abcde"))), min_size=1, max_size=20
)
WORDS = st.sampled_from(["the", "The", "cat", "sat", "sats", "mat", ".", "on", "über", "7", "a,b"])
TEXT = st.lists(WORDS, max_size=9).map(" ".join)
TEXTS = st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3)), min_size=1, max_size=6)
often = settings(deadline=None, max_examples=60)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """The reference libraries warn about divisions by zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same_rates(ours: dict[str, float], theirs: Any) -> None:
    """`theirs` maps the name of an average to precision, recall, F1 and support."""
    for average in AVERAGES:
        wanted = theirs(average)[:3]
        assert [ours[f"{rate}_{average}"] for rate in RATES] == pytest.approx([float(x) for x in wanted]), average


# ---- labels ---------------------------------------------------------------------------------------------------------


@often
@given(LABELS)
def test_labels_are_scored_as_by_scikit_learn(pairs: list[tuple[str, str]]) -> None:
    predicted, true = map(list, zip(*pairs, strict=True))
    labels = collect_label_set(predicted, true)
    metric = F1(labels)

    def theirs(average: str | None) -> Any:
        return sklearn.metrics.precision_recall_fscore_support(true, predicted, average=average, zero_division=0)

    same_rates(metric(predicted, true), theirs)
    by_label = metric.per_class(metric.statistics(predicted, true))
    assert [by_label[x][r] for r in (*RATES, "support") for x in labels] == pytest.approx(
        np.ravel(theirs(None)).tolist()
    )
    assert Accuracy()(predicted, true)["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(true, predicted))
    matthews = sklearn.metrics.matthews_corrcoef(true, predicted)
    assert MatthewsCorrelation(labels)(predicted, true)["matthews_correlation"] == pytest.approx(matthews)
    table = sklearn.metrics.confusion_matrix(true, predicted, labels=labels)
    assert confusion_matrix(predicted, true, labels).tolist() == table.tolist()


@often
@given(LABELS, st.sampled_from(["a", "b", "e"]))
def test_the_f1_of_chosen_labels_equals_theirs(pairs: list[tuple[str, str]], item: str) -> None:
    predicted, true = map(list, zip(*pairs, strict=True))
    for chosen in ((item,), (item, "c")):

        def theirs(average: str, chosen: tuple[str, ...] = chosen) -> Any:
            return sklearn.metrics.precision_recall_fscore_support(
                true, predicted, labels=chosen, average=average, zero_division=0
            )

        same_rates(F1(chosen)(predicted, true), theirs)


@often
@given(SETS)
def test_sets_of_labels_are_scored_as_by_scikit_learn(pairs: list[tuple[frozenset[str], frozenset[str]]]) -> None:
    predicted, true = map(list, zip(*pairs, strict=True))
    binary = MultiLabelBinarizer(classes=list("abcde")).fit([])
    gold_matrix, predicted_matrix = binary.transform(true), binary.transform(predicted)

    def theirs(average: str) -> Any:
        return sklearn.metrics.precision_recall_fscore_support(
            gold_matrix, predicted_matrix, average=average, zero_division=0
        )

    same_rates(F1(tuple("abcde"))(predicted, true), theirs)
    assert Accuracy()(predicted, true)["accuracy"] == pytest.approx(
        sklearn.metrics.accuracy_score(gold_matrix, predicted_matrix)
    )


@often
@given(st.lists(LABELS, min_size=1, max_size=4))
def test_tokens_are_scored_as_one_long_list(sentences: list[list[tuple[str, str]]]) -> None:
    predicted = [[p for p, _ in sentence] for sentence in sentences]
    true = [[t for _, t in sentence] for sentence in sentences]
    flat_true, flat_predicted = list(chain(*true)), list(chain(*predicted))

    def theirs(average: str) -> Any:
        return sklearn.metrics.precision_recall_fscore_support(
            flat_true, flat_predicted, average=average, zero_division=0
        )

    same_rates(F1(collect_label_set(predicted, true))(predicted, true), theirs)
    accuracy = sklearn.metrics.accuracy_score(flat_true, flat_predicted)
    assert TokenAccuracy()(predicted, true)["accuracy"] == pytest.approx(accuracy)


@often
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-3, 3).map(lambda x: round(x, 2))), min_size=2, max_size=20))
def test_correlations_are_scipys_and_undefined_where_theirs_are(pairs: list[tuple[int, float]]) -> None:
    predicted, true = map(list, zip(*pairs, strict=True))
    for metric, theirs in ((Pearson(), scipy.stats.pearsonr), (Spearman(), scipy.stats.spearmanr)):
        assert metric(predicted, true)[metric.name] == pytest.approx(theirs(predicted, true).statistic, nan_ok=True)


# ---- entities -------------------------------------------------------------------------------------------------------

BIO = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B", "I-A-B"]
BIOES = [*BIO, "E-PER", "S-PER", "E-LOC", "S-LOC"]


def tagged(tags: list[str]) -> Any:
    """Sentences with random gold and predicted tags, often invalid, sometimes without any entity."""
    tag = st.one_of(st.just("O"), st.sampled_from(tags))
    sentence = st.lists(st.tuples(tag, tag), min_size=1, max_size=8)
    return st.lists(sentence, min_size=1, max_size=4)


def split(sentences: list[list[tuple[str, str]]]) -> tuple[list[list[str]], list[list[str]]]:
    return [[p for p, _ in s] for s in sentences], [[t for _, t in s] for s in sentences]


def same_entities(metric: EntityF1, predicted: list[list[str]], true: list[list[str]], theirs: Any) -> None:
    result = metric(predicted, true)
    if not metric.labels:  # nothing to average: theirs is not a number
        assert set(result.values()) == {0.0}
        return
    same_rates(result, theirs)
    by_label = metric.per_class(metric.statistics(predicted, true))
    wanted = np.ravel(theirs(None)).tolist()
    assert [by_label[x][r] for r in (*RATES, "support") for x in metric.labels] == pytest.approx(wanted)


@settings(deadline=None, max_examples=200)
@given(tagged(BIOES))
def test_entities_equal_seqevals_default(sentences: list[list[tuple[str, str]]]) -> None:
    predicted, true = split(sentences)
    same_entities(
        EntityF1(collect_entity_types(predicted, true)),
        predicted,
        true,
        lambda average: seqeval_lenient(true, predicted, average=average),
    )
    assert EntityF1(collect_entity_types(predicted, true))(predicted, true)["f1_micro"] == pytest.approx(
        float(seqeval.metrics.f1_score(true, predicted))
    )


@settings(deadline=None, max_examples=200)
@given(tagged(BIO), tagged(BIOES))
def test_entities_equal_seqevals_strict_mode(
    bio: list[list[tuple[str, str]]], bioes: list[list[tuple[str, str]]]
) -> None:
    for sentences, ours, theirs in ((bio, "bio", IOB2), (bioes, "bioes", IOBES)):
        predicted, true = split(sentences)
        metric = EntityF1(collect_entity_types(predicted, true, scheme=ours), ours)  # type: ignore[arg-type]

        def strict(average: str | None, predicted: Any = predicted, true: Any = true, scheme: Any = theirs) -> Any:
            return seqeval_strict(true, predicted, average=average, scheme=scheme)

        same_entities(metric, predicted, true, strict)


@often
@given(st.lists(st.sampled_from(BIOES), max_size=12))
def test_the_spans_are_those_of_seqeval(tags: list[str]) -> None:
    theirs = seqeval.metrics.sequence_labeling.get_entities(tags)
    assert [(e.type, e.start, e.end - 1) for e in get_entities(tags)] == theirs


# ---- texts ----------------------------------------------------------------------------------------------------------


def streams(references: list[list[str]]) -> list[list[str | None]]:
    most = max(map(len, references))
    return [[accepted[i] if i < len(accepted) else None for accepted in references] for i in range(most)]


@often
@given(TEXTS, st.booleans())
def test_bleu_chrf_and_ter_equal_sacrebleu(pairs: list[tuple[str, list[str]]], lowercase: bool) -> None:
    hypotheses, references = map(list, zip(*pairs, strict=True))
    for ours, theirs in (
        (Bleu(lowercase=lowercase), sacrebleu.BLEU(lowercase=lowercase, force=True)),
        (Bleu(tokenize="intl"), sacrebleu.BLEU(tokenize="intl", force=True)),
        (Chrf(lowercase), sacrebleu.CHRF(lowercase=lowercase)),
        (ChrfPlusPlus(lowercase), sacrebleu.CHRF(lowercase=lowercase, word_order=2)),
        (Ter(), sacrebleu.TER()),
    ):
        wanted = theirs.corpus_score(hypotheses, streams(references)).score
        assert ours(hypotheses, references)[ours.name] == pytest.approx(wanted)
        assert ours.signature(references) == theirs.get_signature().format()


@often
@given(TEXTS)
def test_sentence_scores_equal_sacrebleus(pairs: list[tuple[str, list[str]]]) -> None:
    hypotheses, references = map(list, zip(*pairs, strict=True))
    for ours, theirs in (
        (Bleu(), sacrebleu.BLEU(effective_order=True, force=True)),
        (Chrf(), sacrebleu.CHRF()),
        (Ter(), sacrebleu.TER()),
    ):
        result = [row[ours.name] for row in ours.per_example(ours.statistics(hypotheses, references))]
        assert result == pytest.approx([theirs.sentence_score(h, r).score for h, r in pairs])


@often
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6))
def test_error_rates_equal_jiwer(pairs: list[tuple[str, str]]) -> None:
    hypotheses, references = map(list, zip(*pairs, strict=True))
    lists = [[reference] for reference in references]
    assert ErrorRate()(hypotheses, lists)["wer"] == pytest.approx(jiwer.wer(references, hypotheses))
    assert ErrorRate("character")(hypotheses, lists)["cer"] == pytest.approx(jiwer.cer(references, hypotheses))


@often
@given(TEXTS, st.booleans())
def test_rouge_equals_rouge_score(pairs: list[tuple[str, list[str]]], stem: bool) -> None:
    hypotheses, references = map(list, zip(*pairs, strict=True))
    hypotheses, references = (
        [h.replace(".", "\n") for h in hypotheses],
        [[t.replace(".", "\n") for t in r] for r in references],
    )
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = RougeScorer(kinds, use_stemmer=stem)
    best = [scorer.score_multi(r, h) for h, r in zip(hypotheses, references, strict=True)]
    ours = Rouge(use_stemmer=stem)(hypotheses, references)
    for kind in kinds:
        assert ours[kind] == pytest.approx(np.mean([item[kind].fmeasure for item in best]))
        assert ours[f"{kind}_recall"] == pytest.approx(np.mean([item[kind].recall for item in best]))
    each = [[scorer.score(t, h)["rougeL"] for t in r] for h, r in zip(hypotheses, references, strict=True)]
    mean = Rouge("mean", stem)(hypotheses, references)
    assert mean["rougeL"] == pytest.approx(np.mean([np.mean([item.fmeasure for item in row]) for row in each]))


# ---- two systems ----------------------------------------------------------------------------------------------------


def noisy(lines: list[str], share: float, draw: np.random.Generator) -> list[str]:
    return [" ".join(w for w in line.split() if draw.random() > share) for line in lines]


@pytest.mark.parametrize(("first", "second"), [(0.2, 0.2), (0.2, 0.26)])
def test_two_systems_are_told_apart_as_by_sacrebleu(first: float, second: float) -> None:
    draw = np.random.default_rng(3)
    words = [f"w{i}" for i in range(60)]
    references = [" ".join(draw.choice(words, size=draw.integers(5, 15))) for _ in range(150)]
    ours, other = noisy(references, first, draw), noisy(references, second, draw)
    metric = Bleu()
    lists = [[reference] for reference in references]
    result = compare(metric, metric.statistics(ours, lists), metric.statistics(other, lists), seed=5)["bleu"]
    systems = [("first", ours), ("second", other)]
    test = PairedTest(systems, {"BLEU": sacrebleu.BLEU(references=[references])}, None, test_type="ar", n_samples=1000)
    theirs = test()[1]["BLEU"][1]
    assert result.p_randomization == pytest.approx(theirs.p_value, abs=0.05)  # both drew a thousand swaps
    assert (result.p_randomization < 0.05) == (first != second)
