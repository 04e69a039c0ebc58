"""Log-probabilities of given texts against the loss of Hugging Face's models."""

from __future__ import annotations

import pytest
import test_parity_generate
import test_parity_generate_seq2seq
import torch
from both import NEAR, ids

from qkv.generation.log_probs import next_log_probs
from qkv.nn import Ragged

VOCABULARY = 31


def test_the_mean_log_probability_of_a_language_models_text_is_its_negative_loss() -> None:
    both = test_parity_generate.made("GPT2")
    for row in ids([9, 2, 5], VOCABULARY - 1, 3).sequences():
        loss = both.theirs(input_ids=row[None], labels=row[None]).loss
        log_probs = next_log_probs(both.ours.model, [Ragged.pack([row[:-1]])], None, row[1:])
        assert -float(log_probs.mean()) == pytest.approx(float(loss.detach()), abs=NEAR)


@pytest.mark.parametrize("family", ["marian", "t5", "bart"])
def test_the_mean_log_probability_of_targets_is_the_negative_loss_of_an_encoder_decoder(family: str) -> None:
    both = test_parity_generate_seq2seq.made(family)
    source, target = ids([4, 9, 1], VOCABULARY - 1, 4), ids([3, 5, 6], VOCABULARY - 1, 5)
    spec = both.ours.model.spec
    rows = target.sequences()
    labels = [torch.cat([row, torch.tensor([spec.eos_id])]) for row in rows]
    theirs = both.theirs(
        input_ids=source.to_padded().long(),
        attention_mask=source.layout.valid_mask().long(),
        labels=Ragged.pack(labels).to_padded(-100).long(),
    ).loss
    inputs = Ragged.pack([torch.cat([torch.tensor([spec.bos_id]), row]) for row in rows])
    log_probs = next_log_probs(both.ours.model, [source, inputs], None, torch.cat(labels))
    assert -float(log_probs.mean()) == pytest.approx(float(theirs.detach()), abs=NEAR)
