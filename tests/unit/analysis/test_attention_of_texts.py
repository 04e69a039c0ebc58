"""`qkv.attention` and captures around functions of many texts: one map per text, in input order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import qkv
from qkv.analysis import capture_attention
from qkv.checkpoints.inputs import encode_inputs
from qkv.families import gpt2
from qkv.tokenization.tokenizer import train_tokenizer

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("generation", "checkpoints")]
from checkpoints import checkpoint
from writers import tiny

TEXTS = ["the cat sat on the mat", "a dog", "the dog sat", "a cat", "the mat"]  # lengths in no order


def bundle_of(family: str) -> qkv.ModelBundle:
    letters = train_tokenizer("character", ["abcde"])
    return qkv.ModelBundle(tiny(family, vocabulary=9).eval(), letters, letters)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> qkv.ModelBundle:
    return qkv.load(checkpoint(tmp_path_factory.mktemp("attention") / "bert", "sequence"))


def test_each_text_has_the_maps_that_it_has_alone(encoder: qkv.ModelBundle) -> None:
    results = qkv.attention(encoder, TEXTS)
    assert [result.tokens for result in results] == encoder.tokenize(TEXTS)
    for text, result in zip(TEXTS, results, strict=True):
        alone = encoder([text], attentions=True).attentions[0]
        assert list(result) == ["encoder.0", "encoder.1"]
        for layer, weights in result.items():
            torch.testing.assert_close(weights, alone[f"{layer}.self_attention"])
            assert weights.shape[1:] == (len(result.tokens), len(result.tokens))


def test_layers_are_chosen_by_name_pattern_kind_and_number(encoder: qkv.ModelBundle) -> None:
    chosen = {str(layers): list(qkv.attention(encoder, "a cat", layers)[0]) for layers in ("encoder.1", -1, [0], "e*")}
    both = ["encoder.0", "encoder.1"]
    assert chosen == {"encoder.1": ["encoder.1"], "-1": ["encoder.1"], "[0]": ["encoder.0"], "e*": both}
    with pytest.raises(qkv.InputError, match=r"no layer 'encoder\.2'; did you mean"):
        qkv.attention(encoder, "a cat", "encoder.2")


def test_a_decoder_is_causal_and_an_encoder_decoder_has_three_kinds() -> None:
    letters = train_tokenizer("character", ["abcde"])
    shape = gpt2.Config(d_model=16, heads=2, layers=2, d_ff=16, max_length=8)
    model = qkv.build(gpt2.make_spec(shape, target_vocab_size=letters.vocab_size)).eval()
    (causal,) = qkv.attention(qkv.ModelBundle(model, letters, letters), "abcd")
    assert list(causal) == ["decoder.0", "decoder.1"]
    assert all(float(weights.triu(1).sum()) == 0 for weights in causal.values())
    bundle = bundle_of("transformer")
    first, second = qkv.attention(bundle, ["abc", "d"], targets=["e", "dcba"])
    assert {name.split(".")[0] for name in second} == {"encoder", "decoder", "cross"}
    assert second["cross.0"].shape[1:] == (len(second.target_tokens), len(second.tokens)) == (5, 2)
    assert first["decoder.0"].shape[1:] == (2, 2)
    generated = qkv.attention(bundle, ["abc"], "cross.*", config=qkv.GenerationConfig(max_new_tokens=3))[0]
    assert len(generated.target_tokens) == generated["cross.0"].shape[1]


def test_a_capture_around_embed_and_predict_collects_all_batches_in_input_order(encoder: qkv.ModelBundle) -> None:
    expected = [result["encoder.0"] for result in qkv.attention(encoder, TEXTS)]
    config = qkv.GenerationConfig(batch_tokens=8)
    for run in (
        lambda: qkv.embed(encoder, TEXTS, batch_tokens=8),
        lambda: qkv.predict(encoder, TEXTS, config),
        lambda: encoder(TEXTS, hidden_states=True, attentions=True),
    ):
        with capture_attention(encoder) as maps:
            run()
        torch.testing.assert_close(maps["encoder.0.self_attention"], expected)


def test_a_further_call_inside_a_capture_replaces_the_maps(encoder: qkv.ModelBundle) -> None:
    with capture_attention(encoder) as maps:
        qkv.embed(encoder, TEXTS)
        qkv.embed(encoder, TEXTS[:2])
    assert len(maps["encoder.0.self_attention"]) == 2


def test_a_capture_around_generation_has_one_map_per_text_and_refuses_beams() -> None:
    bundle, texts = bundle_of("transformer"), ["abcd", "a", "bc"]
    with capture_attention(bundle) as maps:
        qkv.predict(bundle, texts, qkv.GenerationConfig(max_new_tokens=4, batch_tokens=6))
    lengths = [len(tokens) for tokens in bundle.tokenize(texts)]
    assert [weights.shape[-1] for weights in maps["encoder.0.self_attention"]] == lengths
    assert [weights.shape[-1] for weights in maps["decoder.0.cross_attention"]] == lengths
    with pytest.raises(qkv.InputError, match="several sequences"), capture_attention(bundle):
        qkv.predict(bundle, texts, qkv.GenerationConfig(num_beams=2, max_new_tokens=4))


def test_a_padded_batch_is_refused_with_the_way_to_pack_it(encoder: qkv.ModelBundle) -> None:
    encodings = encode_inputs(encoder, TEXTS[:2], TEXTS[:2])
    packed = qkv.Ragged.pack([torch.tensor(encoding.ids) for encoding in encodings])
    mask = packed.with_values(torch.ones_like(packed.values)).to_padded()
    for arguments in ((packed.to_padded(),), (packed.to_padded(), mask)):
        with pytest.raises(qkv.InputError, match=r"not a tensor \[2, 8\]; use qkv.Ragged.from_padded"):
            encoder.model(*arguments)
        with pytest.raises(qkv.InputError, match="expected a text or a pair of texts, not a Tensor"):
            encoder(arguments[0])
    repacked = qkv.Ragged.from_padded(packed.to_padded(), mask)
    assert torch.equal(encoder.model(repacked), encoder.model(packed))
