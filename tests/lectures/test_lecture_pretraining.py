"""What the notes say of pretraining: masked words, next sentences, and T5's missing text."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qkv.data.noise.config import MLMConfig, SpanCorruptionConfig
from qkv.data.noise.mlm import mask_tokens
from qkv.data.noise.span_corruption import corrupt_spans
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.nn import Ragged
from qkv.objectives import clm, mlm
from qkv.tokenization.vocab_tables import VocabTables

sys.path.append(str(Path(__file__).parents[1] / "unit" / "objectives"))
from bodies import CHANCE, CLS, MARKS, MASK, SEP, model, text

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "The", "cat", "chased", "the", "mouse", "<0>", "<1>"]
CAT = list(range(5, 10))
SPECIAL = np.array([word[0] in "[<" for word in WORDS])


def test_the_masked_loss_is_the_negative_log_likelihood_over_the_vocabulary():
    """Multilingual NLP, "Pretraining Transformers": ŷ = softmax(x W_lm), L = -Σ y_i ln ŷ_i, y one-hot."""
    body = model("bert")
    batch = mlm.make_inputs(text(framed=True), MARKS, CHANCE, MLMConfig(mask_prob=0.4))
    hidden = body.hidden_states(batch.source).hidden.values
    loss = torch.zeros((), dtype=torch.float64)
    for place, word in zip(batch.positions.tolist(), batch.labels.tolist(), strict=True):
        said = torch.softmax(body.head(hidden[place : place + 1])[0], -1)
        y = torch.nn.functional.one_hot(torch.tensor(word), len(said))
        loss -= (y * said.log()).sum()
    torch.testing.assert_close(mlm.loss(body, batch).total, loss)


def test_some_percentage_of_real_tokens_is_masked_in_either_sentence():
    """Multilingual NLP, "Pretraining Transformers": [CLS] t … [SEP] t … [SEP]; real tokens are masked, in both."""
    one = [CLS, *range(5, 25), SEP, *range(5, 25), SEP]
    found = mask_tokens(PackedChunks.from_arrays(one * 50, [len(one)] * 50, np.arange(50)), MARKS, CHANCE)
    places = found.positions % len(one)
    assert not set(places.tolist()) & {0, 21, 42}
    assert ((places < 21).sum() > 100) & ((places > 21).sum() > 100)


def test_a_masked_word_is_predicted_from_both_sides():
    """Language Modeling, "Pre-training: MLM": "The cat chased the mouse" → p(w given The cat [MASK] the mouse)."""
    everything = MLMConfig(mask_prob=0.2, mask_token_prob=1.0, random_token_prob=0.0)
    pieces = PackedChunks.from_arrays(CAT * 40, [5] * 40, np.arange(40))
    found = mask_tokens(pieces, VocabTables(SPECIAL, mask_id=MASK), CounterRNG(0, 0), everything)
    shown = {" ".join(WORDS[i] for i in ids) for ids in found.ids.view(40, 5).tolist()}
    assert "The cat [MASK] the mouse" in shown
    assert all(sentence.count("[MASK]") == 1 for sentence in shown)
    body, gap = model("bert"), torch.tensor([5, 6, MASK, 8, 9])
    said = body(Ragged.pack([gap]), None, torch.tensor([2]))
    for place in (0, 1, 3, 4):
        other = gap.clone()
        other[place] = 20
        assert not torch.allclose(body(Ragged.pack([other]), None, torch.tensor([2])), said)


def test_next_sentence_loss_is_binary_cross_entropy_from_the_first_token():
    """Multilingual NLP, "Pretraining Transformers": adjacent or not; binary classification head, cross-entropy."""
    body = model("bert", head="pretraining")
    follows = torch.tensor([True, False, True, False, False])
    batch = mlm.make_inputs(text(framed=True), MARKS, CHANCE, is_next=follows)
    _, pairs = mlm.mlm_and_nsp_losses(body, batch)
    hidden = body.hidden_states(batch.source).hidden
    first = hidden.values[hidden.layout.cu_seqlens[:-1].long()]  # [CLS]
    p = torch.softmax(body.aux_head(first), -1)[:, 0]
    y = follows.double()
    torch.testing.assert_close(pairs.total, -(y * p.log() + (1 - y) * (1 - p).log()).sum())
    assert pairs.num_targets == 5


def test_predicting_the_next_word_is_for_models_that_do_not_see_it():
    """Transformers and Pretraining, 2.1 BERT: "if we did unmasked self-attention, we can already directly see the next
    word", so that an encoder is asked for masked words and only a decoder for the next one."""
    assert mlm.MaskedLM.architectures == {"encoder"}
    assert clm.CausalLM.architectures == {"decoder"}
    body, ids = model("gpt2"), torch.arange(5, 15)
    batch = clm.make_inputs(PackedChunks.from_arrays(ids, [10], [0]))
    said = body(batch.tokens)
    for place in range(1, 9):
        changed = batch.tokens.values.clone()
        changed[place] = 30
        torch.testing.assert_close(body(batch.tokens.with_values(changed))[:place], said[:place])


@pytest.mark.parametrize("number", range(5))
def test_the_decoder_of_t5_predicts_a_sequence_that_contains_the_missing_text(number: int):
    """Transformers and Pretraining, 2.1 T5, figure 4: the encoder's text has gaps, the decoder fills them in."""
    found = corrupt_spans(
        PackedChunks.from_arrays(CAT, [5], [number]),
        VocabTables(SPECIAL, sentinel_ids=(10, 11)),
        CounterRNG(0, 0),
        SpanCorruptionConfig(noise_density=0.4, mean_noise_span_length=2),
    )
    source, target = ([WORDS[i] for i in ids.tolist()] for ids in (found.source, found.target))
    assert target[0] == "<0>"
    assert target[-1] == "<1>"
    missing = " ".join(target[1:-1])
    assert " ".join(source).replace("<0>", missing) == "The cat chased the mouse"
