"""Ensembles: the mean of several models, against brute force over all outputs, in every search."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from writers import sources, tiny

from qkv.checkpoints import ModelBundle
from qkv.errors import InputError
from qkv.generation import GenerationConfig, generate
from qkv.generation.ensemble import Ensemble, ensemble_bundle
from qkv.nn import Ragged
from qkv.tokenization.tokenizer import train_tokenizer

VOCABULARY, MAX_LENGTH = 6, 3
MEANS = ["probabilities", "log_probabilities"]


def members() -> list[Any]:
    """A recurrent model and a Transformer of one vocabulary."""
    return [tiny("rnn", vocabulary=VOCABULARY), tiny("transformer", seed=3, vocabulary=VOCABULARY)]


def exact_log_prob(models: list[Any], source: Ragged, tokens: list[int], mean: str) -> float:
    """Sum the log-probabilities of an output and its EOS, token by token, from the models' own distributions."""
    target = Ragged.pack([torch.tensor([models[0].spec.bos_id, *tokens])])
    probs = torch.stack([torch.softmax(model(source, target).double(), -1) for model in models])  # [M, T, V]
    mixed = probs.mean(0) if mean == "probabilities" else torch.softmax(probs.log().mean(0), -1)
    labels = torch.tensor([*tokens, models[0].spec.eos_id])
    return float(mixed.gather(1, labels[:, None]).log().sum())


@pytest.mark.parametrize("mean", MEANS)
@torch.no_grad()
def test_a_beam_as_wide_as_the_space_finds_the_best_outputs_of_the_mean(mean: Any) -> None:
    models, source = members(), sources(4)
    others = [token for token in range(VOCABULARY) if token != models[0].spec.eos_id]
    outputs = [list(tokens) for n in range(MAX_LENGTH) for tokens in itertools.product(others, repeat=n)]
    exact = {tuple(tokens): exact_log_prob(models, source, tokens, mean) for tokens in outputs}
    best = sorted(exact, key=lambda tokens: -exact[tokens])[:3]
    config = GenerationConfig(num_beams=60, n_best=60, max_new_tokens=MAX_LENGTH, length_penalty=0.0, ensemble=mean)
    hypotheses = [h for h in generate(Ensemble(models), source, config)[0] if h.finished][:3]
    assert [tuple(hypothesis.tokens) for hypothesis in hypotheses] == best
    assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([exact[t] for t in best], abs=1e-4)


@pytest.mark.parametrize("mean", MEANS)
def test_greedy_takes_the_most_probable_token_of_the_mean(mean: Any) -> None:
    models, source = members(), sources(5)
    (hypothesis,) = generate(Ensemble(models), source, GenerationConfig(max_new_tokens=8, ensemble=mean))[0]
    target = Ragged.pack([torch.tensor([models[0].spec.bos_id, *hypothesis.tokens])])
    with torch.no_grad():
        log_probs = torch.log_softmax(Ensemble(models, mean)(source, target), -1)
    labels = [*hypothesis.tokens, *([models[0].spec.eos_id] if hypothesis.finished else [])]
    assert log_probs.argmax(-1).tolist()[: len(labels)] == labels
    assert hypothesis.token_log_probs == pytest.approx(log_probs.amax(-1).tolist()[: len(labels)], abs=1e-4)


def test_samples_follow_the_mean_of_the_distributions() -> None:
    models, source = members(), sources(3)
    config = GenerationConfig(do_sample=True, n_best=4000, max_new_tokens=1)
    first = [(h.tokens or [models[0].spec.eos_id])[0] for h in generate(Ensemble(models), source, config)[0]]
    frequencies = torch.bincount(torch.tensor(first), minlength=VOCABULARY) / len(first)
    target = Ragged.pack([torch.tensor([models[0].spec.bos_id])])
    with torch.no_grad():
        probs = torch.stack([torch.softmax(model(source, target), -1)[0] for model in models]).mean(0)
    assert torch.allclose(frequencies, probs, atol=4 * 0.5 / math.sqrt(len(first)))


def test_outputs_do_not_depend_on_batch_mates() -> None:
    ensemble, batch = Ensemble(members()), sources(2, 6, 4)
    config = GenerationConfig(num_beams=3, max_new_tokens=6)
    alone = [generate(ensemble, Ragged.pack([row]), config)[0][0].tokens for row in batch.sequences()]
    assert [rows[0].tokens for rows in generate(ensemble, batch, config)] == alone


def bundle(model: Any, source_text: str = "abcde", target_text: str = "xy") -> ModelBundle:
    source, target = (train_tokenizer("whitespace", [" ".join(text)]) for text in (source_text, target_text))
    return ModelBundle(model, source, target)


def test_models_of_other_vocabularies_are_refused_with_the_first_difference() -> None:
    first, second = members()
    with pytest.raises(InputError, match=r"b: token 5 of the target vocabulary is 'z', and 'y' in a; the models of"):
        ensemble_bundle([bundle(first), bundle(second, target_text="xz")], ["a", "b"])
    with pytest.raises(InputError, match="b: token 9 of the source vocabulary is 'f', and missing in a"):
        ensemble_bundle([bundle(first), bundle(second, source_text="abcdef")], ["a", "b"])
    with pytest.raises(InputError, match="b: the model has 7 outputs, and 6 in a"):
        ensemble_bundle([bundle(first), bundle(tiny("transformer", vocabulary=7))], ["a", "b"])
    second.spec = replace(second.spec, head=None)
    with pytest.raises(InputError, match="b: this transformer generates no text"):
        ensemble_bundle([bundle(first), bundle(second)], ["a", "b"])
