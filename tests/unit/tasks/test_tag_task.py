"""Tags of words over their pieces: which token learns which tag, windows, and what no token says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from task_models import model, tagged, tokeniser

import qkv
from qkv.data.examples import Labelled, Span, Tagged
from qkv.data.tasks.conll import spaced
from qkv.errors import InputError
from qkv.evaluate.classification import TokenAccuracy
from qkv.evaluate.entities import EntityF1
from qkv.nn.words import by_word
from qkv.objectives.label import judged
from qkv.tasks.tag import Tag, chunks, spread
from qkv.tasks.task import logits_of, predict, score

sys.path.append(str(Path(__file__).parents[1] / "weights"))
from checkpoints import checkpoint

LABELS = ("B-X", "I-X", "O")


def sentence(*words: str, tags: tuple[str, ...] | None = None) -> Tagged:
    text, starts = spaced(words)
    return Tagged(text, words, starts, tags, "file:7")


UNHAPPY = sentence("the", "unhappyly", "cat", tags=("O", "B-X", "O"))  # [CLS] the un ##happy ##ly cat [SEP]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> qkv.Loaded:
    return qkv.load(checkpoint(tmp_path_factory.mktemp("tagger"), "token", LABELS))


def test_a_words_first_piece_learns_its_tag(words: qkv.Loaded) -> None:
    (one,) = Tag().ask([UNHAPPY], words.source, LABELS, 16)
    assert words.source.tokens(one.sequences[0]) == ["[CLS]", "the", "un", "##happy", "##ly", "cat", "[SEP]"]
    assert one.at == (1, 2, 5)
    assert one.labels == (2.0, 0.0, 2.0)


def test_all_pieces_learn_it_and_a_chunk_begins_once(words: qkv.Loaded) -> None:
    (one,) = Tag(word="all").ask([UNHAPPY], words.source, LABELS, 16)
    assert one.at == (1, 2, 3, 4, 5)
    assert one.labels == (2.0, 0.0, 1.0, 1.0, 2.0)


def test_of_all_pieces_the_first_decides(words: qkv.Loaded) -> None:
    task = Tag(word="all")
    (one,) = task.ask([UNHAPPY], words.source, LABELS, 16)
    logits = torch.eye(3)[torch.tensor([2, 0, 2, 2, 2])]
    assert task.read([(one, logits)], UNHAPPY, LABELS) == ("O", "B-X", "O")


def test_the_mean_of_a_words_pieces_is_judged(words: qkv.Loaded) -> None:
    task = Tag(word="mean")
    batch = task.prepare(task.ask([UNHAPPY, UNHAPPY], words.source, LABELS, 16), True)
    assert batch.words[0] == (None, 0, 1, 1, 1, 2, None)
    assert batch.labels.tolist() == [2, 0, 2] * 2
    with torch.no_grad():
        found = judged(words.model, batch)
        hidden = words.model.encode(batch.source, batch.segments).hidden
        wanted = words.model.head(by_word(hidden, batch.words, "mean").values)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("word", ["first", "mean"])
def test_a_saved_tagger_predicts_as_it_was_trained(word: str, tmp_path: Path) -> None:
    task, example = Tag(word=word), replace(tagged(3), tags=None)
    loaded = model(task, LABELS)
    qkv.save(loaded, tmp_path / "run")
    ((found,),) = qkv.predict(qkv.load(tmp_path / "run"), [example.text])
    ((_, logits),) = logits_of(task, loaded, [example])[0]
    assert tuple(part.label for part in found.parts) == predict(task, loaded, [example])[0]
    scores = torch.log_softmax(logits, -1).amax(-1).tolist()
    assert [part.score for part in found.parts] == pytest.approx(scores, abs=1e-5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(6, 30), st.none() | st.integers(1, 12))
def test_every_word_is_judged_in_exactly_one_window_where_it_stands_deepest(
    sizes: list[int], room: int, stride: int | None
) -> None:
    windows = spread(sizes, room, stride)
    assert sorted(word for window in windows for word in window.judged) == list(range(len(sizes)))
    for window in windows:
        assert sum(sizes[window.begin : window.end]) <= room
        for word in window.judged:
            assert window.begin <= word < window.end
            edges = [abs(word - edge) for edge, is_end in ((window.begin, window.begin == 0),
                     (window.end - 1, window.end == len(sizes))) if not is_end]  # fmt: skip
            others = [w for w in windows if w.begin <= word < w.end and w.begin > 0 and w.end < len(sizes)]
            assert all(min(word - w.begin, w.end - 1 - word) <= min(edges, default=99) for w in others)


def test_a_long_sentence_is_read_in_windows(words: qkv.Loaded) -> None:
    long = sentence(*["the", "cat", "sat"] * 10, tags=("O", "B-X", "I-X") * 10)
    asked = Tag(stride=4).ask([long], words.source, LABELS, 12)
    assert len(asked) > 3
    assert all(len(one.sequences[0]) <= 12 and not one.cut for one in asked)
    assert all(one.sequences[0][0] == 2 and one.sequences[0][-1] == 3 for one in asked)  # [CLS] … [SEP]
    found = [word for one in asked for word in one.about.words]
    assert sorted(found) == list(range(30))
    for one in asked:
        tokens = words.source.tokens([one.sequences[0][place] for place in one.at])
        assert tokens == [long.words[word] for word in one.about.words]


def test_a_word_without_any_token_is_outside(words: qkv.Loaded) -> None:
    odd = sentence("the", "\u200d", "cat", tags=("O", "O", "B-X"))
    task = Tag()
    (one,) = task.ask([odd], words.source, LABELS, 16)
    assert one.about.words == (0, 2)
    assert task.read([(one, torch.eye(3)[:2])], odd, LABELS) == ("B-X", "O", "I-X")
    alone = sentence("\u200d", tags=("O",))
    assert task.ask([alone], words.source, LABELS, 16) == []
    assert predict(task, words, [alone]) == [("O",)]


def test_a_word_without_any_token_is_what_most_of_its_sentence_is_where_nothing_is_outside(words: qkv.Loaded) -> None:
    odd = sentence("the", "\u200d", "cat", "sat", tags=("D", "N", "N", "V"))
    task = Tag()
    (one,) = task.ask([odd], words.source, ("D", "N", "V"), 16)
    said = torch.eye(3)[torch.tensor([0, 1, 1])]
    assert task.read([(one, said)], odd, ("D", "N", "V")) == ("D", "N", "N", "N")
    assert task.read([], odd, ("D", "N", "V")) == ("D",) * 4


def test_truncation_is_said_and_what_is_behind_it_counts_as_outside(words: qkv.Loaded) -> None:
    long = sentence(*["cat"] * 30, tags=("B-X",) * 30)
    task = Tag(too_long="truncate")
    (one,) = task.ask([long], words.source, LABELS, 12)
    assert one.cut
    assert len(one.at) == 10
    found = task.read([(one, torch.eye(3)[[0] * 10])], long, LABELS)
    assert found == ("B-X",) * 10 + ("O",) * 20
    with pytest.raises(InputError, match=r"file:7: 32 tokens, and the model takes at most 12"):
        Tag(too_long="refuse").ask([long], words.source, LABELS, 12)


def test_a_word_of_more_tokens_than_the_model_takes_is_read_in_part(words: qkv.Loaded) -> None:
    huge = sentence("un" + "happy" * 10, "cat", tags=("O", "O"))
    asked = Tag().ask([huge], words.source, LABELS, 9)
    assert [one.about.words for one in asked] == [(0,), (1,)]
    assert max(one.length for one in asked) == 9


def test_entities_have_characters() -> None:
    text = "the cat's mat"
    example = Tagged(text, ("the", "cat", "'s", "mat"), (0, 4, 7, 10), None, "file:1")
    found = chunks(example, ("O", "B-X", "I-X", "B-X"))
    assert [(text[span.start : span.end], span.name) for span in found] == [("cat's", "X"), ("mat", "X")]


def test_spans_of_a_text_are_tags_of_its_words(words: qkv.Loaded) -> None:
    example = Labelled("the cat sat", "file:2", spans=(Span(4, 11, "X"),))
    task = Tag()
    assert task.labels([example]) == LABELS
    assert task.truth(example) == ("O", "B-X", "I-X")
    assert len(predict(task, words, [example])[0]) == 3


def test_the_deciding_figure_goes_by_the_tags() -> None:
    assert Tag().decides(LABELS) == "f1_micro"
    assert Tag().decides(("B-X", "I-X", "E-X", "S-X", "O")) == "f1_micro"
    assert Tag().decides(("NOUN", "VERB")) == "accuracy"
    assert Tag(metric="f1_macro").decides(("NOUN", "VERB")) == "f1_macro"
    both = Tag().metrics(LABELS, [("O",)], [("B-X",)])
    assert [type(metric) for metric in both] == [EntityF1, TokenAccuracy]
    assert score(Tag(), [("B-X", "I-X")], [sentence("a", "b", tags=("B-X", "O"))], LABELS)["f1_micro"] == 0.0
    assert score(Tag(), [("B-X", "I-X")], [sentence("a", "b", tags=("B-X", "O"))], LABELS)["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (sentence("a", tags=("B-Y",)), "file:7: label 'B-Y' of 'a' was never seen in training"),
        (Tagged("a b", ("a", "b"), (0, 2), ("O",), "file:7"), "2 words have 1 tags"),
        (sentence(tags=()), "file:7: has no words"),
    ],
)
def test_bad_examples_are_named(example: Tagged, said: str, words: qkv.Loaded) -> None:
    with pytest.raises(InputError, match=said):
        Tag().ask([example], words.source, LABELS, 16)


def test_texts_without_any_span_are_nothing_to_tag() -> None:
    with pytest.raises(InputError, match="no word of any example has a tag"):
        Tag().labels([Labelled("a cat", "x", label="y")])


@pytest.mark.parametrize("setting", [{"word": "last"}, {"stride": 0}, {"scheme": "iob"}, {"too_long": "drop"}])
def test_settings_that_mean_nothing_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"task\.{next(iter(setting))}"):
        Tag(**setting)


def test_windows_and_one_reading_learn_the_same_words() -> None:
    long = tagged(1, 30)
    for longest in (512, 24):
        asked = Tag().ask([long], tokeniser(), Tag().labels([long]), longest)
        found = {word: label for one in asked for word, label in zip(one.about.words, one.labels, strict=True)}
        assert [Tag().labels([long])[int(found[word])] for word in range(30)] == list(long.tags)
