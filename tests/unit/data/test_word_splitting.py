"""Raw text is split into words as the training data of a tagger is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.examples import TaggedExample, TextExample
from qkv.data.formats.conll import join_words
from qkv.data.tagging_schemes import spans_to_tags, split_words
from qkv.data.word_splitting import DEFAULT_RULES, WordRules, learn_word_rules, split_at_spaces, split_by_rules
from qkv.errors import InputError
from qkv.tasks.base import get_task


def sentence(*words: str, text: str | None = None) -> TaggedExample:
    """A sentence of words with spaces between them, or of the words of a text."""
    joined, starts = join_words(words)
    if text is not None:
        joined, starts, end = text, (), 0
        for word in words:
            end = text.index(word, end) + len(word)
            starts = (*starts, end - len(word))
    return TaggedExample(joined, words, starts, ("O",) * len(words), "a:1")


CONLL = [sentence("The", "U.S.", "said", "Mr.", "X", "'s", "New-York", "visit", "(", "...", ")", "ended", ".")] * 3


def words_of(text: str, rules: WordRules) -> list[str]:
    return list(split_by_rules(text, rules)[0])


def test_words_with_punctuation_of_the_training_data_stay_whole() -> None:
    rules = learn_word_rules(CONLL)
    text = "Mr. Y's New-Jersey trip to the U.K. (and the U.S.) ended..."
    expected = "Mr. Y 's New-Jersey trip to the U.K. ( and the U.S. ) ended ..."
    assert words_of(text, rules) == expected.split()


def test_a_hyphen_that_the_training_data_splits_is_split() -> None:
    rules = learn_word_rules([sentence("well", "-", "known", ".", text="well-known.")])
    assert words_of("a half-baked cake", rules) == ["a", "half", "-", "baked", "cake"]


def test_marks_that_are_part_of_words_in_the_training_data_stay_at_their_ends() -> None:
    rules = learn_word_rules([sentence("@ann", "loves", "#food", "!"), sentence("@bob", "#yes", "!")])
    assert words_of("@eve likes #tea!", rules) == ["@eve", "likes", "#tea", "!"]
    rules = learn_word_rules([sentence("no.", "yes."), sentence("well,", "so.")])
    assert words_of("fine, thanks.", rules) == ["fine,", "thanks."]


def test_slots_are_predicted_for_the_words_that_they_were_trained_on() -> None:
    examples = [spans_to_tags(TextExample("at 7:30 p.m. in the U.S., please", "a:1"))]
    rules = learn_word_rules(examples)
    text = "a table at 8:15 a.m. (U.K.)"
    assert split_by_rules(text, rules) == split_words(text)


def test_without_training_data_marks_are_detached_at_the_ends_of_words() -> None:
    assert words_of("The U.S., not http://a.b/c, isn't (so) bad!", DEFAULT_RULES) == [
        *("The", "U.S.", ",", "not", "http://a.b/c", ",", "isn't", "(", "so", ")", "bad", "!")
    ]


@given(st.text(), st.sampled_from([DEFAULT_RULES, WordRules(), learn_word_rules(CONLL)]))
def test_the_words_of_any_text_are_all_its_characters_except_white_space(text: str, rules: WordRules) -> None:
    words, starts = split_by_rules(text, rules)
    assert all(words)
    assert all(text[start : start + len(word)] == word for word, start in zip(words, starts, strict=True))
    assert "".join(words) == "".join(split_at_spaces(text)[0])


def test_a_task_saves_the_rules_of_its_training_data_and_predicts_with_them() -> None:
    task = get_task("token_classification")
    settings = task.infer_settings(CONLL)
    assert settings["word_rules"]["words"][:1] == ["U.S."]
    trained = get_task("token_classification", **settings)
    assert trained.infer_settings(CONLL) == {}
    assert trained.parse_line("Mr. Z", "x").words == ("Mr.", "Z")
    assert task.parse_line("Mr. Z", "x").words == ("Mr", ".", "Z")


def test_words_that_are_already_split_stay_as_they_are() -> None:
    example = get_task("token_classification", pre_split=True).parse_line("a.b (c) don't", "x")
    assert (example.words, example.word_starts) == (("a.b", "(c)", "don't"), (0, 4, 8))


@pytest.mark.parametrize("rules", [{"inner": 3}, {"words": "a"}, {"words": [""]}, {"outer": ""}, {"initials": "yes"}])
def test_wrong_rules_are_refused(rules: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"task\.word_rules"):
        get_task("token_classification", word_rules=rules)


def test_a_tag_that_all_words_have_is_refused() -> None:
    examples = [sentence("EU", "rejects")]
    with pytest.raises(InputError, match="a:1 to a:1: no word of any example has a tag"):
        get_task("token_classification").labels(examples)
    constant = [TaggedExample("a b", ("a", "b"), (0, 2), ("0", "0"), "a:1")]
    with pytest.raises(InputError, match="all words have the tag '0'; check the column"):
        get_task("token_classification").labels(constant)
