"""Generation settings: contradictions, options of the command line, and rules that transformers has no test for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from writers import Written, sources, tiny

from qkv.errors import InputError
from qkv.generation import GenerationConfig, generate
from qkv.generation.config import describe_settings, parse_options, validate_search
from qkv.generation.logits_processors import filter_for_sampling


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 3, "num_beam_groups": 2}, "cannot be divided into"),
        ({"diversity_penalty": 0.5}, "needs num_beam_groups"),
        ({"num_beams": 2, "do_sample": True}, "num_beams and do_sample exclude each other"),
        ({"top_k": 5}, "top_k has an effect on sampling only"),
        ({"typical_p": 0.5}, "typical_p has an effect on sampling only"),
        ({"min_new_tokens": 5, "max_new_tokens": 3}, "min_new_tokens=5 exceeds max_new_tokens=3"),
        ({"min_new_tokens": 5, "max_length": 5}, "min_new_tokens=5 exceeds max_length=5"),
        ({"min_length": 6, "max_length": 5}, "min_length=6 exceeds max_length=5; raise the latter, or lower the"),
        ({"coverage_penalty": 0.2}, "coverage_penalty ranks beams; set num_beams above 1"),
        ({"coverage_penalty": -1.0, "num_beams": 2}, "coverage_penalty must be at least 0"),
        ({"coverage_penalty": 0.2, "num_beams": 4, "num_beam_groups": 2}, "coverage_penalty and num_beam_groups excl"),
        ({"ensemble": "median"}, "ensemble is probabilities or log_probabilities, not 'median'"),
        ({"bad_words_ids": ((),)}, "bad_words_ids: a word is empty"),
        ({"stop_strings": ("",)}, "a stop string is empty"),
        ({"forced_bos_token_id": 4, "suppress_tokens": (4,)}, "token 4 is forced and suppressed"),
        ({"early_stopping": "always"}, "early_stopping is false or true or never"),
        ({"temperature": True}, "temperature must be a number, not"),
        ({"num_beams": "two"}, "num_beams must be a whole number, not 'two'"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"stop_strings": "e"}, "stop_strings must be a list of texts, not 'e'"),
        ({"bad_words_ids": [3]}, "bad_words_ids must be a list of lists of whole numbers, not"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate_search(GenerationConfig(**settings))


def test_the_settings_in_force_are_described_with_their_origin() -> None:
    base = GenerationConfig(num_beams=4, length_penalty=0.6, early_stopping=True)
    config = replace(base, num_beams=1, length_penalty=0.6, stop_strings=("END",), bad_words_ids=((3,),))
    description = describe_settings(config, base, "checkpoint")
    assert "length_penalty=0.6, early_stopping=true (checkpoint)" in description
    assert "num_beams=1, bad_words_ids=[[3]], stop_strings=['END'] (user)" in description
    assert describe_settings(GenerationConfig(), GenerationConfig(), "recipe") == ""


def test_options_of_the_command_line_are_fields_of_the_config() -> None:
    options = ["no_repeat_ngram_size=3", "bad_words_ids=[[3], [4, 5]]", "stop_strings=END", "early_stopping=never"]
    assert parse_options(options, "--generation") == {
        "no_repeat_ngram_size": 3,
        "bad_words_ids": ((3,), (4, 5)),
        "stop_strings": ("END",),
        "early_stopping": "never",
    }


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("num_beams", "is not KEY=VALUE"),
        ("num_beam=2", "did you mean 'num_beams'"),
        ("num_beams=many", "num_beams must be a whole number, not 'many'"),
        ("num_beams=0", "num_beams must be at least 1"),
    ],
)
def test_a_bad_option_is_one_line(option: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_options([option], "--generation")


def test_each_option_is_checked_by_itself() -> None:
    options = ["num_beam_groups=2", "diversity_penalty=0.5"]  # the beams may come from elsewhere
    assert parse_options(options, "--generation") == {"num_beam_groups": 2, "diversity_penalty": 0.5}


def test_lists_are_accepted_for_tuples() -> None:
    config = GenerationConfig(stop_strings=["e"], bad_words_ids=[[3], [4, 5]])  # type: ignore[arg-type]
    assert config == GenerationConfig(stop_strings=("e",), bad_words_ids=((3,), (4, 5)))
    assert hash(config) is not None
    validate_search(config)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match="suppress_tokens: token 99 is not in the vocabulary of 11 tokens"):
        generate(tiny("transformer"), sources(3), GenerationConfig(suppress_tokens=(99,)))


def test_groups_of_a_diverse_search_begin_with_different_tokens() -> None:
    """Three first tokens of p = 0.5, 0.3, 0.2: a high penalty makes each group take another one."""
    model = Written({(): {4: 0.5, 5: 0.3, 6: 0.2}}, 9)
    settings: dict[str, Any] = {"num_beams": 3, "n_best": 3, "max_new_tokens": 3}
    config = GenerationConfig(**settings, num_beam_groups=3, diversity_penalty=50.0)
    found = generate(model, sources(2), config)[0]
    assert sorted(hypothesis.tokens for hypothesis in found) == [[4], [5], [6]]
    alike = generate(model, sources(2), GenerationConfig(**settings, num_beam_groups=3))[0]
    assert [hypothesis.tokens for hypothesis in alike] == [[4]] * 3


def test_the_score_of_a_diverse_search_has_no_penalty_but_its_rank_has() -> None:
    """The second group pays the penalty for the token of the first, and comes last although it is as probable."""
    model = Written({(): {4: 0.9, 5: 0.1}}, 9)
    settings: dict[str, Any] = {"num_beams": 2, "num_beam_groups": 2, "n_best": 2, "max_new_tokens": 3}
    for penalty, tokens, log_probs in ((0.5, [[4], [4]], [0.9, 0.9]), (9.0, [[4], [5]], [0.9, 0.1])):
        outputs = generate(model, sources(2), GenerationConfig(**settings, diversity_penalty=penalty))[0]
        assert [output.tokens for output in outputs] == tokens
        assert [output.score for output in outputs] == pytest.approx(list(map(math.log, log_probs)), abs=1e-4)
        for output in outputs:
            assert sum(output.token_log_probs) == pytest.approx(output.score)


def test_an_output_ends_at_a_stop_check() -> None:
    model = Written({tuple([4] * n): {4: 1.0} for n in range(20)}, 9)
    config = GenerationConfig(max_new_tokens=10)
    (found,) = generate(model, sources(2), config, stop_check=lambda rows: [len(row) >= 3 for row in rows])[0]
    assert found.tokens == [4, 4, 4]
    assert found.finished


def test_a_prefix_begins_every_output_and_costs_nothing() -> None:
    model = tiny("transformer", seed=3)
    for num_beams in (1, 3):
        config = GenerationConfig(max_new_tokens=6, num_beams=num_beams)
        for best, *_ in generate(model, sources(4, 2), config, prefix_ids=[7, 5]):
            assert best.tokens[:2] == [7, 5]


def test_log_probabilities_of_the_tokens_sum_up_to_the_score() -> None:
    for settings in ({"num_beams": 4, "n_best": 4}, {"do_sample": True, "n_best": 3}, {}):
        config = GenerationConfig(max_new_tokens=8, **settings)  # type: ignore[arg-type]
        for rows in generate(tiny("rnn", seed=2), sources(5, 3), config):
            for hypothesis in rows:
                assert sum(hypothesis.token_log_probs) == pytest.approx(hypothesis.score, abs=1e-4)
                assert len(hypothesis.token_log_probs) == len(hypothesis.tokens) + hypothesis.finished


@pytest.mark.parametrize(("min_p", "kept"), [(0.1, 4), (0.5, 2), (1.0, 1)])
def test_min_p_keeps_tokens_with_a_fraction_of_the_best_probability(min_p: float, kept: int) -> None:
    scores = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert int(torch.isfinite(filter_for_sampling(scores, GenerationConfig(min_p=min_p))).sum()) == kept
