"""Random generation settings against Hugging Face's `generate`: penalties, limits, forced tokens, blocks, stopping."""

from __future__ import annotations

from typing import Any

import pytest
import test_parity_generate
import test_parity_generate_seq2seq
import torch
import transformers
from both import Both, ids
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.generation import GenerationConfig, generate
from qkv.generation.logits_processors import filter_for_sampling
from qkv.nn import Ragged

VOCABULARY, FIRST_ORDINARY = 31, 3
WARPERS = {
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
    "typical_p": transformers.TypicalLogitsWarper,
}
FAMILIES = ["gpt2", "gpt", "bart", "marian", "t5"]
DECODERS = {"gpt2": "GPT2", "gpt": "OpenAIGPT"}
forced_tokens, tokens = st.integers(FIRST_ORDINARY, 9), st.integers(10, VOCABULARY - 2)  # a forced one is not blocked


@st.composite
def generation_settings(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw settings by their names in transformers, which are ours too."""
    max_new_tokens = draw(st.integers(1, 12))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "no_repeat_ngram_size": st.integers(1, 4),
        "min_new_tokens": st.integers(1, max_new_tokens),
        "forced_eos_token_id": forced_tokens | st.just(2),
        "suppress_tokens": st.lists(tokens, min_size=1, max_size=8, unique=True),
        "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=8, unique=True),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=5, unique_by=tuple),
    }
    if family != "marian":  # whose padding token gets its -inf before our softmax and after theirs
        optional["repetition_penalty"] = st.floats(0.5, 3.0)
    if family not in DECODERS:
        optional["forced_bos_token_id"] = forced_tokens
    for name in draw(st.sets(st.sampled_from(sorted(optional)), max_size=4)):
        options[name] = draw(optional[name])
    if draw(st.booleans()):
        options["num_beams"] = draw(st.integers(2, 5))
        options["early_stopping"] = draw(st.sampled_from([True, False, "never"]))
        options["length_penalty"] = draw(st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0]))
    return options


def both_of(family: str) -> Both:
    if family in DECODERS:
        return test_parity_generate.made(DECODERS[family])
    return test_parity_generate_seq2seq.made(family)


def inputs_of(family: str, batch_size: int, seed: int) -> Ragged:
    """Prompts have equal lengths: transformers counts padding as a token that occurred."""
    lengths = [4] * batch_size if family in DECODERS else [1 + (3 * seed + 5 * i) % 9 for i in range(batch_size)]
    return ids(lengths, VOCABULARY - 1, seed)


def their_tokens(both: Both, family: str, batch: Ragged, options: dict[str, Any]) -> list[list[int]]:
    tensors = {"input_ids": batch.to_padded().long(), "attention_mask": batch.layout.valid_mask().long()}
    if family == "marian":
        options = options | {"bad_words_ids": [[30], *options.get("bad_words_ids", [])]}
    with torch.no_grad():
        sequences = both.theirs.generate(**tensors, do_sample=False, **options)
    num_before = batch.layout.max_length if family in DECODERS else 1
    eos_id = both.ours.model.spec.eos_id
    rows = sequences[:, num_before:].tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]


def our_config(family: str, options: dict[str, Any]) -> GenerationConfig:
    as_tuples: dict[str, Any] = {
        name: tuple(tuple(item) if isinstance(item, list) else item for item in value)
        for name, value in options.items()
        if isinstance(value, list)
    }
    return GenerationConfig(**(options | as_tuples), unfinished_beams="ranked", renormalize_logits=family == "marian")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data(), batch_size=st.integers(1, 5), seed=st.integers(0, 20))
def test_tokens_equal_theirs_for_any_settings(family: str, data: st.DataObject, batch_size: int, seed: int) -> None:
    options = data.draw(generation_settings(family))
    both, batch = both_of(family), inputs_of(family, batch_size, seed)
    pad_id = both.theirs.config.pad_token_id
    theirs = their_tokens(both, family, batch, options)
    ours = [rows[0].tokens for rows in generate(both.ours.model, batch, our_config(family, options))]
    # an output that ends before others of its batch is padded by them
    assert ours == [_without_padding(row, mine, pad_id) for row, mine in zip(theirs, ours, strict=True)]


def _without_padding(row: list[int], ours: list[int], pad_id: int) -> list[int]:
    padding = row[len(ours) :]
    return row[: len(ours)] if all(token == pad_id for token in padding) else row


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 3.0),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.05, 0.99),
    min_p=st.none() | st.floats(0.0, 1.0),
    typical_p=st.none() | st.floats(0.05, 0.99),
)
def test_the_tokens_that_sampling_keeps_are_theirs(seed: int, temperature: float, **filters: Any) -> None:
    scores = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    for name, warper in WARPERS.items():
        if filters[name] is not None:
            warpers.append(warper(filters[name]))
    theirs = scores
    for warper in warpers:
        theirs = warper(torch.zeros(4, 1, dtype=torch.long), theirs)
    ours = filter_for_sampling(scores, GenerationConfig(do_sample=True, temperature=temperature, **filters))
    assert torch.allclose(torch.softmax(ours, -1), torch.softmax(theirs, -1), atol=1e-6)
