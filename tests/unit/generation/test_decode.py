"""Greedy, beam and sampling: against exhaustive search, against each other, and in any batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from writers import Written, sources, tiny

from qkv.errors import InputError
from qkv.generation import GenerationConfig, Hypothesis, generate
from qkv.generation.logits_processors import filter_for_sampling
from qkv.nn import Ragged

FAMILIES = ["rnn", "transformer"]  # trained here, with an encoder


def beam_search(model, source, num_beams: int, max_length: int, length_penalty: float = 1.0) -> list[list[Hypothesis]]:
    settings = {"max_new_tokens": max_length, "length_penalty": length_penalty}
    return generate(model, source, GenerationConfig(num_beams=num_beams, n_best=num_beams, **settings))


def greedy(model, source, max_length: int) -> list[list[Hypothesis]]:
    return generate(model, source, GenerationConfig(max_new_tokens=max_length))


def sample(model, source, max_length: int, num_samples: int, **settings) -> list[list[Hypothesis]]:
    config = GenerationConfig(do_sample=True, max_new_tokens=max_length, n_best=num_samples, **settings)
    return generate(model, source, config)


def log_probability(model, source, tokens):
    """Teacher-forced log p of an output with its end token."""
    target = Ragged.pack([torch.tensor([model.spec.bos_id, *tokens])])
    log_probabilities = torch.log_softmax(model(source, target), -1)
    wanted = torch.tensor([*tokens, model.spec.eos_id])
    return float(log_probabilities.gather(1, wanted[:, None]).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_beam_as_wide_as_the_space_finds_the_best_output_there_is(family):
    model = tiny(family, vocabulary=6)
    source = sources(4)
    letters = [t for t in range(6) if t != model.spec.eos_id]
    every = [list(w) for n in range(4) for w in itertools.product(letters, repeat=n)]
    with torch.no_grad():
        scores = {tuple(w): log_probability(model, source, w) for w in every}
    best = sorted(scores, key=lambda w: -scores[w])[:3]
    found = [h for h in beam_search(model, source, num_beams=200, max_length=4, length_penalty=0.0)[0] if h.finished][
        :3
    ]
    assert [tuple(h.tokens) for h in found] == best
    assert [h.score for h in found] == pytest.approx([scores[w] for w in best], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_takes_the_likeliest_token_at_each_step(family):
    model, source = tiny(family), sources(5)
    written = [model.spec.bos_id]
    with torch.no_grad():
        for _ in range(12):
            logits = model(source, Ragged.pack([torch.tensor(written)]))[-1]
            written.append(int(logits.argmax()))
            if written[-1] == model.spec.eos_id:
                break
    found = greedy(model, source, max_length=12)[0][0]
    assert found.tokens == [t for t in written[1:] if t != model.spec.eos_id]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_beam_of_one_is_greedy(family):
    model, source = tiny(family, seed=3), sources(3, 6, 2)
    ones = beam_search(model, source, num_beams=1, max_length=10)
    for one, other in zip(ones, greedy(model, source, max_length=10), strict=True):
        assert one[0].tokens == other[0].tokens
        assert one[0].score == pytest.approx(other[0].score, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [
        GenerationConfig(),
        GenerationConfig(num_beams=4, n_best=4),
        GenerationConfig(num_beams=4, n_best=4, length_penalty=0.0),
        GenerationConfig(num_beams=3, n_best=3, length_penalty=2.0),
        GenerationConfig(do_sample=True, n_best=3, seed=5),
    ],
)
def test_outputs_do_not_depend_on_batch_mates(family, how):
    """Over many models, since most of them agree by luck."""
    for seed in range(5):
        model, lengths = tiny(family, seed=seed), (3, 9, 5, 1)
        together = generate(model, sources(*lengths), how)
        for i, (mates, sequence) in enumerate(zip(together, sources(*lengths).sequences(), strict=True)):
            alone = generate(model, Ragged.pack([sequence]), how, [i])[0]
            assert [h.tokens for h in mates] == [h.tokens for h in alone]
            assert [h.score for h in mates] == pytest.approx([h.score for h in alone], abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_is_the_log_probability_of_the_output(family):
    model, source = tiny(family, seed=2), sources(4)
    for hypothesis in beam_search(model, source, num_beams=5, max_length=15)[0]:
        if hypothesis.finished:
            with torch.no_grad():
                assert hypothesis.score == pytest.approx(log_probability(model, source, hypothesis.tokens), abs=1e-3)


def test_a_beam_finds_what_greedy_walks_past():
    """The likelier first token leads to the less likely whole."""
    model = Written({(): {4: 0.6, 5: 0.4}, (4,): {6: 0.3, 7: 0.3, 8: 0.4}, (5,): {6: 1.0}}, 9)
    source = sources(2)
    assert greedy(model, source, max_length=5)[0][0].tokens == [4, 8]
    assert beam_search(model, source, num_beams=2, max_length=5)[0][0].tokens == [5, 6]


def test_length_penalty_turns_the_ranking():
    """p = .5 for a short output, .4 for a longer one: the mean a token prefers the longer."""
    model = Written({(): {4: 0.5, 5: 0.5}, (4,): {3: 1.0}, (5,): {6: 0.8, 7: 0.2}, (5, 6): {3: 1.0}}, 9)
    source = sources(2)
    assert beam_search(model, source, num_beams=3, max_length=6, length_penalty=0.0)[0][0].tokens == [4]
    assert beam_search(model, source, num_beams=3, max_length=6, length_penalty=2.0)[0][0].tokens == [5, 6]


def test_the_n_best_are_distinct_and_in_order():
    model = tiny("transformer", seed=5)
    found = beam_search(model, sources(6), num_beams=8, max_length=12, length_penalty=0.0)[0]
    finished = [h for h in found if h.finished]
    assert len({tuple(h.tokens) for h in found}) == len(found) == 8
    assert [h.score for h in finished] == sorted((h.score for h in finished), reverse=True)


def test_an_output_that_the_limit_cut_short_says_so_and_comes_last():
    endless = Written({tuple([4] * n): {4: 0.9, 3: 0.1} for n in range(20)}, 9)
    found = beam_search(endless, sources(2), num_beams=2, max_length=3, length_penalty=0.0)[0]
    assert [h.finished for h in found] == sorted((h.finished for h in found), reverse=True)
    assert not greedy(endless, sources(2), max_length=3)[0][0].finished


def test_sampling_is_the_same_for_the_same_seed_and_differs_for_another():
    model, source = tiny("transformer", seed=4), sources(5, 3)
    draw = [sample(model, source, max_length=10, seed=s, num_samples=3) for s in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]


def test_samples_follow_the_models_distribution():
    model = Written({(): {4: 0.7, 5: 0.3}}, 9)
    found = sample(model, sources(1), max_length=3, num_samples=4000, seed=0)[0]
    assert sum(h.tokens == [4] for h in found) / 4000 == pytest.approx(0.7, abs=0.03)


def test_a_low_temperature_sharpens_towards_greedy():
    model = Written({(): {4: 0.6, 5: 0.4}}, 9)
    found = sample(model, sources(1), max_length=3, num_samples=500, temperature=0.05)[0]
    assert all(h.tokens == [4] for h in found)


def test_top_k_keeps_the_k_best_alone():
    scores = torch.tensor([[0.1, 0.5, 0.2, 0.2]]).log()
    assert torch.isfinite(filter_for_sampling(scores, GenerationConfig(top_k=1))).tolist() == [
        [False, True, False, False]
    ]


@pytest.mark.parametrize(("p", "kept"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.999, 4), (1.0, 4), (1e-9, 1)])
def test_top_p_keeps_the_fewest_that_hold_p(p, kept):
    scores = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert int(torch.isfinite(filter_for_sampling(scores, GenerationConfig(top_p=p))).sum()) == kept


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"num_beams": 0}, "num_beams must be at least 1"),
        ({"n_best": 3}, "needs at least as many beams"),
        ({"do_sample": True, "temperature": 0.0}, "temperature must be above 0"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_settings_that_mean_nothing_are_refused(bad, said):
    with pytest.raises(InputError, match=said):
        generate(tiny("transformer"), sources(2), GenerationConfig(**bad))
