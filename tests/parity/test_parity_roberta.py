"""RoBERTa against Hugging Face's, tiny and odd: every head, activation and tie, and where positions begin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from both import (
    LENGTHS,
    NEAR,
    Both,
    check_gradients,
    check_logits,
    check_maps,
    check_own_round_trip,
    check_round_trip,
    randomised,
)

from qkv.checkpoints import load
from qkv.errors import InputError
from qkv.families import roberta
from qkv.families.hf.format import hf_config_from_spec, spec_from_hf_config
from qkv.nn import Ragged
from qkv.nn.construction import build_on_meta

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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "masked_lm": ("ForMaskedLM", {}),
    "sequence": ("ForSequenceClassification", {"classifier_dropout": 0.3}),
    "regression": ("ForSequenceClassification", {"num_labels": 1}),
    "token": ("ForTokenClassification", {}),
    "span": ("ForQuestionAnswering", {"num_labels": 2}),
    "untied": ("ForMaskedLM", {"tie_word_embeddings": False}),
    "padding is the first token": ("ForMaskedLM", {"pad_token_id": 0}),
    "padding is the third token, no row to spare": (
        "ForTokenClassification",
        {"pad_token_id": 2, "max_position_embeddings": 3 + max(LENGTHS)},
    ),
    "relu": ("ForMaskedLM", {"hidden_act": "relu"}),  # the head's stays a GELU
    "gelu_new": ("ForMaskedLM", {"hidden_act": "gelu_new"}),
    "silu": ("ForMaskedLM", {"hidden_act": "silu"}),
    "one segment, one layer, other epsilon": (
        "ForTokenClassification",
        {"type_vocab_size": 1, "num_hidden_layers": 1, "layer_norm_eps": 1e-3},
    ),
}


class Padded(Both):
    """Filled up with the token that their positions leave out."""

    def their_output(self, **options: Any) -> Any:
        padded = self.source().to_padded(self.theirs.config.pad_token_id)
        return super().their_output(**({"input_ids": padded} | options))


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make(tmp_path, *request.param)


def make(tmp_path: Path, head: str, changes: dict[str, Any], **more: Any) -> Both:
    config = transformers.RobertaConfig(**(ODD | changes))
    theirs = randomised(getattr(transformers, f"Roberta{head}")(config, **more))
    if head == "ForMaskedLM" and not config.tie_word_embeddings:  # untied, theirs has a second bias that it never adds
        theirs.lm_head.bias.data.copy_(theirs.lm_head.decoder.bias)
    return Padded(theirs, tmp_path / "theirs")


def test_logits_equal_theirs(both: Both) -> None:
    check_logits(both)


def test_gradients_equal_theirs(both: Both) -> None:
    check_gradients(both)


def test_out_and_in_again_gives_equal_bytes(both: Both, tmp_path: Path) -> None:
    check_own_round_trip(both, tmp_path / "own")
    check_round_trip(both, tmp_path / "again")


def test_captured_maps_equal_eager_attention(tmp_path: Path) -> None:
    check_maps(make(tmp_path, "ForMaskedLM", {}), attentions="encoder.{i}.self_attention")


def test_segments_are_added_as_theirs_are(tmp_path: Path) -> None:
    both = make(tmp_path, "ForMaskedLM", {})
    source = both.source()
    segments = source.with_values(source.layout.positions % 3)
    ours = both.ours.model(source, segments.values)
    theirs = both.their_logits(token_type_ids=segments.to_padded().long())
    assert float((ours - theirs).detach().abs().max()) <= NEAR


def test_multiple_choice_scores_each_choice(tmp_path: Path) -> None:
    both = make(tmp_path, "ForMultipleChoice", {"classifier_dropout": 0.4})
    source = both.source()  # four sequences: two questions of two choices
    padded, real = source.to_padded(1).long(), source.layout.valid_mask().long()
    theirs = both.theirs(padded.view(2, 2, -1), attention_mask=real.view(2, 2, -1)).logits
    assert float((both.ours.model(source).view(2, 2) - theirs).detach().abs().max()) <= NEAR
    assert both.ours.model.spec.head.dropout == both.theirs.dropout.p
    check_own_round_trip(both, tmp_path / "own")


def test_the_body_and_its_pooler_equal_theirs(tmp_path: Path) -> None:
    both = make(tmp_path, "Model", {})
    found, source = both.their_output(), both.source()
    hidden = both.ours.model.hidden_states(source).hidden.values
    assert float((hidden - found.last_hidden_state[source.layout.valid_mask()]).detach().abs().max()) <= NEAR
    assert float((both.ours.model(source) - found.pooler_output).detach().abs().max()) <= NEAR
    check_own_round_trip(both, tmp_path / "own")


def test_a_body_without_pooler_loads_as_the_body_alone(tmp_path: Path) -> None:
    both = make(tmp_path, "Model", {}, add_pooling_layer=False)
    assert both.ours.model.head is None
    check_logits(both)


def test_the_table_is_as_long_as_theirs_less_the_rows_up_to_the_paddings(tmp_path: Path) -> None:
    both = make(tmp_path, "ForMaskedLM", {"max_position_embeddings": 9})
    assert both.ours.model.spec.source_embedding.max_length == 7
    both.ours.model(Ragged.from_lengths(torch.full((7,), 5), [7]))
    with pytest.raises(InputError, match="at most 7"):
        both.ours.model(Ragged.from_lengths(torch.full((8,), 5), [8]))


def test_bert_s_other_heads_are_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "ForMaskedLM", {})
    with pytest.raises(InputError, match="no 'next_sentence'"):
        load(tmp_path / "theirs", head="next_sentence")


@pytest.mark.parametrize("key", ["pad_token_id", "max_position_embeddings"])
def test_a_config_that_does_not_say_where_positions_begin_is_refused(tmp_path: Path, key: str) -> None:
    both = make(tmp_path, "ForMaskedLM", {})
    path = both.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: None}))
    with pytest.raises(InputError, match=key):
        load(both.folder)


@pytest.mark.parametrize(("size", "parameters"), [("base", 124_645_632), ("large", 355_359_744)])
def test_a_size_has_the_published_models_parameters(size: str, parameters: int) -> None:
    made = roberta.make_spec(roberta.PRESETS[size], head="pooler")
    assert sum(p.numel() for p in build_on_meta(made).parameters()) == parameters


def test_every_default_is_theirs() -> None:
    """A config.json may leave out whatever is at its default."""
    written, _ = hf_config_from_spec(
        roberta, spec_from_hf_config(roberta, {}, "config.json", "masked_lm", ("no", "yes"))
    )
    theirs = transformers.RobertaConfig().to_dict()
    for key in written.keys() - {"architectures", "dtype", "position_embedding_type"}:
        assert written[key] == theirs[key], key
