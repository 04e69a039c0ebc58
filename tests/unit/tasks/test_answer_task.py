"""Answers out of a text: where they are learned, how windows share a text, what is read off."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qkv
from qkv.data.examples import Answer, QAExample
from qkv.errors import InputError
from qkv.tasks.base import compute_metrics, predict
from qkv.tasks.features import Features
from qkv.tasks.question_answering import AnswerSpan, QAPrediction, QuestionAnswering, best_null_threshold

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from checkpoints import checkpoint

CONTEXT = "The  CAT sat unhappyly, on the mat"


def question(
    context: str = CONTEXT, answers: tuple[Answer, ...] = (), asked: str = "a dog", **others: object
) -> QAExample:
    given = {"answerable": bool(answers), **others}
    return QAExample("id", asked, context, answers, "file: id", **given)


def at(text: str, context: str = CONTEXT) -> Answer:
    return Answer(text, context.index(text))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> qkv.ModelBundle:
    return qkv.load(checkpoint(tmp_path_factory.mktemp("reader"), "span"))


def saying(one: Features, *places: tuple[int, int, float]) -> tuple[Features, Tensor]:
    """Logits with a value at some first and last tokens."""
    logits = torch.zeros(one.length, 2)
    for first, last, value in places:
        logits[first, 0] = logits[last, 1] = value
    return one, logits


def test_the_first_and_last_token_of_the_answer_are_learned(words: qkv.ModelBundle) -> None:
    (one,) = QuestionAnswering().featurize([question(answers=(at("CAT sat"),))], words.source_tokenizer, (), 32)
    tokens = words.source_tokenizer.ids_to_display(one.input_ids[0])
    assert tokens[:9] == ["[CLS]", "a", "dog", "[SEP]", "the", "cat", "sat", "un", "##happy"]
    assert one.labels == (5.0, 6.0)
    assert list(one.token_type_ids[0]) == [0] * 4 + [1] * (len(tokens) - 4)


def test_part_of_a_token_is_learned_as_the_token(words: qkv.ModelBundle) -> None:
    (one,) = QuestionAnswering().featurize([question(answers=(at("happyl"),))], words.source_tokenizer, (), 32)
    assert one.labels == (8.0, 9.0)


def test_a_question_without_answer_points_to_the_first_token(words: qkv.ModelBundle) -> None:
    (one,) = QuestionAnswering().featurize([question()], words.source_tokenizer, (), 32)
    assert one.labels == (0.0, 0.0)


LONG = " ".join(["the cat sat on a mat"] * 6)  # 36 tokens


@pytest.mark.parametrize("stride", [1, 3, 5, 500])
def test_windows_cover_the_text_and_hold_the_question(stride: int, words: qkv.ModelBundle) -> None:
    asked = QuestionAnswering(doc_stride=stride).featurize([question(LONG)], words.source_tokenizer, (), 16)
    assert all(one.length <= 16 and not one.truncated for one in asked)
    assert all(
        words.source_tokenizer.ids_to_display(one.input_ids[0])[:4] == ["[CLS]", "a", "dog", "[SEP]"] for one in asked
    )
    assert all(words.source_tokenizer.ids_to_display(one.input_ids[0])[-1] == "[SEP]" for one in asked)
    begins = [one.metadata.token_starts[0] for one in asked]
    assert begins == sorted(set(begins))
    assert begins[0] == 0
    assert asked[-1].metadata.token_ends[-1] == len(LONG)
    for before, after in pairwise(asked):  # the next begins within the one before
        assert after.metadata.token_starts[0] in before.metadata.token_starts
        assert len(after.metadata.token_starts) <= len(before.metadata.token_starts)
        shared = len([b for b in before.metadata.token_starts if b >= after.metadata.token_starts[0]])
        assert shared == len(before.metadata.token_starts) - min(stride, 5)


def test_only_windows_that_hold_the_whole_answer_learn_it(words: qkv.ModelBundle) -> None:
    answer = Answer("sat on a mat the cat", LONG.index("sat on a mat the cat"))
    asked = QuestionAnswering(doc_stride=3).featurize([question(LONG, (answer,))], words.source_tokenizer, (), 16)
    held = 0
    for one in asked:
        begin, end = one.metadata.token_starts[0], one.metadata.token_ends[-1]
        if begin <= answer.start and answer.start + len(answer.text) <= end:
            held += 1
            first, last = (int(x) - one.metadata.first_token for x in one.labels)
            assert LONG[one.metadata.token_starts[first] : one.metadata.token_ends[last]] == answer.text
        else:
            assert one.labels == (0.0, 0.0)
    assert 0 < held < len(asked)


def test_the_answer_is_characters_of_the_text_as_it_was_given(words: qkv.ModelBundle) -> None:
    task, asked = QuestionAnswering(), question(CONTEXT)
    (one,) = task.featurize([asked], words.source_tokenizer, (), 32)
    found = task.postprocess([saying(one, (4, 6, 5.0))], asked, ())
    assert found.text == "The  CAT sat"
    assert found.n_best[0] == AnswerSpan("The  CAT sat", 0, 12, 10.0)
    assert found.null_score_diff == -10.0


def test_stretches_of_all_windows_compete(words: qkv.ModelBundle) -> None:
    task, asked = QuestionAnswering(doc_stride=3, n_best_size=5), question(LONG)
    windows = task.featurize([asked], words.source_tokenizer, (), 16)
    parts = [saying(one, (4 + i % 2, 5, float(i))) for i, one in enumerate(windows)]
    found = task.postprocess(parts, asked, ())
    assert len(found.n_best) == 5
    assert [one.score for one in found.n_best] == sorted((one.score for one in found.n_best), reverse=True)
    last = windows[-1].metadata
    index = (len(windows) - 1) % 2
    assert (found.n_best[0].start, found.n_best[0].end) == (last.token_starts[index], last.token_ends[1])
    assert len({(one.start, one.end) for one in found.n_best}) == 5


def test_an_answer_is_no_longer_than_allowed_and_never_backwards(words: qkv.ModelBundle) -> None:
    asked = question(CONTEXT)
    (one,) = QuestionAnswering().featurize([asked], words.source_tokenizer, (), 32)
    assert QuestionAnswering().postprocess([saying(one, (4, 9, 5.0))], asked, ()).text == "The  CAT sat unhappyly"
    short = QuestionAnswering(max_answer_length=3).postprocess([saying(one, (4, 9, 5.0))], asked, ())
    assert all(len(stretch.text.split()) <= 3 for stretch in short.n_best)
    assert short.n_best[0].score == 5.0
    backwards = QuestionAnswering().postprocess([saying(one, (8, 5, 5.0))], asked, ())
    assert all(stretch.start < stretch.end for stretch in backwards.n_best)
    assert backwards.n_best[0].score == 5.0


def test_each_window_has_to_say_that_it_has_no_answer(words: qkv.ModelBundle) -> None:
    task, asked = QuestionAnswering(doc_stride=5, null_score_diff_threshold=0.0), question(LONG)
    windows = task.featurize([asked], words.source_tokenizer, (), 16)
    none = [saying(one, (0, 0, 5.0)) for one in windows]
    assert task.postprocess(none, asked, ()).text == ""
    assert task.postprocess(none, asked, ()).null_score_diff == 10.0
    one_has = [saying(windows[0], (5, 5, 3.0)), *none[1:]]
    assert task.postprocess(one_has, asked, ()).text == "cat"
    assert QuestionAnswering(null_score_diff_threshold=20.0).postprocess(none, asked, ()).text != ""
    assert QuestionAnswering().postprocess(none, asked, ()).text != ""  # nobody has said that there may be none


def test_a_candidate_is_chosen_where_there_are_some(words: qkv.ModelBundle) -> None:
    candidates = (at("CAT"), at("mat"))
    asked = question(CONTEXT, (at("mat"),), candidates=candidates)
    task = QuestionAnswering()
    (one,) = task.featurize([asked], words.source_tokenizer, (), 32)
    found = task.postprocess([saying(one, (6, 8, 9.0), (5, 5, 1.0))], asked, ())
    assert [stretch.text for stretch in found.n_best] == ["CAT", "mat"]
    assert compute_metrics(task, [found], [asked], ())["exact_match"] == 0.0


@pytest.mark.parametrize("unanswerable", [False, True])
def test_the_figures_are_those_of_the_version_that_the_questions_are_of(unanswerable: bool) -> None:
    examples = [question(answers=(at("CAT"),)), question() if unanswerable else question(answers=(at("mat"),))]
    right = AnswerSpan("cat", 5, 8, 4.0)
    found = [QAPrediction((right,), -1.0), QAPrediction((right,), 1.0)]
    figures = compute_metrics(QuestionAnswering(), found, examples, ())
    assert figures["exact_match"] == (100.0 if unanswerable else 50.0)
    assert ("exact_match_unanswerable" in figures) == unanswerable
    assert compute_metrics(QuestionAnswering(null_score_diff_threshold=-2.0), found, examples, ())["exact_match"] == (
        50.0 if unanswerable else 0.0
    )


def test_the_best_threshold_is_found_on_scored_questions() -> None:
    examples = [question(answers=(at("CAT"),)), question(answers=(at("mat"),)), question(), question()]
    texts = ("cat", "the mat", "cat", "cat")
    margins = (-3.0, 1.0, 0.5, 2.0)
    found = [QAPrediction((AnswerSpan(text, 0, 3, 4.0),), margin) for text, margin in zip(texts, margins, strict=True)]
    best, threshold = best_null_threshold(found, examples)
    assert best == 75.0
    assert compute_metrics(QuestionAnswering(null_score_diff_threshold=threshold), found, examples, ())["f1"] == best
    assert compute_metrics(QuestionAnswering(null_score_diff_threshold=9.0), found, examples, ())["f1"] == 50.0


def test_a_long_question_is_cut_so_that_half_is_left_to_the_text(words: qkv.ModelBundle) -> None:
    asked = QuestionAnswering().featurize([question(LONG, asked="the dog " * 40)], words.source_tokenizer, (), 16)
    assert all(one.truncated and one.length <= 16 for one in asked)
    assert min(len(one.metadata.token_starts) for one in asked[:-1]) == 8


def test_a_space_in_a_token_is_no_part_of_the_answer() -> None:
    from task_models import tokeniser

    tokens, context = tokeniser("gpt2"), "the king of spain sees"
    asked = question(context, (at("of spain", context),))
    (one,) = QuestionAnswering().featurize([asked], tokens, (), 64)
    first, last = (int(x) for x in one.labels)
    found = QuestionAnswering().postprocess([saying(one, (first, last, 5.0))], asked, ())
    assert found.n_best[0][:3] == ("of spain", 9, 17)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (question(answers=(Answer("mat", 400),)), "file: id: the answer 400–403 is not inside its text"),
        (question(answers=(Answer("", 3),)), "it is empty"),
        (question(candidates=(Answer("mat", -1),)), "is not inside its text"),
        (question(""), "file: id: the context is empty"),
        (question(asked=" "), "file: id: the question is empty"),
    ],
)
def test_bad_questions_are_named(example: QAExample, said: str, words: qkv.ModelBundle) -> None:
    with pytest.raises(InputError, match=said):
        QuestionAnswering().featurize([example], words.source_tokenizer, (), 32)


def test_an_answer_without_any_token_is_not_in_the_text(words: qkv.ModelBundle) -> None:
    context = "the cat \u200d sat"
    (one,) = QuestionAnswering().featurize(
        [question(context, (at("\u200d", context),))], words.source_tokenizer, (), 32
    )
    assert one.labels == (0.0, 0.0)


def test_a_model_answers_in_the_order_of_the_questions(words: qkv.ModelBundle) -> None:
    asked = [question(LONG), question("the mat"), question(CONTEXT)]
    found = predict(QuestionAnswering(doc_stride=4), words, asked)
    assert [one.context[f.n_best[0].start : f.n_best[0].end] for one, f in zip(asked, found, strict=True)] == [
        f.n_best[0].text for f in found
    ]
    again = predict(QuestionAnswering(doc_stride=4), words, asked[::-1], max_tokens=1)[::-1]
    assert [one.text for one in found] == [one.text for one in again]


@pytest.mark.parametrize("name", ["doc_stride", "max_answer_length", "n_best_size"])
def test_settings_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"task\.{name} must be at least 1, not 0"):
        QuestionAnswering(**{name: 0})
