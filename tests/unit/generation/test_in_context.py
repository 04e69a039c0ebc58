"""Classification without training: prompts as written, labels by the likelihood of their words."""

from __future__ import annotations

import math

import pytest
import torch

from qkv import ModelBundle, build
from qkv.data.examples import TextExample
from qkv.errors import InputError
from qkv.families import bert, gpt2
from qkv.generation.prompting import (
    CONTENT_FREE_INPUTS,
    PromptConfig,
    encode_continuations,
    predict_with_prompt,
    sample_demonstrations,
)
from qkv.nn import Decoder, Ragged
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer

LINES = ["Review: a good film\nMood: happy\n\n", "Review: a bad film\nMood: unhappy\n\n", "N/A [MASK] so so"] * 4
TEMPLATE = "Review: {text}\nMood: {label}\n\n"
LABELS = ["bad", "good", "so so"]
WORDS = {"good": "happy", "bad": "unhappy"}
ASKED = [TextExample("a good film", "f:1", label="good"), TextExample("so bad a film it is good", "f:2", label="bad")]
SHOWN = [TextExample("a film", "g:1", label="bad"), TextExample("good, so good", "g:2", label="good")]


@pytest.fixture(scope="module")
def tokeniser() -> Tokenizer:
    return train_tokenizer("byte_bpe", LINES, vocab_size=300, template=gpt2.TOKENIZER_TEMPLATE)


def model(tokeniser: Tokenizer, length: int = 120) -> ModelBundle:
    torch.manual_seed(4)
    shape = gpt2.Config(d_model=16, heads=2, layers=2, max_length=length, init_std=0.4)
    made = build(gpt2.make_spec(shape, target_vocab_size=tokeniser.vocab_size))
    assert isinstance(made, Decoder)
    return ModelBundle(made.eval(), tokeniser, tokeniser)


def likelihood(bundle: ModelBundle, prompt: str, end: str) -> float:
    """log p(end | prompt), from one pass over both."""
    assert bundle.source_tokenizer is not None
    before, whole = bundle.source_tokenizer.encode(prompt), bundle.source_tokenizer.encode(prompt + end)
    assert whole[: len(before)] == before
    with torch.no_grad():
        chances = torch.log_softmax(bundle.model(Ragged.pack([torch.tensor(whole[:-1])])), -1)
    behind = torch.tensor(whole[len(before) :])
    return float(chances[len(before) - 1 :].gather(1, behind[:, None]).sum())


def test_a_prompt_is_the_solved_examples_and_then_the_one_asked_about() -> None:
    how = PromptConfig(template=TEMPLATE, verbalizer=WORDS)
    assert how.render_demonstration(SHOWN[0]) == "Review: a film\nMood: unhappy\n\n"
    assert how.render_query(ASKED[0]) == "Review: a good film\nMood:"
    assert how.label_text("good") == " happy"
    assert how.label_text("so so") == " so so"


def test_braces_in_a_text_are_text() -> None:
    how = PromptConfig(template="{text} / {text_pair} = {label}")
    assert (
        how.render_query(TextExample("{label} {text_pair}", "f:1", text_pair="{text}"))
        == "{label} {text_pair} / {text} ="
    )


@pytest.mark.parametrize("count", [0, 2])
def test_scores_are_the_log_likelihoods_of_the_labels_words(tokeniser: Tokenizer, count: int) -> None:
    bundle, how = model(tokeniser), PromptConfig(template=TEMPLATE, verbalizer=WORDS)
    found = predict_with_prompt(bundle, ASKED, LABELS, SHOWN[:count], how)
    before = "".join(how.render_demonstration(one) for one in SHOWN[:count])
    for example, one in zip(ASKED, found, strict=True):
        for label in LABELS:
            right = likelihood(bundle, before + how.render_query(example), how.label_text(label))
            assert one.scores[label] == pytest.approx(right, abs=1e-4)
        assert one.label == max(one.scores, key=one.scores.__getitem__)


@pytest.mark.parametrize("batch_tokens", [1, 40, 8192])
def test_scores_do_not_depend_on_how_much_is_computed_at_once(tokeniser: Tokenizer, batch_tokens: int) -> None:
    bundle, how = model(tokeniser), {"template": TEMPLATE, "verbalizer": WORDS}
    usual = predict_with_prompt(bundle, ASKED, LABELS, SHOWN, PromptConfig(**how))
    other = predict_with_prompt(bundle, ASKED, LABELS, SHOWN, PromptConfig(**how, batch_tokens=batch_tokens))
    for one, two in zip(usual, other, strict=True):
        assert list(one.scores.values()) == pytest.approx(list(two.scores.values()), abs=1e-4)


def test_the_mean_divides_by_the_number_of_a_labels_tokens(tokeniser: Tokenizer) -> None:
    bundle, how = model(tokeniser), PromptConfig(template=TEMPLATE, verbalizer=WORDS)
    total = predict_with_prompt(bundle, ASKED, LABELS, (), how)
    mean = predict_with_prompt(
        bundle, ASKED, LABELS, (), PromptConfig(template=TEMPLATE, verbalizer=WORDS, length_normalize=True)
    )
    question = how.render_query(ASKED[0])
    before = len(tokeniser.encode(question))
    for label in LABELS:
        size = len(tokeniser.encode(question + how.label_text(label))) - before
        assert mean[0].scores[label] == pytest.approx(total[0].scores[label] / size)


