"""Classification without training: prompts as written, labels by the likelihood of their words."""

from __future__ import annotations

import math

import pytest
import torch

from qkv import Loaded, build
from qkv.data.examples import Labelled
from qkv.decode.in_context import EMPTY, Prompting, answer, continuations, shots
from qkv.errors import InputError
from qkv.families import bert, gpt2
from qkv.nn import Decoder, Ragged
from qkv.text.tokeniser import Tokeniser, train_tokeniser

LINES = ["Review: a good film\nMood: happy\n\n", "Review: a bad film\nMood: unhappy\n\n", "N/A [MASK] so so"] * 4
TEMPLATE = "Review: {text}\nMood: {label}\n\n"
LABELS = ["bad", "good", "so so"]
WORDS = {"good": "happy", "bad": "unhappy"}
ASKED = [Labelled("a good film", "f:1", label="good"), Labelled("so bad a film it is good", "f:2", label="bad")]
SHOWN = [Labelled("a film", "g:1", label="bad"), Labelled("good, so good", "g:2", label="good")]


@pytest.fixture(scope="module")
def tokeniser() -> Tokeniser:
    return train_tokeniser("byte_bpe", LINES, size=300, template=gpt2.TEMPLATE)


def model(tokeniser: Tokeniser, length: int = 120) -> Loaded:
    torch.manual_seed(4)
    shape = gpt2.Shape(width=16, heads=2, layers=2, length=length, spread=0.4)
    made = build(gpt2.spec(shape, target=tokeniser.size))
    assert isinstance(made, Decoder)
    return Loaded(made.eval(), tokeniser, tokeniser)


def likelihood(loaded: Loaded, prompt: str, end: str) -> float:
    """log p(end | prompt), from one pass over both."""
    assert loaded.source is not None
    before, whole = loaded.source.encode(prompt), loaded.source.encode(prompt + end)
    assert whole[: len(before)] == before
    with torch.no_grad():
        chances = torch.log_softmax(loaded.model(Ragged.pack([torch.tensor(whole[:-1])])), -1)
    behind = torch.tensor(whole[len(before) :])
    return float(chances[len(before) - 1 :].gather(1, behind[:, None]).sum())


def test_a_prompt_is_the_solved_examples_and_then_the_one_asked_about() -> None:
    how = Prompting(template=TEMPLATE, words=WORDS)
    assert how.solved(SHOWN[0]) == "Review: a film\nMood: unhappy\n\n"
    assert how.question(ASKED[0]) == "Review: a good film\nMood:"
    assert how.said("good") == " happy"
    assert how.said("so so") == " so so"


def test_braces_in_a_text_are_text() -> None:
    how = Prompting(template="{text} / {second} = {label}")
    assert how.question(Labelled("{label} {second}", "f:1", second="{text}")) == "{label} {second} / {text} ="


@pytest.mark.parametrize("count", [0, 2])
def test_scores_are_the_log_likelihoods_of_the_labels_words(tokeniser: Tokeniser, count: int) -> None:
    loaded, how = model(tokeniser), Prompting(template=TEMPLATE, words=WORDS)
    found = answer(loaded, ASKED, LABELS, SHOWN[:count], how)
    before = "".join(how.solved(one) for one in SHOWN[:count])
    for example, one in zip(ASKED, found, strict=True):
        for label in LABELS:
            right = likelihood(loaded, before + how.question(example), how.said(label))
            assert one.scores[label] == pytest.approx(right, abs=1e-4)
        assert one.label == max(one.scores, key=one.scores.__getitem__)


@pytest.mark.parametrize("batch_tokens", [1, 40, 8192])
def test_scores_do_not_depend_on_how_much_is_computed_at_once(tokeniser: Tokeniser, batch_tokens: int) -> None:
    loaded, how = model(tokeniser), {"template": TEMPLATE, "words": WORDS}
    usual = answer(loaded, ASKED, LABELS, SHOWN, Prompting(**how))
    other = answer(loaded, ASKED, LABELS, SHOWN, Prompting(**how, batch_tokens=batch_tokens))
    for one, two in zip(usual, other, strict=True):
        assert list(one.scores.values()) == pytest.approx(list(two.scores.values()), abs=1e-4)


def test_the_mean_divides_by_the_number_of_a_labels_tokens(tokeniser: Tokeniser) -> None:
    loaded, how = model(tokeniser), Prompting(template=TEMPLATE, words=WORDS)
    total = answer(loaded, ASKED, LABELS, (), how)
    mean = answer(loaded, ASKED, LABELS, (), Prompting(template=TEMPLATE, words=WORDS, mean=True))
    question = how.question(ASKED[0])
    before = len(tokeniser.encode(question))
    for label in LABELS:
        size = len(tokeniser.encode(question + how.said(label))) - before
        assert mean[0].scores[label] == pytest.approx(total[0].scores[label] / size)


