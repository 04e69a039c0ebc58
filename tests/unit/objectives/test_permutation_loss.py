"""Permutation language modeling: inputs with and without memory, and which weights they train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qkv.data.corpora.chunks import ChunkBatch
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.families import xlnet
from qkv.nn import build
from qkv.objectives.base import TextContext
from qkv.objectives.plm import PermutationLM
from qkv.recipe.objectives import PLMObjective
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer

pytest.importorskip("sentencepiece")
OBJECTIVE, LENGTHS = PermutationLM(PLMObjective()), [9, 1, 14, 2]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    lines = ["the cat sat on the mat", "a dog ran in the park"] * 20
    return train_tokenizer("unigram", lines, vocab_size=45, template=xlnet.TOKENIZER_TEMPLATE)


def prepared(tokenizer: Tokenizer, memory_length: int = 0) -> tuple[Any, Any]:
    """Return a model, and inputs of four texts for it."""
    torch.manual_seed(0)
    config = xlnet.Config(d_model=12, heads=2, layers=2, d_ff=24, init_std=0.3, memory_length=memory_length)
    model = build(xlnet.make_spec(config, source_vocab_size=tokenizer.vocab_size))
    context = TextContext(model.spec, tokenizer, carries_memory=model.has_memory)
    ids = np.random.default_rng(1).integers(7, tokenizer.vocab_size, sum(LENGTHS))
    batch = ChunkBatch(0, PackedChunks.from_arrays(ids, LENGTHS, range(len(LENGTHS))))
    return model, OBJECTIVE.prepare(batch, context, CounterRNG(1, 0))


def untrained(model: Any) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_a_text_ends_with_sep_and_with_cls_in_a_segment_of_its_own(tokenizer: Tokenizer) -> None:
    _, inputs = prepared(tokenizer)
    types = inputs.source.with_values(inputs.token_type_ids).sequences()
    for ids, segments in zip(inputs.source.sequences(), types, strict=True):
        assert ids[-2:].tolist() == [tokenizer.sep_id, tokenizer.cls_id]
        assert segments.tolist() == [0] * (len(ids) - 1) + [2]


def test_every_weight_is_trained(tokenizer: Tokenizer) -> None:
    model, inputs = prepared(tokenizer)
    OBJECTIVE.losses(model, inputs)[0].total.backward()
    assert not untrained(model)


def test_segments_of_streams_have_no_special_tokens_and_train_every_weight_too(tokenizer: Tokenizer) -> None:
    model, inputs = prepared(tokenizer, memory_length=6)
    assert inputs.source.layout.lengths_list == tuple(LENGTHS)
    _, memory = OBJECTIVE.losses_with_memory(model, inputs, model.initial_memory(len(LENGTHS)))
    ((loss,), _) = OBJECTIVE.losses_with_memory(model, inputs, memory.detach())
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert not untrained(model)