def test_calibration_divides_by_what_is_said_of_texts_without_content(tokeniser: Tokenizer) -> None:
    """Zhao et al. 2021, equation 1 with W = diag(p_cf)^-1: a text without content then prefers no label."""
    bundle, how = model(tokeniser), PromptConfig(template=TEMPLATE, verbalizer=WORDS)
    plain = predict_with_prompt(bundle, [TextExample(text, "x") for text in CONTENT_FREE_INPUTS], LABELS, SHOWN, how)
    chances = {
        label: sum(math.exp(one.scores[label]) / sum(map(math.exp, one.scores.values())) for one in plain) / 3
        for label in LABELS
    }
    raw = predict_with_prompt(bundle, ASKED, LABELS, SHOWN, how)
    found = predict_with_prompt(
        bundle, ASKED, LABELS, SHOWN, PromptConfig(template=TEMPLATE, verbalizer=WORDS, calibrate=True)
    )
    for label in LABELS:
        assert found[0].scores[label] == pytest.approx(raw[0].scores[label] - math.log(chances[label]), abs=1e-4)


def test_the_chance_of_an_answer_is_among_the_labels(tokeniser: Tokenizer) -> None:
    one = predict_with_prompt(model(tokeniser), ASKED, LABELS, (), PromptConfig(template=TEMPLATE))[0]
    raw = {label: math.exp(score) for label, score in one.scores.items()}
    assert one.probability == pytest.approx(raw[one.label] / sum(raw.values()))


def test_where_the_tokeniser_joins_prompt_and_label_the_joint_is_scored_with_the_label(tokeniser: Tokenizer) -> None:
    """Without a space between, "un" and "happy" become other tokens than each alone."""
    how = PromptConfig(template="{text} un{label}")
    ((ids, ends),) = encode_continuations(model(tokeniser), ["Mood: un"], ["happy", "known"], ["f:1"], how)
    for word, end in zip(("happy", "known"), ends, strict=True):
        assert tokeniser.encode(f"Mood: un{word}") == [*ids, *end]


def test_the_same_seed_shows_the_same_examples_and_another_one_others() -> None:
    many = [TextExample(str(i), f"f:{i}", label="good") for i in range(50)]
    assert sample_demonstrations(many, 5, 1) == sample_demonstrations(many, 5, 1)
    assert sample_demonstrations(many, 5, 1) != sample_demonstrations(many, 5, 2)
    assert sample_demonstrations(many, 4, 1) == sample_demonstrations(many, 5, 1)[:4]
    assert len(set(sample_demonstrations(many, 50, 1))) == 50


def test_a_prompt_that_is_too_long_is_refused_by_its_place_or_loses_its_beginning(tokeniser: Tokenizer) -> None:
    how = PromptConfig(template=TEMPLATE, verbalizer=WORDS)
    short = model(tokeniser, length=24)
    with pytest.raises(InputError, match=r"f:1: a prompt of \d+ tokens with its label, and the model takes at most 24"):
        predict_with_prompt(short, ASKED, LABELS, SHOWN, how)
    cut = PromptConfig(template=TEMPLATE, verbalizer=WORDS, on_too_long="truncate")
    prompt = "".join(map(how.render_demonstration, SHOWN)) + how.render_query(ASKED[0])
    ((ids, ends),) = encode_continuations(short, [prompt], [how.label_text(label) for label in LABELS], ["f:1"], cut)
    assert tokeniser.decode(ids) == prompt[-len(tokeniser.decode(ids)) :]
    assert len(ids) + max(map(len, ends)) == 24
    assert len(predict_with_prompt(short, ASKED, LABELS, SHOWN, cut)) == 2


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{text} is", r"needs \{text\} and, once, \{label\}"),
        ("{text} {label} {label}", r"needs \{text\} and, once, \{label\}"),
        ("{label}: {text}", r"\{label\} must come after \{text\}"),
        ("{text} {label} {text_pair}", r"\{text_pair\} must come before \{label\}"),
    ],
)
def test_a_template_that_cannot_be_asked_is_refused(template: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        PromptConfig(template=template)


def test_what_cannot_be_asked_is_refused(tokeniser: Tokenizer) -> None:
    bundle = model(tokeniser)
    with pytest.raises(InputError, match="at least two, each with its own words"):
        predict_with_prompt(bundle, ASKED, ["good", "bad"], (), PromptConfig(verbalizer={"good": "bad"}))
    with pytest.raises(InputError, match="f:1: has no text pair"):
        predict_with_prompt(bundle, ASKED, LABELS, (), PromptConfig(template="{text} {text_pair} {label}"))
    with pytest.raises(InputError, match="3 demonstrations from 2 examples"):
        sample_demonstrations(SHOWN, 3, 1)
    encoder = ModelBundle(
        build(bert.make_spec(bert.Config(d_model=12, heads=2, layers=1, d_ff=16, max_length=16), source_vocab_size=30)),
        tokeniser,
    )
    with pytest.raises(InputError, match="prompting needs a causal language model"):
        predict_with_prompt(encoder, ASKED, LABELS)
