"""From text to a loss that falls: each family's own tokeniser and objective, with fresh noise at every step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv.data.noise.config import MLMConfig
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.families import get_family
from qkv.objectives import clm, denoising, mlm, plm, span_corruption
from qkv.objectives.registry import OBJECTIVES as REGISTRY
from qkv.recipe.objectives import OBJECTIVE_CONFIGS
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer
from qkv.tokenization.vocab_tables import build_vocab_tables

sys.path.append(str(Path(__file__).parent))
from bodies import mean_loss, model

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It never comes back.",
    "A rose is a rose is a rose. So they say, and so it is.",
    "Attention is all you need. A query asks, keys answer, values are summed.",
    "Unbelievably long words are cut into pieces. Short ones are not.",
]
OBJECTIVES = {
    "bert": "mlm",
    "roberta": "mlm",
    "gpt2": "clm",
    "bart": "denoising",
    "t5": "span_corruption",
    "xlnet": "plm",
}


def pieces(tokeniser: Tokenizer, before: list[int], after: list[int]) -> PackedChunks:
    ids = [[*before, *tokeniser.encode(text), *after] for text in TEXTS]
    return PackedChunks.from_arrays(np.concatenate(ids), [len(each) for each in ids], np.arange(len(ids)))


def prepared(name: str, tokeniser: Tokenizer, body: Any, epoch: int) -> Any:
    """Framed as the family has it; a sequence-to-sequence model's end token comes with its inputs."""
    table, chance, roles = build_vocab_tables(tokeniser), CounterRNG(1, epoch), tokeniser.special_ids
    if OBJECTIVES[name] == "mlm":
        framed = pieces(tokeniser, [roles["cls"]], [roles["sep"]])
        return mlm.make_inputs(framed, table, chance, MLMConfig(whole_word=epoch % 2 == 0))
    if name == "xlnet":
        return plm.make_inputs(pieces(tokeniser, [], [roles["sep"], roles["cls"]]), table, chance)
    if name == "gpt2":
        return clm.make_inputs(pieces(tokeniser, [], [roles["eos"]]), bos_id=roles["bos"])
    if name == "bart":
        return denoising.make_inputs(pieces(tokeniser, [roles["bos"]], []), table, chance, model=body.spec)
    return span_corruption.make_inputs(pieces(tokeniser, [], []), table, chance, model=body.spec)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_tiny_model_learns_a_few_sentences_from_its_objective(name: str) -> None:
    template = get_family(name).TOKENIZER_TEMPLATE
    if template.kind == "unigram":
        pytest.importorskip("sentencepiece")
    size = {"wordpiece": 90, "byte_bpe": 300, "unigram": 180}[template.kind]
    tokeniser = train_tokenizer(template.kind, TEXTS * 5, vocab_size=size, template=template)
    body = model(name, vocabulary=tokeniser.vocab_size, length=90, width=24).float()
    objective = REGISTRY.get(OBJECTIVES[name])(OBJECTIVE_CONFIGS.get(OBJECTIVES[name])())
    objective.check_model(body.spec)
    optimiser = torch.optim.Adam(body.parameters(), lr=5e-3)

    def held_out() -> float:
        with torch.no_grad():
            return mean_loss(
                [objective.losses(body, prepared(name, tokeniser, body, n)) for n in range(100, 110)]
            ).item()

    before = held_out()
    for epoch in range(40):
        optimiser.zero_grad()
        mean_loss([objective.losses(body, prepared(name, tokeniser, body, epoch))]).backward()
        optimiser.step()
    assert held_out() < 0.8 * before
