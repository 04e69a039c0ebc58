from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from qkv import spec
from qkv.errors import InputError
from qkv.families import bart, t5

MODEL = spec.Model(
    family="test",
    encoder=spec.RecurrentEncoder(d_model=4, hidden_size=3),
    decoder=spec.RecurrentDecoder(
        d_model=4, encoder_dim=6, hidden_size=5, attention=spec.Attention(query_dim=5, kv_dim=6, heads=1)
    ),
    source_embedding=spec.Embedding(vocab_size=9, d_model=4, norm=spec.Norm(kind="rms")),
    target_embedding=spec.Embedding(vocab_size=8, d_model=4, dropout=0.1),
    head=spec.Head(kind="lm", d_model=5, num_outputs=8),
)


def changed(**fields: object) -> str:
    return json.dumps(json.loads(spec.to_json(MODEL)) | fields)


def test_a_spec_comes_back_from_json_as_it_was() -> None:
    assert spec.from_json(spec.to_json(MODEL)) == MODEL


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        MODEL.bos_id = 7  # type: ignore[misc]


def test_a_spec_is_hashable() -> None:
    assert len({MODEL, spec.from_json(spec.to_json(MODEL))}) == 1


def test_text_that_is_not_json_is_refused_with_its_line() -> None:
    with pytest.raises(InputError, match=r"model\.json, line 2, column 2: not JSON"):
        spec.from_json("{\n oops", "model.json")


def test_json_that_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="holds a Norm, not a Model"):
        spec.from_json('{"type": "Norm"}')


@pytest.mark.parametrize("text", ["[]", "3", "null", '"Model"'])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a Model"):
        spec.from_json(text)


def test_an_unknown_type_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match="did you mean 'Model'"):
        spec.from_json('{"type": "Modle"}')


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match="Model has no field 'sorce_embedding'; did you mean 'source_embedding'"):
        spec.from_json(changed(sorce_embedding=None))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bos_id", "2"),
        ("bos_id", True),
        ("bos_id", 1.5),
        ("share_embeddings", 1),
        ("family", None),
        ("source_embedding", "none"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"Model\.{key} cannot be"):
        spec.from_json(changed(**{key: value}))


def test_a_value_outside_its_choices_is_refused() -> None:
    head = {"type": "Head", "kind": "poem", "d_model": 5, "num_outputs": 8}
    with pytest.raises(InputError, match=r"Head\.kind cannot be 'poem'"):
        spec.from_json(changed(head=head))


def test_a_part_in_the_place_of_another_is_refused() -> None:
    with pytest.raises(InputError, match=r"Model\.head cannot be"):
        spec.from_json(changed(head={"type": "Norm"}))


def test_a_missing_field_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="num_outputs"):
        spec.from_json(changed(head={"type": "Head", "kind": "lm", "d_model": 5}))


def test_a_refusal_names_the_place() -> None:
    with pytest.raises(InputError, match=r"spec: head: unknown type"):
        spec.from_json(changed(head={"type": "Hat"}))


def test_a_whole_number_serves_where_a_fraction_is_asked() -> None:
    embed = {"type": "Embedding", "vocab_size": 8, "d_model": 4, "dropout": 0}
    assert spec.from_json(changed(target_embedding=embed)).target_embedding == spec.Embedding(vocab_size=8, d_model=4)


def test_sizes_left_out_follow_from_width_and_heads() -> None:
    attention = spec.Attention(query_dim=12, heads=3)
    assert (attention.q_head_dim, attention.k_head_dim, attention.effective_v_head_dim) == (4, 4, 4)


def test_without_projection_key_and_value_have_the_memorys_size() -> None:
    attention = spec.Attention(query_dim=12, kv_dim=6, heads=3, use_projections=False)
    assert (attention.q_head_dim, attention.k_head_dim, attention.effective_v_head_dim) == (4, 2, 2)


def test_the_output_of_a_projected_attention_has_the_askers_width() -> None:
    assert spec.Attention(query_dim=12, kv_dim=6, heads=3, v_head_dim=7).output_dim == 12


def test_the_output_without_projection_is_the_joined_contexts() -> None:
    assert spec.Attention(query_dim=12, kv_dim=6, heads=3, use_projections=False).output_dim == 6


def test_another_dropout_changes_what_layers_give_or_attentions_weights_and_nothing_else() -> None:
    shape = bart.Config(d_model=16, heads=2, layers=1, dropout=0.2, attention_dropout=0.3, activation_dropout=0.0)
    made = bart.make_spec(shape, source_vocab_size=30)
    wider = spec.with_dropout(made, 0.4, None)
    assert wider == bart.make_spec(spec.replace(shape, dropout=0.4), source_vocab_size=30)
    assert spec.with_dropout(wider, 0.2, None) == made
    assert spec.with_dropout(made, None, 0.0) == bart.make_spec(
        spec.replace(shape, attention_dropout=0.0), source_vocab_size=30
    )
    assert spec.with_dropout(made, None, None) == made


def test_t5_drops_inside_its_feed_forward_layers_as_much_as_behind_its_blocks() -> None:
    shape = t5.Config(d_model=16, heads=2, layers=1, dropout=0.2)
    assert spec.with_dropout(t5.make_spec(shape, source_vocab_size=30), 0.4, 0.4) == t5.make_spec(
        spec.replace(shape, dropout=0.4), source_vocab_size=30
    )


OLD_SPECS = [  # what an earlier release wrote, and the line that refuses it
    ({"encoder": {"type": "Stack"}}, "encoder: the type Stack is now 'TransformerStack'"),
    ({"source": None}, "Model.source is now 'source_embedding'"),
    ({"head": {"type": "Head", "kind": "lm", "width": 5}}, "head: Head.width is now 'd_model'"),
    ({"feature_layers": "last_four"}, "Model.feature_layers 'last_four' is now 'concat_last_4'"),
]


@pytest.mark.parametrize(("fields", "message"), OLD_SPECS)
def test_a_spec_of_an_earlier_release_is_refused_with_the_new_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        spec.from_json(changed(**fields), "spec.json")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
