"""Pretraining losses against Hugging Face's models, which take labels: the same masks, the same loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from both import Both, check_gradients, randomised
from torch import Tensor

from qkv.data.noise.config import MLMConfig, SpanCorruptionConfig
from qkv.data.rng import CounterRNG, PackedChunks
from qkv.nn import Ragged
from qkv.objectives import clm, denoising, mlm, reconstruction, span_corruption
from qkv.objectives.loss import LossSum
from qkv.tokenization.vocab_tables import VocabTables

VOCABULARY = 41
SENTINELS = tuple(range(40, 30, -1))
CHANCE = CounterRNG(6, 2)
IGNORED = -100  # what stands in their labels where nothing is asked for
ODD = {"vocab_size": VOCABULARY}
BERT = ODD | {"hidden_size": 35, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 51}
GPT2 = ODD | {"n_embd": 35, "n_layer": 3, "n_head": 5, "n_positions": 40, "bos_token_id": 1, "eos_token_id": 2}
T5 = ODD | {"d_model": 35, "d_kv": 6, "num_layers": 3, "num_heads": 5, "d_ff": 51, "decoder_start_token_id": 0}
BART = ODD | {"d_model": 35, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 40}
BART |= {"encoder_attention_heads": 5, "decoder_attention_heads": 7, "encoder_ffn_dim": 51, "decoder_ffn_dim": 33}


def marks() -> VocabTables:
    special = np.zeros(VOCABULARY, dtype=bool)
    special[[*range(5), *SENTINELS]] = True
    return VocabTables(special, mask_id=4, is_sentence_end=np.arange(VOCABULARY) == 10, sentinel_ids=SENTINELS)


def text(lengths: tuple[int, ...] = (9, 2, 14, 5)) -> PackedChunks:
    ids = np.random.default_rng(1).integers(5, 31, sum(lengths))
    return PackedChunks.from_arrays(ids, lengths, np.arange(len(lengths)))


def make(tmp_path: Path, name: str, config: Any) -> Both:
    return Both(randomised(getattr(transformers, name)(config)), tmp_path / "theirs")


def padded(run: Ragged) -> dict[str, Tensor]:
    return {"input_ids": run.to_padded().long(), "attention_mask": run.layout.valid_mask().long()}


def check(both: Both, ours: Tensor, theirs: Tensor) -> None:
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    check_gradients(both, lambda: ours.view(1), lambda: theirs.view(1))


def mean_loss(*losses: LossSum) -> Tensor:
    return torch.stack([loss.total / loss.num_targets for loss in losses]).sum()


def asked(batch: mlm.Inputs) -> Tensor:
    """Labels as theirs come.  # [B, longest]"""
    labels = torch.full_like(batch.source.values, IGNORED)
    labels[batch.positions] = batch.labels
    return batch.source.with_values(labels).to_padded(IGNORED).long()


def test_the_masked_loss_is_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "BertForMaskedLM", transformers.BertConfig(**BERT))
    batch = mlm.make_inputs(text(), marks(), CHANCE, MLMConfig(mask_prob=0.4))
    theirs = both.theirs(**padded(batch.source), labels=asked(batch)).loss
    check(both, mean_loss(mlm.loss(both.ours.model, batch)), theirs)


def test_the_two_losses_of_pretraining_are_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "BertForPreTraining", transformers.BertConfig(**BERT))
    pieces, follows = text(), torch.tensor([True, False, False, True])
    segments = torch.from_numpy((np.arange(len(pieces.ids)) % 5 > 2).astype(np.int64))
    batch = mlm.make_inputs(pieces, marks(), CHANCE, MLMConfig(mask_prob=0.4), segments=segments, is_next=follows)
    theirs = both.theirs(
        **padded(batch.source),
        token_type_ids=batch.source.with_values(segments).to_padded().long(),
        labels=asked(batch),
        next_sentence_label=(~follows).long(),  # 0: the second sentence follows
    ).loss
    check(both, mean_loss(*mlm.mlm_and_nsp_losses(both.ours.model, batch)), theirs)


def test_the_causal_loss_is_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "GPT2LMHeadModel", transformers.GPT2Config(**GPT2))
    pieces = text()
    run = Ragged.from_lengths(torch.from_numpy(pieces.ids), pieces.lengths.tolist())
    theirs = both.theirs(**padded(run), labels=run.to_padded(IGNORED).long()).loss
    check(both, mean_loss(clm.loss(both.ours.model, clm.make_inputs(pieces))), theirs)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_the_loss_of_restoring_is_theirs(tmp_path: Path, name: str) -> None:
    config = transformers.T5Config(**T5) if name == "T5" else transformers.BartConfig(**BART)
    both = make(tmp_path, f"{name}ForConditionalGeneration", config)
    spec = both.ours.model.spec
    if name == "T5":
        batch = span_corruption.make_inputs(
            text(), marks(), CHANCE, SpanCorruptionConfig(noise_density=0.3, mean_noise_span_length=2), model=spec
        )
    else:
        batch = denoising.make_inputs(text(), marks(), CHANCE, model=spec)
    labels = batch.target.with_values(batch.labels).to_padded(IGNORED).long()  # they open the target themselves
    theirs = both.theirs(**padded(batch.source), labels=labels).loss
    check(both, mean_loss(reconstruction.loss(both.ours.model, batch)), theirs)
