"""Generated text as a user reads it: streams of pieces, streams of inputs, and sources that are decoded again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import qkv
from qkv.families import gpt2, transformer
from qkv.generation.generate import encode_for_generation
from qkv.nn import build
from qkv.tasks.predictions import TaskPrediction
from qkv.tokenization.tokenizer import train_tokenizer

GREEDY = qkv.GenerationConfig(max_new_tokens=12)
SAMPLING = replace(GREEDY, do_sample=True, seed=3)


def translator() -> qkv.ModelBundle:
    torch.manual_seed(1)
    tokenizer = train_tokenizer("character", ["abcdefgh x:."])
    shape = transformer.Config(d_model=16, heads=2, layers=1, d_ff=16, max_length=40, dropout=0.0)
    sizes = {f"{side}_vocab_size": tokenizer.vocab_size for side in ("source", "target")}
    model = build(transformer.make_spec(shape, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return qkv.ModelBundle(model, tokenizer, tokenizer)


def bytes_model() -> qkv.ModelBundle:
    """A decoder whose tokens are bytes, so that most of them are no characters of their own."""
    torch.manual_seed(2)
    tokenizer = train_tokenizer("bpe", ["abc déjà"], vocab_size=262)
    shape = replace(next(iter(gpt2.PRESETS.values())), d_model=16, heads=2, layers=1, d_ff=16, max_length=64)
    return qkv.ModelBundle(
        build(gpt2.make_spec(shape, target_vocab_size=tokenizer.vocab_size)).eval(), tokenizer, tokenizer
    )


@pytest.mark.parametrize(
    "config",
    [GREEDY, SAMPLING, replace(GREEDY, num_beams=3), replace(SAMPLING, stop_strings=("bc", "e"), max_new_tokens=30)],
)
def test_the_pieces_of_a_stream_are_the_text_of_a_prediction(config: qkv.GenerationConfig) -> None:
    bundle = translator()
    for text in ("abc", "h", "fa: x"):
        pieces = list(qkv.stream(bundle, text, config))
        assert "".join(pieces) == qkv.predict(bundle, text, config)[0].text
        assert all(pieces)
        assert config.num_beams == 1 or len(pieces) <= 1


def test_the_pieces_of_a_stream_are_whole_characters() -> None:
    bundle, text = bytes_model(), "déjà 日本"
    assert bundle.source_tokenizer is not None
    halves = bundle.source_tokenizer.encode_batch(["日"])[0]
    config = replace(GREEDY, forced_prefix="日本日本 日é日")
    pieces = list(qkv.stream(bundle, text, config))
    assert len(halves) > 1
    assert "".join(pieces) == qkv.predict(bundle, text, config)[0].text
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


def test_a_stream_has_one_output() -> None:
    with pytest.raises(qkv.InputError, match="a stream has one output"):
        qkv.stream(translator(), "abc", replace(SAMPLING, n_best=2))


def test_a_stream_of_inputs_keeps_its_order_and_names_bad_ones() -> None:
    predictor = qkv.Predictor(translator(), config=GREEDY)
    texts = ["abc" * (1 + i % 3) for i in range(20)]
    texts[7], texts[11] = "", "a?"
    outputs = list(predictor.predict_stream((text, f"line {i}") for i, text in enumerate(texts)))
    errors = {i: str(output) for i, output in enumerate(outputs) if isinstance(output, qkv.InputError)}
    assert list(errors) == [7, 11]
    assert errors[7].startswith("line 7: ")
    assert errors[11].startswith("line 11: ")
    for text, output in zip(texts, outputs, strict=True):
        if isinstance(output, TaskPrediction):
            assert output.text == predictor([text])[0].text


def test_encoded_texts_are_decoded_like_the_texts_themselves() -> None:
    bundle, texts = translator(), ["abc", "h", "fa: x"]
    predictor, calls = qkv.Predictor(bundle, config=GREEDY), []
    encoded = predictor.encode(texts)
    bundle.model.encoder.register_forward_hook(lambda *_: calls.append(1))
    configs = GREEDY, SAMPLING, replace(GREEDY, forced_prefix="ab", num_beams=2)
    decoded = [predictor.decode(encoded, config) for config in configs]
    assert not calls
    for predictions, config in zip(decoded, configs, strict=True):
        assert [p.text for p in predictions] == [p.text for p in qkv.predict(bundle, texts, config)]


def test_texts_are_encoded_and_decoded_with_the_same_dtype() -> None:
    predictor, config = qkv.Predictor(translator()), qkv.GenerationConfig(dtype="int8")
    with pytest.raises(
        qkv.InputError, match="dtype=int8: the texts were encoded with dtype=None; encode them with this"
    ):
        predictor.decode(predictor.encode(["abc"]), config)
    assert len(predictor.decode(predictor.encode(["abc"], config), config)) == 1


def test_bf16_is_refused_on_a_cpu() -> None:
    with pytest.raises(qkv.InputError, match="dtype: bf16 runs on a GPU"):
        qkv.predict(translator(), ["abc"], qkv.GenerationConfig(dtype="bf16"))


def test_a_forced_prefix_with_an_unknown_token_is_refused_by_its_name() -> None:
    with pytest.raises(qkv.InputError, match="forced_prefix: 'Q' in 'aQ' is not in the target vocabulary"):
        qkv.predict(translator(), ["abc"], qkv.GenerationConfig(forced_prefix="aQ"))


def test_a_prompt_keeps_its_end_and_a_source_its_beginning() -> None:
    config = qkv.GenerationConfig(on_too_long="truncate", max_new_tokens=3)
    for bundle, keeps_end in ((bytes_model(), True), (translator(), False)):
        text = ("abc" * 40)[: bundle.model.max_input_length + 5]
        assert bundle.source_tokenizer is not None
        (row,), ids = (
            encode_for_generation(bundle, [text], ["x"], config),
            bundle.source_tokenizer.encode_batch([text])[0],
        )
        max_length = bundle.model.max_input_length
        expected = ids[-(max_length - 3) :] if keeps_end else [*ids[: max_length - 1], bundle.model.spec.eos_id]
        assert row == expected


def test_settings_of_a_call_are_settings_of_a_predictor() -> None:
    predictor = qkv.Predictor(translator()).with_settings(n_best=2, num_beams=2)
    assert len(predictor(["abc"])[0].alternatives) == 2


def test_more_beams_than_tokens_are_refused() -> None:
    with pytest.raises(qkv.InputError, match="num_beams=99: the vocabulary has"):
        qkv.predict(translator(), ["abc"], replace(GREEDY, num_beams=99))
