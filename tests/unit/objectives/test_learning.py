"""From text to a loss that falls: each family's own tokeniser and objective, with fresh noise at every step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv.data.chance import Chance, Pieces
from qkv.data.corruption import Masking
from qkv.families import family
from qkv.objectives import causal, denoise, masked, mix, span
from qkv.objectives.term import mean
from qkv.text.marks import marks
from qkv.text.tokeniser import Tokeniser, train_tokeniser

sys.path.append(str(Path(__file__).parent))
from bodies import model

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It never comes back.",
    "A rose is a rose is a rose. So they say, and so it is.",
    "Attention is all you need. A query asks, keys answer, values are summed.",
    "Unbelievably long words are cut into pieces. Short ones are not.",
]
OBJECTIVES = {"bert": "masked", "roberta": "masked", "gpt2": "causal", "bart": "denoise", "t5": "span"}


def pieces(tokeniser: Tokeniser, before: list[int], after: list[int]) -> Pieces:
    ids = [[*before, *tokeniser.encode(text), *after] for text in TEXTS]
    return Pieces.of(np.concatenate(ids), [len(each) for each in ids], np.arange(len(ids)))


def prepared(name: str, tokeniser: Tokeniser, body: Any, epoch: int) -> Any:
    """Framed as the family has it; a sequence-to-sequence model's end token comes with its inputs."""
    table, chance, roles = marks(tokeniser), Chance(1, epoch), tokeniser.roles
    if OBJECTIVES[name] == "masked":
        framed = pieces(tokeniser, [roles["cls"]], [roles["sep"]])
        return masked.prepare(framed, table, chance, Masking(whole_words=epoch % 2 == 0))
    if name == "gpt2":
        return causal.prepare(pieces(tokeniser, [], [roles["end"]]), start=roles["start"])
    if name == "bart":
        return denoise.prepare(pieces(tokeniser, [roles["start"]], []), table, chance, model=body.spec)
    return span.prepare(pieces(tokeniser, [], []), table, chance, model=body.spec)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_tiny_model_learns_a_few_sentences_from_its_objective(name: str) -> None:
    template = family(name).TEMPLATE
    if template.kind == "unigram":
        pytest.importorskip("sentencepiece")
    size = {"wordpiece": 90, "byte_bpe": 300, "unigram": 180}[template.kind]
    tokeniser = train_tokeniser(template.kind, TEXTS * 5, size=size, template=template)
    body = model(name, vocabulary=tokeniser.size, length=90, width=24).float()
    mix.check(OBJECTIVES[name], body.spec)
    objective = {"masked": masked, "causal": causal, "denoise": denoise, "span": span}[OBJECTIVES[name]]
    optimiser = torch.optim.Adam(body.parameters(), lr=5e-3)

    def held_out() -> float:
        with torch.no_grad():
            return mean([(objective.loss(body, prepared(name, tokeniser, body, n)),) for n in range(100, 110)]).item()

    before = held_out()
    for epoch in range(40):
        optimiser.zero_grad()
        mean([(objective.loss(body, prepared(name, tokeniser, body, epoch)),)]).backward()
        optimiser.step()
    assert held_out() < 0.8 * before