def test_calibration_divides_by_what_is_said_of_texts_without_content(tokeniser: Tokeniser) -> None:
    """Zhao et al. 2021, equation 1 with W = diag(p_cf)^-1: a text without content then prefers no label."""
    loaded, how = model(tokeniser), Prompting(template=TEMPLATE, words=WORDS)
    plain = answer(loaded, [Labelled(text, "x") for text in EMPTY], LABELS, SHOWN, how)
    chances = {
        label: sum(math.exp(one.scores[label]) / sum(map(math.exp, one.scores.values())) for one in plain) / 3
        for label in LABELS
    }
    raw = answer(loaded, ASKED, LABELS, SHOWN, how)
    found = answer(loaded, ASKED, LABELS, SHOWN, Prompting(template=TEMPLATE, words=WORDS, calibrate=True))
    for label in LABELS:
        assert found[0].scores[label] == pytest.approx(raw[0].scores[label] - math.log(chances[label]), abs=1e-4)


def test_the_chance_of_an_answer_is_among_the_labels(tokeniser: Tokeniser) -> None:
    one = answer(model(tokeniser), ASKED, LABELS, (), Prompting(template=TEMPLATE))[0]
    raw = {label: math.exp(score) for label, score in one.scores.items()}
    assert one.chance == pytest.approx(raw[one.label] / sum(raw.values()))


def test_where_the_tokeniser_joins_prompt_and_label_the_joint_is_scored_with_the_label(tokeniser: Tokeniser) -> None:
    """Without a space between, "un" and "happy" become other tokens than each alone."""
    how = Prompting(template="{text} un{label}")
    ((ids, ends),) = continuations(model(tokeniser), ["Mood: un"], ["happy", "known"], ["f:1"], how)
    for word, end in zip(("happy", "known"), ends, strict=True):
        assert tokeniser.encode(f"Mood: un{word}") == [*ids, *end]


def test_the_same_seed_shows_the_same_examples_and_another_one_others() -> None:
    many = [Labelled(str(i), f"f:{i}", label="good") for i in range(50)]
    assert shots(many, 5, 1) == shots(many, 5, 1)
    assert shots(many, 5, 1) != shots(many, 5, 2)
    assert shots(many, 4, 1) == shots(many, 5, 1)[:4]
    assert len(set(shots(many, 50, 1))) == 50


def test_a_prompt_that_is_too_long_is_refused_by_its_place_or_loses_its_beginning(tokeniser: Tokeniser) -> None:
    how = Prompting(template=TEMPLATE, words=WORDS)
    short = model(tokeniser, length=24)
    with pytest.raises(InputError, match=r"f:1: a prompt of \d+ tokens with its label, and the model takes at most 24"):
        answer(short, ASKED, LABELS, SHOWN, how)
    cut = Prompting(template=TEMPLATE, words=WORDS, too_long="truncate")
    prompt = "".join(map(how.solved, SHOWN)) + how.question(ASKED[0])
    ((ids, ends),) = continuations(short, [prompt], [how.said(label) for label in LABELS], ["f:1"], cut)
    assert tokeniser.decode(ids) == prompt[-len(tokeniser.decode(ids)) :]
    assert len(ids) + max(map(len, ends)) == 24
    assert len(answer(short, ASKED, LABELS, SHOWN, cut)) == 2


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{text} is", r"needs \{text\} and, once, \{label\}"),
        ("{text} {label} {label}", r"needs \{text\} and, once, \{label\}"),
        ("{label}: {text}", r"\{label\} has to come behind \{text\}"),
        ("{text} {label} {second}", r"\{second\} has to come before \{label\}"),
    ],
)
def test_a_template_that_cannot_be_asked_is_refused(template: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Prompting(template=template)


def test_what_cannot_be_asked_is_refused(tokeniser: Tokeniser) -> None:
    loaded = model(tokeniser)
    with pytest.raises(InputError, match="at least two, each with words of its own"):
        answer(loaded, ASKED, ["good", "bad"], (), Prompting(words={"good": "bad"}))
    with pytest.raises(InputError, match="f:1: has no second text"):
        answer(loaded, ASKED, LABELS, (), Prompting(template="{text} {second} {label}"))
    with pytest.raises(InputError, match="3 examples to show out of 2"):
        shots(SHOWN, 3, 1)
    encoder = Loaded(
        build(bert.spec(bert.Shape(width=12, heads=2, layers=1, hidden=16, length=16), source=30)), tokeniser
    )
    with pytest.raises(InputError, match="prompting needs a language model"):
        answer(encoder, ASKED, LABELS)
