"""Tasks that judge whole texts: classes, numbers, several labels, choices; and the benchmarks' own settings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import qkv
from qkv.data.examples import Label, MultipleChoiceExample, Span, TextExample
from qkv.data.formats import read
from qkv.data.formats.registry import FORMATS
from qkv.errors import InputError
from qkv.tasks import get_task, text_inputs
from qkv.tasks.base import apply_head_overrides, compute_metrics
from qkv.tasks.benchmark_defaults import DEFAULTS, default_settings
from qkv.tasks.predictor import Predictor

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from checkpoints import checkpoint

LABELS = ("bad", "good", "so so")


def text(label: Label = None, said: str = "the cat", second: str | None = None, **others: object) -> TextExample:
    return TextExample(said, "file:3", second, label, **others)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> qkv.ModelBundle:
    return qkv.load(checkpoint(tmp_path_factory.mktemp("judge"), "sequence"))


# ---- several labels -------------------------------------------------------------------------------------------------


def test_each_label_is_a_target_of_its_own(words: qkv.ModelBundle) -> None:
    task = get_task("multi_label")
    examples = [text(("good", "bad")), text(()), text("so so")]
    assert task.labels(examples) == LABELS
    batch = task.collate(task.featurize(examples, words.source_tokenizer, LABELS, 16), True)
    assert batch.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_a_label_counts_from_the_threshold_on(words: qkv.ModelBundle) -> None:
    (one,) = get_task("multi_label").featurize([text()], words.source_tokenizer, LABELS, 16)
    logits = torch.logit(torch.tensor([[0.2, 0.45, 0.9]]))
    assert get_task("multi_label").postprocess([(one, logits)], text(), LABELS) == {"so so"}
    assert get_task("multi_label", threshold=0.4).postprocess([(one, logits)], text(), LABELS) == {"good", "so so"}
    assert get_task("multi_label", threshold=0.95).postprocess([(one, logits)], text(), LABELS) == frozenset()


def test_sets_of_labels_are_scored_by_f1_and_as_a_whole() -> None:
    said = [frozenset({"good"}), frozenset(), frozenset({"bad", "good"})]
    found = compute_metrics(get_task("multi_label"), said, [text(("good",)), text(()), text(("bad",))], LABELS)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["f1_micro"] == pytest.approx(4 / 5)
    assert found["f1_macro"] == pytest.approx((2 / 3 + 1) / 2)


@pytest.mark.parametrize("task", ["text_classification", "image_classification", "multi_label", "token_classification"])
def test_a_class_without_labels_and_predictions_is_in_no_macro_average(task: str) -> None:
    pairs = [("good", "good"), ("bad", "good"), ("bad", "bad")]
    wrap = {"multi_label": lambda label: frozenset((label,)), "token_classification": lambda label: (label,)}
    predictions, golds = zip(*([wrap.get(task, str)(label) for label in pair] for pair in pairs), strict=True)
    scores = {}
    for metric in get_task(task).metrics(LABELS, predictions, golds):
        scores |= metric(predictions, golds)
    names = ("f1_macro", "precision_macro", "recall_macro")
    assert [scores[name] for name in names] == pytest.approx([2 / 3, 3 / 4, 3 / 4])


def test_predict_lists_the_labels_above_the_threshold(tmp_path: Path) -> None:
    fresh = qkv.load(checkpoint(tmp_path / "one", "sequence"))
    apply_head_overrides(get_task("multi_label"), fresh.model)
    qkv.save(fresh, tmp_path / "several")
    bundle = qkv.load(tmp_path / "several")
    frame = bundle.source_tokenizer.encode_plus("a cat sat")
    with torch.no_grad():
        ids = qkv.Ragged.from_lengths(torch.tensor(frame.ids), [len(frame.ids)])
        chances = torch.sigmoid(bundle.model(ids, torch.tensor(frame.token_type_ids))[0])
    middle = float(chances.sort().values[1])
    (prediction,) = Predictor(bundle, get_task("multi_label", threshold=middle - 1e-4))(["a cat sat"])
    wanted = sorted(zip(chances.tolist(), LABELS, strict=True), reverse=True)[:2]
    assert prediction.text == ", ".join(name for _, name in wanted)
    assert prediction.fields["labels"] == pytest.approx({name: chance for chance, name in wanted}, abs=1e-5)
    (none,) = Predictor(bundle, get_task("multi_label", threshold=0.9999))(["a cat sat"])
    assert (none.prediction, none.text, none.alternatives) == (frozenset(), "", ())


@pytest.mark.parametrize("threshold", [-0.1, 1.2])
def test_a_threshold_is_a_probability(threshold: float) -> None:
    with pytest.raises(InputError, match=r"task\.threshold"):
        get_task("multi_label", threshold=threshold)


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_numbers_are_learned_as_they_are(words: qkv.ModelBundle) -> None:
    task = get_task("regression")
    assert task.labels([text(2.5), text(4.0)]) == ("score",)
    batch = task.collate(task.featurize([text(2.5), text(4.0)], words.source_tokenizer, ("score",), 16), True)
    assert batch.labels.tolist() == [2.5, 4.0]
    total, targets = task.loss(torch.tensor([[2.0], [7.0]]), batch)
    assert (float(total), targets) == (9.25, 2)


def test_numbers_that_are_all_equal_are_refused_with_their_lines() -> None:
    examples = [TextExample("the cat", f"a.csv:{line}", None, 2.5) for line in (2, 3, 4)]
    with pytest.raises(InputError, match=r"^a\.csv:2 to a\.csv:4: all have the label 2\.5; give"):
        get_task("regression").labels(examples)


# ---- choices --------------------------------------------------------------------------------------------------------


def test_each_option_is_a_sequence_with_its_context(words: qkv.ModelBundle) -> None:
    (one,) = get_task("multiple_choice").featurize(
        [MultipleChoiceExample("the cat", ("sat", "a mat"), 1, "c", "on")], words.source_tokenizer, (), 16
    )
    assert [words.source_tokenizer.ids_to_display(sequence) for sequence in one.input_ids] == [
        ["[CLS]", "the", "cat", "[SEP]", "on", "sat", "[SEP]"],
        ["[CLS]", "the", "cat", "[SEP]", "on", "a", "mat", "[SEP]"],
    ]
    assert list(one.token_type_ids[0]) == [0, 0, 0, 0, 1, 1, 1]
    assert one.labels == (1.0,)
    assert one.num_logits(is_token_level=False) == 2


def test_examples_may_have_different_numbers_of_options(words: qkv.ModelBundle) -> None:
    task = get_task("multiple_choice")
    examples = [
        MultipleChoiceExample("the cat", ("sat", "on", "a"), 2, "c"),
        MultipleChoiceExample("the", ("cat", "dog"), 0, "c"),
    ]
    batch = task.collate(task.featurize(examples, words.source_tokenizer, (), 16), True)
    assert batch.choices.lengths_list == (3, 2)
    logits = torch.tensor([[0.0], [1.0], [2.0], [3.0], [3.0]])
    wanted = -torch.log_softmax(torch.tensor([0.0, 1.0, 2.0]), 0)[2] + torch.log(torch.tensor(2.0))
    assert float(task.loss(logits, batch).total) == pytest.approx(float(wanted))


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (MultipleChoiceExample("the", (), None, "file:3"), "file:3: there are no choices"),
        (MultipleChoiceExample("the", ("a", " "), None, "file:3"), "file:3: a choice is empty"),
        (
            MultipleChoiceExample("the", ("a", "cat"), 2, "file:3"),
            "file:3: the answer is 2, but the choices are 0 to 1",
        ),
        (MultipleChoiceExample("the", ("a", "cat"), -1, "file:3"), "file:3: the answer is -1"),
    ],
)
def test_bad_choices_are_named(example: MultipleChoiceExample, said: str, words: qkv.ModelBundle) -> None:
    with pytest.raises(InputError, match=said):
        get_task("multiple_choice").featurize([example], words.source_tokenizer, (), 16)


# ---- what all share -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "example", "said"),
    [
        ("text_classification", text("awful"), "file:3: label 'awful' was never seen in training"),
        ("text_classification", text(3.0), "file:3: the label 3.0 is not a single class; see the task regression"),
        ("text_classification", text(("good", "bad")), "is not a single class; see the task multi_label"),
        ("text_classification", text("good", " "), "file:3: the text is empty"),
        ("multi_label", text(("good", "awful")), "file:3: label 'awful' was never seen in training"),
        ("multi_label", text(1.5), "file:3: the label 1.5 is a number"),
        ("regression", text("good"), "file:3: the label 'good' is not a number"),
        ("regression", text(1.0, ""), "file:3: the text is empty"),
    ],
)
def test_bad_examples_are_named(task: str, example: TextExample, said: str, words: qkv.ModelBundle) -> None:
    with pytest.raises(InputError, match=said):
        get_task(task).featurize([text(), example], words.source_tokenizer, LABELS, 16)


@pytest.mark.parametrize("task", ["text_classification", "multi_label", "regression"])
def test_a_long_text_is_cut_and_said_or_refused(task: str, words: qkv.ModelBundle) -> None:
    long = text(None, "the cat " * 20, "a dog")
    (one,) = get_task(task).featurize([long], words.source_tokenizer, LABELS, 12)
    assert one.truncated
    assert one.length == 12
    assert words.source_tokenizer.ids_to_display(one.input_ids[0])[-4:] == ["[SEP]", "a", "dog", "[SEP]"]
    with pytest.raises(InputError, match=r"file:3: 45 tokens.*task\.on_too_long"):
        get_task(task, on_too_long="refuse").featurize([long], words.source_tokenizer, LABELS, 12)


def test_more_texts_than_are_framed_at_once_keep_their_numbers(
    words: qkv.ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_inputs, "_CHUNK_SIZE", 3)
    asked = get_task("text_classification").featurize(
        [text(said="cat " * (1 + i)) for i in range(8)], words.source_tokenizer, LABELS, 16
    )
    assert [(one.example_index, one.length) for one in asked] == [(i, i + 3) for i in range(8)]


# ---- GLUE and SuperGLUE ---------------------------------------------------------------------------------------------


def test_spans_are_marked_in_both_texts() -> None:
    spans = (Span(4, 7), Span(8, 11), Span(0, 1, in_text_pair=True))
    example = text(None, "the cat sat", "a dog", spans=spans)
    assert text_inputs.get_texts(example, mark_spans=True) == ("the *cat* #sat#", "*a* dog")
    assert text_inputs.get_texts(example) == ("the cat sat", "a dog")
    glued = text(None, "the cat", spans=(Span(4, 5), Span(5, 7)))
    assert text_inputs.get_texts(glued, mark_spans=True) == "the *c*#at#"


def test_a_span_outside_its_text_is_named() -> None:
    with pytest.raises(InputError, match="file:3: the span 4–9 is not inside its text"):
        text_inputs.get_texts(text(None, "the cat", spans=(Span(4, 9),)), mark_spans=True)


def test_multirc_has_the_f1_of_answers_and_the_exact_match_of_questions() -> None:
    task = get_task("text_classification", **default_settings("superglue:MultiRC", "text_classification"))
    examples = [text(label, group=group) for label, group in (("true", "1"), ("false", "1"), ("true", "2"))]
    labels = task.labels(examples)
    found = compute_metrics(task, ["true", "true", "true"], examples, labels)
    assert found["exact_match"] == 0.5
    assert found["f1"] == pytest.approx(0.8)
    assert task.primary_metric(labels) == "f1"


def test_benchmarks_settings_are_settings_of_their_tasks() -> None:
    for name, (task, settings) in DEFAULTS.items():
        assert name in FORMATS
        assert get_task(task, **default_settings(name.lower(), task)) == get_task(task, **settings)
    assert default_settings("glue:CoLA", "multi_label") == {}
    assert default_settings("csv", "text_classification") == {}


def test_a_positive_class_that_nobody_has_is_named() -> None:
    with pytest.raises(InputError, match=r"task\.positive_label: no example has the label 'god'.*good"):
        get_task("text_classification", positive_label="god").labels([text("good"), text("bad")])


def test_copa_and_record_read_from_their_files_are_asked(words: qkv.ModelBundle, tmp_path: Path) -> None:
    copa = '{"premise": "the cat", "choice1": "a dog", "choice2": "the mat", "question": "cause", "label": 1, "idx": 0}'
    (tmp_path / "copa.jsonl").write_text(copa + "\n")
    (one,) = get_task("multiple_choice").featurize(
        read("superglue:COPA", tmp_path / "copa.jsonl"), words.source_tokenizer, (), 16
    )
    assert (len(one.input_ids), one.labels) == (2, (1.0,))
    record = (
        '{"passage": {"text": "a cat sat on the mat", "entities": [{"start": 2, "end": 4}, {"start": 17, "end": 19}]}, '
        '"qas": [{"query": "the @placeholder sat", "answers": [{"start": 2, "end": 4}], "idx": 0}], "idx": 1}'
    )
    (tmp_path / "record.jsonl").write_text(record + "\n")
    (question,) = read("superglue:ReCoRD", tmp_path / "record.jsonl")
    task = get_task("question_answering")
    (one,) = task.featurize([question], words.source_tokenizer, (), 32)
    found = task.postprocess([(one, torch.randn(one.length, 2))], question, ())
    assert {stretch.text for stretch in found.n_best} == {"cat", "mat"}
    assert compute_metrics(task, [found], [question], ())["exact_match"] == (100.0 if found.text == "cat" else 0.0)


def test_labels_with_commas_between_are_not_taken_for_one_label():
    joined = [TextExample("a", "mine.csv:2", label="x"), TextExample("b", "mine.csv:3", label="x,y")]
    with pytest.raises(
        InputError, match=r"^mine.csv:3: 'x,y' would be a single label; .* --reader-option label_separator=,$"
    ):
        get_task("multi_label").labels(joined)
    assert get_task("multi_label").labels([*joined, TextExample("c", "mine.csv:4", label=("z",))]) == ("x", "x,y", "z")
