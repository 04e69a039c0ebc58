"""Translating and summarising against Hugging Face's `generate`: sources of different lengths, padded on their side."""

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

from qkv.generation import GenerationConfig, Hypothesis, generate
from qkv.nn import Ragged

LENGTHS = [4, 9, 1, 6, 7, 2, 12, 5]
VOCABULARY = 31
SIDES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 30,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 51,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 40,
    "forced_eos_token_id": None,
}
MARIAN = SIDES | {"pad_token_id": 30, "decoder_start_token_id": 30, "scale_embedding": True}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 26,
    "d_kv": 7,
    "d_ff": 51,
    "num_layers": 3,
    "num_decoder_layers": 2,  # theirs makes a cache for as many layers as the encoder has
    "num_heads": 5,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 9,
    "decoder_start_token_id": 0,
}
KINDS = {
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig(**SIDES)),
    "marian": (transformers.MarianMTModel, transformers.MarianConfig(**MARIAN)),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config(**T5)),
    "t5 1.1": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
}
FAMILIES = list(KINDS)
LIMITS = [5, 24]
logging.getLogger("transformers").setLevel(logging.ERROR)


def taught(theirs: Any, steps: int = 60) -> Any:
    """Half-taught to say a source backwards: it knows that outputs end, and is unsure of the rest."""
    torch.manual_seed(3)
    optimiser = torch.optim.Adam([p for p in theirs.parameters() if p.requires_grad], lr=5e-3)
    for step in range(steps):
        source = ids([2 + (step + i) % 8 for i in range(16)], VOCABULARY - 1, 100 + step)
        end = torch.tensor([theirs.config.eos_token_id])
        labels = Ragged.pack([torch.cat([s.flip(0), end]) for s in source.sequences()]).to_padded(-100).long()
        given = {"input_ids": source.to_padded().long(), "attention_mask": source.layout.valid_mask().long()}
        optimiser.zero_grad()
        theirs(**given, labels=labels).loss.backward()
        optimiser.step()
    return theirs.eval()


@cache
def made(family: str) -> Both:
    """Both models; made once, for nothing here changes them."""
    kind, config = KINDS[family]
    theirs = randomised(kind(config))
    if family == "marian":
        for side in (theirs.model.encoder, theirs.model.decoder):  # drawn as if they were parameters
            side.embed_positions.weight.data = side.embed_positions.create_weight()
        theirs.generation_config.bad_words_ids = [[30]]
        theirs.generation_config.renormalize_logits = True
    if hasattr(theirs, "final_logits_bias"):
        theirs.final_logits_bias.normal_()
        theirs.final_logits_bias[0, 30] += 4.0 * (family == "marian")
    if family == "t5 1.1":  # which theirs ties all the same, until it loads a file
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight) * 0.15)
    with TemporaryDirectory() as folder:
        return Both(taught(theirs), Path(folder))


def sources() -> Ragged:
    return ids(LENGTHS, VOCABULARY, 7)


def their_output(family: str, **options: Any) -> Any:
    batch = sources()
    given = {"input_ids": batch.to_padded().long(), "attention_mask": batch.layout.valid_mask().long()}
    how = {"do_sample": False, "early_stopping": False, "return_dict_in_generate": True, "output_scores": True}
    return made(family).theirs.generate(**given, **(how | options))


def new_tokens(found: Any, end: int) -> list[list[int]]:
    rows = found.sequences[:, 1:].tolist()  # without the start token
    return [row[: row.index(end)] if end in row else row for row in rows]


def ours(family: str, how: GenerationConfig) -> list[Hypothesis]:
    return [hypothesis for rows in generate(made(family).ours.model, sources(), how) for hypothesis in rows]


def rank(hypothesis: Hypothesis, penalty: float) -> float:
    return hypothesis.score / (len(hypothesis.tokens) + hypothesis.finished) ** penalty


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_theirs(family: str, limit: int) -> None:
    end = made(family).ours.model.spec.eos_id
    theirs = new_tokens(their_output(family, max_new_tokens=limit), end)
    assert [hypothesis.tokens for hypothesis in ours(family, GenerationConfig(max_new_tokens=limit))] == theirs


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_four_beams_equal_theirs_in_their_order(family: str, limit: int, penalty: float) -> None:
    options = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": penalty, "max_new_tokens": limit}
    found = their_output(family, **options)
    flat = ours(
        family,
        GenerationConfig(
            num_beams=4, n_best=4, length_penalty=penalty, max_new_tokens=limit, unfinished_beams="ranked"
        ),
    )
    assert [h.tokens for h in flat] == new_tokens(found, made(family).ours.model.spec.eos_id)
    assert [rank(h, penalty) for h in flat] == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "how", [GenerationConfig(max_new_tokens=max(LIMITS)), GenerationConfig(num_beams=4, max_new_tokens=max(LIMITS))]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_ends_are_hit_and_outputs_differ(family: str, how: GenerationConfig) -> None:
    """Else the two tests above would compare less than they say."""
    found = ours(family, how)
    assert sum(hypothesis.finished for hypothesis in found) >= len(LENGTHS) // 2
    assert len({tuple(hypothesis.tokens) for hypothesis in found}) >= len(LENGTHS) // 2
    assert max(len(hypothesis.tokens) for hypothesis in found) >= 3


def test_the_padding_token_of_marian_would_be_written_if_it_were_not_forbidden() -> None:
    allowed = their_output("marian", max_new_tokens=24, num_beams=4, bad_words_ids=None)
    assert (allowed.sequences[:, 1:-1] == 30).any()
    assert not any(
        30 in hypothesis.tokens
        for hypothesis in ours("marian", GenerationConfig(num_beams=4, n_best=4, max_new_tokens=24))
    )
