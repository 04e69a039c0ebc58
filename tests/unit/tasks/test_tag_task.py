"""Tags of words over their pieces: which token learns which tag, windows, and what no token says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from task_models import logits_of, model, tagged, tokeniser

import qkv
from qkv.data.examples import Span, TaggedExample, TextExample
from qkv.data.formats.conll import join_words
from qkv.errors import InputError
from qkv.metrics.classification import TokenAccuracy
from qkv.metrics.entities import EntityF1
from qkv.nn.subword_pooling import pool_subwords
from qkv.objectives.classification import head_logits
from qkv.tasks.base import compute_metrics, predict
from qkv.tasks.token_classification import TokenClassification, make_windows

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from checkpoints import checkpoint

LABELS = ("B-X", "I-X", "O")


def sentence(*words: str, tags: tuple[str, ...] | None = None) -> TaggedExample:
    text, starts = join_words(words)
    return TaggedExample(text, words, starts, tags, "file:7")


UNHAPPY = sentence("the", "unhappyly", "cat", tags=("O", "B-X", "O"))  # [CLS] the un ##happy ##ly cat [SEP]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> qkv.ModelBundle:
    return qkv.load(checkpoint(tmp_path_factory.mktemp("tagger"), "token", LABELS))


def test_a_words_first_piece_learns_its_tag(words: qkv.ModelBundle) -> None:
    (one,) = TokenClassification().featurize([UNHAPPY], words.source_tokenizer, LABELS, 16)
    assert words.source_tokenizer.ids_to_display(one.input_ids[0]) == [
        "[CLS]",
        "the",
        "un",
        "##happy",
        "##ly",
        "cat",
        "[SEP]",
    ]
    assert one.label_positions == (1, 2, 5)
    assert one.labels == (2.0, 0.0, 2.0)


def test_all_pieces_learn_it_and_a_chunk_begins_once(words: qkv.ModelBundle) -> None:
    (one,) = TokenClassification(subword_pooling="all").featurize([UNHAPPY], words.source_tokenizer, LABELS, 16)
    assert one.label_positions == (1, 2, 3, 4, 5)
    assert one.labels == (2.0, 0.0, 1.0, 1.0, 2.0)


def test_of_all_pieces_the_first_decides(words: qkv.ModelBundle) -> None:
    task = TokenClassification(subword_pooling="all")
    (one,) = task.featurize([UNHAPPY], words.source_tokenizer, LABELS, 16)
    logits = torch.eye(3)[torch.tensor([2, 0, 2, 2, 2])]
    assert task.postprocess([(one, logits)], UNHAPPY, LABELS) == ("O", "B-X", "O")


def test_the_mean_of_a_words_pieces_is_judged(words: qkv.ModelBundle) -> None:
    task = TokenClassification(subword_pooling="mean")
    batch = task.collate(task.featurize([UNHAPPY, UNHAPPY], words.source_tokenizer, LABELS, 16), True)
    assert batch.word_ids[0] == (None, 0, 1, 1, 1, 2, None)
    assert batch.labels.tolist() == [2, 0, 2] * 2
    with torch.no_grad():
        found = head_logits(words.model, batch)
        hidden = words.model.hidden_states(batch.source, batch.segments).hidden
        wanted = words.model.head(pool_subwords(hidden, batch.word_ids, "mean").values)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("word", ["first", "mean"])
def test_a_saved_tagger_predicts_as_it_was_trained(word: str, tmp_path: Path) -> None:
    task, example = TokenClassification(subword_pooling=word), replace(tagged(3), tags=None)
    bundle = model(task, LABELS)
    qkv.save(bundle, tmp_path / "run")
    (found,) = qkv.predict(qkv.load(tmp_path / "run"), [example.text], qkv.GenerationConfig(n_best=2))
    ((_, logits),) = logits_of(task, bundle, [example])[0]
    assert found.prediction == predict(task, bundle, [example])[0]
    probs = torch.softmax(logits, -1).amax(-1).tolist()
    assert [word["probability"] for word in found.fields["words"]] == pytest.approx(probs, abs=1e-5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(6, 30), st.none() | st.integers(1, 12))
def test_every_word_is_judged_in_exactly_one_window_where_it_stands_deepest(
    sizes: list[int], room: int, stride: int | None
) -> None:
    windows = make_windows(sizes, room, stride)
    assert sorted(word for window in windows for word in window.scored) == list(range(len(sizes)))
    for window in windows:
        assert sum(sizes[window.start : window.end]) <= room
        for word in window.scored:
            assert window.start <= word < window.end
            edges = [abs(word - edge) for edge, is_end in ((window.start, window.start == 0),
                     (window.end - 1, window.end == len(sizes))) if not is_end]  # fmt: skip
            others = [w for w in windows if w.start <= word < w.end and w.start > 0 and w.end < len(sizes)]
            assert all(min(word - w.start, w.end - 1 - word) <= min(edges, default=99) for w in others)


def test_a_long_sentence_is_read_in_windows(words: qkv.ModelBundle) -> None:
    long = sentence(*["the", "cat", "sat"] * 10, tags=("O", "B-X", "I-X") * 10)
    asked = TokenClassification(window_stride=4).featurize([long], words.source_tokenizer, LABELS, 12)
    assert len(asked) > 3
    assert all(len(one.input_ids[0]) <= 12 and not one.truncated for one in asked)
    assert all(one.input_ids[0][0] == 2 and one.input_ids[0][-1] == 3 for one in asked)  # [CLS] … [SEP]
    found = [word for one in asked for word in one.metadata.logit_word_ids]
    assert sorted(found) == list(range(30))
    for one in asked:
        tokens = words.source_tokenizer.ids_to_display([one.input_ids[0][place] for place in one.label_positions])
        assert tokens == [long.words[word] for word in one.metadata.logit_word_ids]


def test_a_word_without_any_token_is_outside(words: qkv.ModelBundle) -> None:
    odd = sentence("the", "\u200d", "cat", tags=("O", "O", "B-X"))
    task = TokenClassification()
    (one,) = task.featurize([odd], words.source_tokenizer, LABELS, 16)
    assert one.metadata.logit_word_ids == (0, 2)
    assert task.postprocess([(one, torch.eye(3)[:2])], odd, LABELS) == ("B-X", "O", "I-X")
    alone = sentence("\u200d", tags=("O",))
    assert task.featurize([alone], words.source_tokenizer, LABELS, 16) == []
    assert predict(task, words, [alone]) == [("O",)]


def test_a_word_without_any_token_is_what_most_of_its_sentence_is_where_nothing_is_outside(
    words: qkv.ModelBundle,
) -> None:
    odd = sentence("the", "\u200d", "cat", "sat", tags=("D", "N", "N", "V"))
    task = TokenClassification()
    (one,) = task.featurize([odd], words.source_tokenizer, ("D", "N", "V"), 16)
    said = torch.eye(3)[torch.tensor([0, 1, 1])]
    assert task.postprocess([(one, said)], odd, ("D", "N", "V")) == ("D", "N", "N", "N")
    assert task.postprocess([], odd, ("D", "N", "V")) == ("D",) * 4


def test_truncation_is_said_and_what_is_behind_it_counts_as_outside(words: qkv.ModelBundle) -> None:
    long = sentence(*["cat"] * 30, tags=("B-X",) * 30)
    task = TokenClassification(on_too_long="truncate")
    (one,) = task.featurize([long], words.source_tokenizer, LABELS, 12)
    assert one.truncated
    assert len(one.label_positions) == 10
    found = task.postprocess([(one, torch.eye(3)[[0] * 10])], long, LABELS)
    assert found == ("B-X",) * 10 + ("O",) * 20
    with pytest.raises(InputError, match=r"file:7: 32 tokens, and the model takes at most 12"):
        TokenClassification(on_too_long="refuse").featurize([long], words.source_tokenizer, LABELS, 12)


def test_a_word_of_more_tokens_than_the_model_takes_is_read_in_part(words: qkv.ModelBundle) -> None:
    huge = sentence("un" + "happy" * 10, "cat", tags=("O", "O"))
    asked = TokenClassification().featurize([huge], words.source_tokenizer, LABELS, 9)
    assert [one.metadata.logit_word_ids for one in asked] == [(0,), (1,)]
    assert max(one.length for one in asked) == 9


def test_spans_of_a_text_are_tags_of_its_words(words: qkv.ModelBundle) -> None:
    example = TextExample("the cat sat", "file:2", spans=(Span(4, 11, "X"),))
    task = TokenClassification()
    assert task.labels([example]) == LABELS
    assert task.gold(example) == ("O", "B-X", "I-X")
    assert len(predict(task, words, [example])[0]) == 3


def test_the_deciding_figure_goes_by_the_tags() -> None:
    assert TokenClassification().primary_metric(LABELS) == "f1_micro"
    assert TokenClassification().primary_metric(("B-X", "I-X", "E-X", "S-X", "O")) == "f1_micro"
    assert TokenClassification().primary_metric(("NOUN", "VERB")) == "accuracy"
    assert TokenClassification(metric="f1_macro").primary_metric(("NOUN", "VERB")) == "f1_macro"
    both = TokenClassification().metrics(LABELS, [("O",)], [("B-X",)])
    assert [type(metric) for metric in both] == [EntityF1, TokenAccuracy]
    assert (
        compute_metrics(TokenClassification(), [("B-X", "I-X")], [sentence("a", "b", tags=("B-X", "O"))], LABELS)[
            "f1_micro"
        ]
        == 0.0
    )
    assert (
        compute_metrics(TokenClassification(), [("B-X", "I-X")], [sentence("a", "b", tags=("B-X", "O"))], LABELS)[
            "accuracy"
        ]
        == 0.5
    )


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (sentence("a", tags=("B-Y",)), "file:7: label 'B-Y' of 'a' was never seen in training"),
        (TaggedExample("a b", ("a", "b"), (0, 2), ("O",), "file:7"), "2 words have 1 tags"),
        (sentence(tags=()), "file:7: has no words"),
    ],
)
def test_bad_examples_are_named(example: TaggedExample, said: str, words: qkv.ModelBundle) -> None:
    with pytest.raises(InputError, match=said):
        TokenClassification().featurize([example], words.source_tokenizer, LABELS, 16)


def test_texts_without_any_span_are_nothing_to_tag() -> None:
    with pytest.raises(InputError, match="no word of any example has a tag"):
        TokenClassification().labels([TextExample("a cat", "x", label="y")])


@pytest.mark.parametrize(
    "setting", [{"subword_pooling": "last"}, {"window_stride": 0}, {"scheme": "iob"}, {"on_too_long": "drop"}]
)
def test_settings_that_mean_nothing_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"task\.{next(iter(setting))}"):
        TokenClassification(**setting)


def test_windows_and_one_reading_learn_the_same_words() -> None:
    long = tagged(1, 30)
    for longest in (512, 24):
        asked = TokenClassification().featurize([long], tokeniser(), TokenClassification().labels([long]), longest)
        found = {
            word: label for one in asked for word, label in zip(one.metadata.logit_word_ids, one.labels, strict=True)
        }
        assert [TokenClassification().labels([long])[int(found[word])] for word in range(30)] == list(long.tags)


def test_windows_of_a_long_line_take_time_in_proportion_to_its_length() -> None:
    windows = make_windows([1] * 50_000, 62, None)  # with a search over all windows per word this takes a minute
    assert sum(len(window.scored) for window in windows) == 50_000
    assert [word for window in windows for word in window.scored] == list(range(50_000))
