"""Alignments and coverage of generated outputs: from the step itself, in every search and on the captured path."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from writers import sources, tiny

from qkv.analysis.capture import capture_attention
from qkv.errors import InputError
from qkv.families import gpt2
from qkv.generation import GenerationConfig
from qkv.generation.engine import Engine
from qkv.generation.ensemble import Ensemble
from qkv.generation.request import Hypothesis, Request
from qkv.nn import Ragged, build

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
LAYERS = {"transformer": "decoder.0.cross_attention", "rnn": "decoder.attention"}
SEARCHES = {
    "greedy": GenerationConfig(max_new_tokens=7, return_alignments=True),
    "beams": GenerationConfig(max_new_tokens=7, num_beams=3, n_best=3, return_alignments=True),
    "sampling": GenerationConfig(max_new_tokens=7, do_sample=True, n_best=3, return_alignments=True),
    "coverage": GenerationConfig(max_new_tokens=7, num_beams=3, n_best=3, return_alignments=True, coverage_penalty=0.7),
}


def decode(model: Any, batch: Ragged, config: GenerationConfig, **options: Any) -> list[list[Hypothesis]]:
    engine = Engine(model, **options)
    requests = [Request(ids, config, number) for number, ids in enumerate(batch.sequences())]
    return [request.outputs or [] for request in engine.run(requests)]


def recorded_weights(model: Any, family: str, source: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Return the attention over the source with teacher forcing, the mean over heads.  # [N, M]"""
    target = Ragged.pack([torch.tensor([model.spec.bos_id, *tokens])])
    with torch.no_grad(), capture_attention(model, layers=[LAYERS[family]]) as maps:
        model(Ragged.pack([source]), target)
    return maps[LAYERS[family]][0].mean(0)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", LAYERS)
def test_an_alignment_is_the_largest_weight_of_each_token_with_teacher_forcing(family: str, search: str) -> None:
    model, batch = tiny(family), sources(5, 2, 9)
    for source, hypotheses in zip(batch.sequences(), decode(model, batch, SEARCHES[search]), strict=True):
        for hypothesis in hypotheses:
            weights = recorded_weights(model, family, source, hypothesis.tokens)
            count = len(hypothesis.token_log_probs)
            assert list(hypothesis.alignment) == weights.argmax(-1).tolist()[:count]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
@pytest.mark.parametrize("search", SEARCHES)
def test_the_captured_path_gives_the_same_alignments_and_ranks(search: str, device: str) -> None:
    model, batch, config = tiny("transformer"), sources(5, 2, 9, 3), replace(SEARCHES[search], dtype="float32")
    plain = decode(model, batch, config, max_tokens=30, use_graphs=False)
    static = decode(model.to(device), batch, config, max_tokens=30, use_graphs=True)
    assert [[(h.tokens, h.alignment) for h in row] for row in static] == [
        [(h.tokens, h.alignment) for h in row] for row in plain
    ]


def rank(model: Any, family: str, source: torch.Tensor, hypothesis: Hypothesis, config: GenerationConfig) -> float:
    """The rank of an output by the formula of GNMT (equation 14), with the length penalty of transformers."""
    length = len(hypothesis.token_log_probs)
    weights = recorded_weights(model, family, source, hypothesis.tokens)[:length]
    coverage = sum(math.log(min(total, 1.0)) for total in weights.sum(0).tolist())
    return hypothesis.score / length**config.length_penalty + config.coverage_penalty * coverage


@pytest.mark.parametrize("family", LAYERS)
def test_outputs_are_ranked_by_the_formula_of_gnmt(family: str) -> None:
    model, batch = tiny(family), sources(5, 2, 9)
    settings: Any = {"max_new_tokens": 7, "num_beams": 4, "n_best": 4, "unfinished_beams": "ranked"}
    config = GenerationConfig(coverage_penalty=0.5, **settings)
    plain, covered = decode(model, batch, GenerationConfig(**settings)), decode(model, batch, config)
    assert [row[0].tokens for row in plain] != [row[0].tokens for row in covered]
    for source, hypotheses in zip(batch.sequences(), covered, strict=True):
        ranks = [rank(model, family, source, hypothesis, config) for hypothesis in hypotheses]
        assert ranks == sorted(ranks, reverse=True)


def test_an_ensemble_aligns_by_the_mean_of_its_models() -> None:
    models, batch = {family: tiny(family) for family in LAYERS}, sources(5)
    ((hypothesis,),) = decode(Ensemble(list(models.values())), batch, SEARCHES["greedy"])
    weights = [recorded_weights(m, family, batch.values, hypothesis.tokens) for family, m in models.items()]
    count = len(hypothesis.alignment)
    assert list(hypothesis.alignment) == torch.stack(weights).mean(0).argmax(-1).tolist()[:count]


def test_no_alignment_is_returned_unless_it_is_requested() -> None:
    assert decode(tiny("transformer"), sources(3), GenerationConfig(max_new_tokens=3))[0][0].alignment == ()


def test_a_model_without_attention_over_a_source_is_refused() -> None:
    decoder = build(gpt2.make_spec(gpt2.Config(d_model=16, heads=2, layers=1), target_vocab_size=9)).eval()
    with pytest.raises(InputError, match="this gpt2 has no attention over a source, so it has no alignments"):
        decode(decoder, sources(3), SEARCHES["greedy"])
    with pytest.raises(InputError, match="coverage_penalty: this gpt2 continues its input and attends to no source"):
        decode(decoder, sources(3), GenerationConfig(max_new_tokens=3, num_beams=2, coverage_penalty=0.2))
