"""Continuing prompts against Hugging Face's `generate`: of different lengths, padded on the left on their side."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from both import Both, ids, randomised
from torch import Tensor

from qkv import spec
from qkv.generation import GenerationConfig, Hypothesis, generate
from qkv.nn import Ragged

LENGTHS = [4, 9, 1, 6, 7, 2]
END, VOCABULARY = 2, 31
ODD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 35,
    "n_layer": 3,
    "n_head": 5,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
# drawn so that some prompts come to an end within the larger limit and others do not; `test_some_end` holds them to it
SEEDS = {"GPT2": 4, "OpenAIGPT": 1}
FAMILIES = list(SEEDS)
LIMITS = [5, 14]

logging.getLogger("transformers").setLevel(logging.ERROR)


@cache
def made(family: str, **changes: Any) -> Both:
    """Both models; made once, for nothing here changes them."""
    config = getattr(transformers, f"{family}Config")(**(ODD | changes))
    theirs = randomised(getattr(transformers, f"{family}LMHeadModel")(config))
    torch.manual_seed(SEEDS[family])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    with TemporaryDirectory() as folder:
        return Both(theirs, Path(folder))


def prompts(family: str) -> Ragged:
    return ids(LENGTHS, VOCABULARY, SEEDS[family] + 1)


def padded_left(batch: Ragged) -> tuple[Tensor, Tensor]:
    real = batch.layout.valid_mask().flip(1)  # [B, longest]
    return torch.zeros_like(real, dtype=torch.long).masked_scatter(real, batch.values), real.long()


def their_output(both: Both, batch: Ragged, **options: Any) -> Any:
    given, mask = padded_left(batch)
    how = {"do_sample": False, "early_stopping": False, "return_dict_in_generate": True, "output_scores": True}
    return both.theirs.generate(given, attention_mask=mask, **(how | options))


def new_tokens(found: Any, batch: Ragged) -> list[list[int]]:
    rows = found.sequences[:, batch.layout.max_length :].tolist()
    return [row[: row.index(END)] if END in row else row for row in rows]


def rank(hypothesis: Hypothesis, penalty: float) -> float:
    return hypothesis.score / (len(hypothesis.tokens) + hypothesis.finished) ** penalty


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_theirs(family: str, limit: int) -> None:
    both, batch = made(family), prompts(family)
    theirs = new_tokens(their_output(both, batch, max_new_tokens=limit), batch)
    ours = generate(both.ours.model, batch, GenerationConfig(max_new_tokens=limit))
    assert [rows[0].tokens for rows in ours] == theirs


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_four_beams_equal_theirs_in_their_order(family: str, limit: int, penalty: float) -> None:
    both, batch = made(family), prompts(family)
    options = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": penalty, "max_new_tokens": limit}
    found = their_output(both, batch, **options)
    ours = generate(
        both.ours.model, batch, GenerationConfig(num_beams=4, n_best=4, length_penalty=penalty, max_new_tokens=limit)
    )
    flat = [hypothesis for rows in ours for hypothesis in rows]
    assert [hypothesis.tokens for hypothesis in flat] == new_tokens(found, batch)
    assert [rank(h, penalty) for h in flat] == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "how",
    [GenerationConfig(max_new_tokens=max(LIMITS)), GenerationConfig(num_beams=4, n_best=4, max_new_tokens=max(LIMITS))],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_some_end_and_others_are_cut_short(family: str, how: GenerationConfig) -> None:
    """Else the two tests above would compare less than they say."""
    found = generate(made(family).ours.model, prompts(family), how)
    assert {hypothesis.finished for rows in found for hypothesis in rows} == {True, False}


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_an_end_writes_up_to_the_limit_as_theirs_does(family: str, beams: int) -> None:
    both, batch = made(family, eos_token_id=None), prompts(family)
    found = their_output(both, batch, max_new_tokens=8, num_beams=beams)
    ours = generate(both.ours.model, batch, GenerationConfig(max_new_tokens=8, num_beams=beams))
    assert [rows[0].tokens for rows in ours] == found.sequences[:, batch.layout.max_length :].tolist()
    if beams == 1:  # the token that ended the others is one like any other here
        assert any(END in rows[0].tokens for rows in ours)
    assert not any(rows[0].finished for rows in ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_is_never_written_leaves_its_share_to_the_others_as_theirs_does(family: str) -> None:
    both, batch = made(family), prompts(family)
    often = generate(both.ours.model, batch, GenerationConfig(max_new_tokens=1))[0][0].tokens[0]
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 10, "bad_words_ids": [[often]]}
    options["renormalize_logits"] = True  # what a token that is never written would have got, the others share
    found = their_output(both, batch, **options)
    model, before = both.ours.model, both.ours.model.spec
    model.spec = spec.replace(before, suppress_tokens=(often,))
    flat = [
        h for rows in generate(model, batch, GenerationConfig(num_beams=4, n_best=4, max_new_tokens=10)) for h in rows
    ]
    model.spec = before
    assert [hypothesis.tokens for hypothesis in flat] == new_tokens(found, batch)
    assert [rank(h, 1.0) for h in flat] == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)


def test_the_options_of_gpt2_s_scores_hold_in_cached_steps_too() -> None:
    both = made("GPT2", scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False)
    batch = prompts("GPT2")
    theirs = new_tokens(their_output(both, batch, max_new_tokens=10, num_beams=4), batch)
    ours = generate(both.ours.model, batch, GenerationConfig(max_new_tokens=10, num_beams=4))
    assert [rows[0].tokens for rows in ours] == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_cached_steps_equal_those_of_their_steps(family: str) -> None:
    both, batch = made(family), prompts(family)
    found = their_output(both, batch, max_new_tokens=6, output_logits=True, eos_token_id=VOCABULARY)  # never hit
    logits, state = both.ours.model.prefill(batch, rows_per_source=1, max_new_tokens=6)
    for step, theirs in enumerate(found.logits):
        assert float((logits - theirs).detach().abs().max()) <= 1e-4
        if step < 5:
            logits, state = both.ours.model.step(found.sequences[:, batch.layout.max_length + step], state)
