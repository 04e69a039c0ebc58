"""BERT against Hugging Face's, tiny and odd: every head, activation and tie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from both import (
    LENGTHS,
    Both,
    check_gradients,
    check_logits,
    check_maps,
    check_own_round_trip,
    check_round_trip,
    randomised,
)

from qkv.objectives.classification import Inputs, head_logits, multi_label_bce

ODD: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 35,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 51,
    "max_position_embeddings": 13,
    "type_vocab_size": 3,
    "num_labels": 4,
}
HEADS = ["MaskedLM", "SequenceClassification", "TokenClassification", "NextSentencePrediction"]
CASES = {head: (head, {}) for head in HEADS} | {
    "QuestionAnswering": ("QuestionAnswering", {"num_labels": 2}),
    "regression": ("SequenceClassification", {"num_labels": 1}),
    "several labels": ("SequenceClassification", {"problem_type": "multi_label_classification"}),
    "relu": ("MaskedLM", {"hidden_act": "relu"}),
    "gelu_new": ("MaskedLM", {"hidden_act": "gelu_new"}),
    "silu": ("MaskedLM", {"hidden_act": "silu"}),
    "untied": ("MaskedLM", {"tie_word_embeddings": False}),
    "other epsilon and one layer": ("TokenClassification", {"layer_norm_eps": 1e-3, "num_hidden_layers": 1}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make(tmp_path, *request.param)


def make(tmp_path: Path, head: str, changes: dict[str, Any]) -> Both:
    config = transformers.BertConfig(**(ODD | changes))
    theirs = randomised(getattr(transformers, f"BertFor{head}")(config))
    if not config.tie_word_embeddings:  # untied, theirs has a second bias that it never adds
        theirs.cls.predictions.bias.data.copy_(theirs.cls.predictions.decoder.bias)
    return Both(theirs, tmp_path / "theirs")


def test_logits_equal_theirs(both: Both) -> None:
    check_logits(both)


def test_gradients_equal_theirs(both: Both) -> None:
    check_gradients(both)


def test_out_and_in_again_gives_equal_bytes(both: Both, tmp_path: Path) -> None:
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


def test_the_loss_of_several_labels_equals_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "SequenceClassification", {"problem_type": "multi_label_classification"})
    assert both.ours.model.spec.head.multi_label
    right = torch.randint(0, 2, (len(LENGTHS), 4), generator=torch.Generator().manual_seed(1)).float()
    batch = Inputs(both.source(), None, None, right)
    with torch.no_grad():
        total, targets = multi_label_bce(head_logits(both.ours.model, batch), batch)
        theirs = both.their_output(labels=right).loss
    assert float(total / targets) == pytest.approx(float(theirs), abs=1e-5)


def test_several_labels_are_said_of_no_other_head(tmp_path: Path) -> None:
    both = make(tmp_path, "TokenClassification", {"problem_type": "multi_label_classification"})
    assert not both.ours.model.spec.head.multi_label


def test_captured_maps_equal_eager_attention(tmp_path: Path) -> None:
    check_maps(make(tmp_path, "MaskedLM", {}), attentions="encoder.{i}.self_attention")


def test_segments_are_added_as_theirs_are(tmp_path: Path) -> None:
    both = make(tmp_path, "MaskedLM", {})
    source = both.source()
    segments = source.with_values(source.layout.positions % 3)
    ours = both.ours.model(source, segments.values)
    theirs = both.their_logits(token_type_ids=segments.to_padded().long())
    assert float((ours - theirs).abs().max()) <= 1e-4


def test_two_heads_of_pretraining_equal_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "PreTraining", {})
    source = both.source()
    masked, following = both.ours.model.forward_with_aux_head(source)
    found = both.their_output()
    assert float((masked - found.prediction_logits[source.layout.valid_mask()]).abs().max()) <= 1e-4
    assert float((following - found.seq_relationship_logits).abs().max()) <= 1e-4


def test_multiple_choice_scores_each_choice(tmp_path: Path) -> None:
    both = make(tmp_path, "MultipleChoice", {})
    source = both.source()  # four sequences: two questions of two choices
    padded, real = source.to_padded().long(), source.layout.valid_mask().long()
    theirs = both.theirs(padded.view(2, 2, -1), attention_mask=real.view(2, 2, -1)).logits
    assert float((both.ours.model(source).view(2, 2) - theirs).abs().max()) <= 1e-4


def test_the_body_and_its_pooler_equal_theirs(tmp_path: Path) -> None:
    both = Both(randomised(transformers.BertModel(transformers.BertConfig(**ODD))), tmp_path / "theirs")
    found, source = both.their_output(), both.source()
    hidden = both.ours.model.hidden_states(source).hidden.values
    assert float((hidden - found.last_hidden_state[source.layout.valid_mask()]).abs().max()) <= 1e-4
    assert float((both.ours.model(source) - found.pooler_output).abs().max()) <= 1e-4
    check_own_round_trip(both, tmp_path / "own")


def test_a_body_without_pooler_loads_as_the_body_alone(tmp_path: Path) -> None:
    theirs = randomised(transformers.BertModel(transformers.BertConfig(**ODD), add_pooling_layer=False))
    both = Both(theirs, tmp_path / "theirs")
    assert both.ours.model.head is None
    check_logits(both)


def test_the_body_under_a_new_head_names_what_is_fresh_and_what_is_left(tmp_path: Path) -> None:
    from qkv.checkpoints import load

    make(tmp_path, "PreTraining", {})
    bundle = load(tmp_path / "theirs", head="token", labels=["B", "I", "O"])
    assert bundle.missing_keys == ("head.linear.bias", "head.linear.weight")
    assert any(name.startswith("cls.predictions") for name in bundle.unexpected_keys)
    assert any(name.startswith("bert.pooler") for name in bundle.unexpected_keys)
    assert bundle.model(Both.source(make(tmp_path, "PreTraining", {}))).shape == (sum(LENGTHS), 3)
    assert bundle.model.head.linear.weight.abs().max() > 0
    assert torch.isfinite(bundle.model.head.linear.weight).all()


def test_a_body_gets_a_language_models_head_over_its_own_embedding(tmp_path: Path) -> None:
    from qkv.checkpoints import load

    transformers.BertModel(transformers.BertConfig(**ODD)).save_pretrained(tmp_path / "theirs")
    bundle = load(tmp_path / "theirs", head="masked_lm")
    assert "head.linear.bias" in bundle.missing_keys
    assert "head.linear.weight" not in bundle.missing_keys
    assert bundle.model.head.linear.weight is bundle.model.source_embedding.tokens.weight
    assert not bundle.model.head.linear.bias.any()
