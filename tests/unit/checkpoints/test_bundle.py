"""A bundle called on texts: logits, hidden states, attention maps, tokens and embeddings, per text in input order."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest
import torch

from qkv import InputError, ModelBundle, Ragged, build, load
from qkv.data.image_processor import ImageProcessor
from qkv.families import vit
from qkv.tokenization.tokenizer import train_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "generation"))
sys.path.append(str(Path(__file__).parent))
from checkpoints import checkpoint
from writers import tiny

TEXTS = ["the cat sat", "a dog", "the cat sat on the mat"]


def bundle_of(family: str) -> ModelBundle:
    letters = train_tokenizer("character", ["abcde"])
    return ModelBundle(tiny(family, vocabulary=9).eval(), letters, letters)


@pytest.fixture
def classifier(tmp_path: Path) -> ModelBundle:
    return load(checkpoint(tmp_path / "bert", "sequence"))


def test_a_loaded_model_is_in_eval_mode(classifier: ModelBundle) -> None:
    assert not any(module.training for module in classifier.model.modules())


def test_logits_are_those_of_the_model_in_input_order(classifier: ModelBundle) -> None:
    output = classifier(TEXTS)
    assert output.tokens[1] == ["[CLS]", "a", "dog", "[SEP]"]
    assert output.hidden_states is None
    assert output.attentions is None
    for text, logits in zip(TEXTS, output.logits, strict=True):
        encoding = classifier.source_tokenizer.encode_plus(text)
        ids = Ragged.pack([torch.tensor(encoding.ids)])
        with torch.no_grad():
            expected = classifier.model(ids, torch.tensor(encoding.token_type_ids))[0]
        torch.testing.assert_close(logits, expected)


def test_hidden_states_and_attentions_have_the_lengths_of_their_text(classifier: ModelBundle) -> None:
    output = classifier(TEXTS, attentions=True, hidden_states=True)
    for tokens, states, maps in zip(output.tokens, output.hidden_states, output.attentions, strict=True):
        assert states.shape == (3, len(tokens), 12)
        assert maps.keys() == {"encoder.0.self_attention", "encoder.1.self_attention"}
        weights = maps["encoder.1.self_attention"]
        assert weights.shape == (2, len(tokens), len(tokens))
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, len(tokens)))
    for text, states in zip(TEXTS, output.hidden_states, strict=True):
        torch.testing.assert_close(classifier.embed([text], pool="tokens")[0], states[-1])


def test_asking_for_more_changes_no_logits(classifier: ModelBundle) -> None:
    plain, full = classifier(TEXTS), classifier(TEXTS, attentions=True, hidden_states=True)
    for logits, again in zip(plain.logits, full.logits, strict=True):
        torch.testing.assert_close(logits, again)
    assert classifier.model.encoder.blocks[0].self_attention.hook is None


def test_a_head_that_reads_tokens_gives_a_row_per_token(tmp_path: Path) -> None:
    bundle = load(checkpoint(tmp_path / "bert", "token"))
    assert [list(logits.shape) for logits in bundle([("the cat", "sat"), "a dog"]).logits] == [[6, 3], [4, 3]]


def test_outputs_can_be_trained_on(classifier: ModelBundle) -> None:
    features = torch.stack(classifier(TEXTS).logits)
    torch.nn.Linear(3, 1)(features).sum().backward()  # tensors of inference mode would refuse


@pytest.mark.parametrize("family", ["rnn", "transformer"])
def test_an_encoder_decoder_reads_targets_with_teacher_forcing(family: str) -> None:
    bundle = bundle_of(family)
    output = bundle(["abc", "de"], targets=["de", "abcd"], attentions=True, hidden_states=True)
    assert output.tokens == [["a", "b", "c", "</s>"], ["d", "e", "</s>"]]
    assert [list(logits.shape) for logits in output.logits] == [[3, 9], [5, 9]]
    name = "decoder.attention" if family == "rnn" else "decoder.0.cross_attention"
    assert output.attentions[1][name].shape[-2:] == (5, 3)
    assert output.hidden_states[0].shape[1] == 4


def test_an_encoder_decoder_without_targets_gives_its_encoder_only() -> None:
    output = bundle_of("transformer")(["abc"], attentions=True, hidden_states=True)
    assert output.logits is None
    assert all(name.startswith("encoder.") for name in output.attentions[0])


def test_targets_without_a_decoder_are_refused(classifier: ModelBundle) -> None:
    with pytest.raises(InputError, match="targets: only a sequence-to-sequence model"):
        classifier(TEXTS, targets=TEXTS)
    with pytest.raises(InputError, match="one per input"):
        bundle_of("transformer")(["abc"], targets=[])


def test_a_bare_text_is_a_list_of_one(classifier: ModelBundle) -> None:
    assert classifier("the cat").tokens == classifier(["the cat"]).tokens


def test_no_texts_give_empty_lists(classifier: ModelBundle) -> None:
    assert classifier([]).logits == []


def test_tokenize_gives_the_tokens_of_the_template(classifier: ModelBundle) -> None:
    assert classifier.tokenize([("unhappy cat", "a dog")]) == [
        ["[CLS]", "un", "##happy", "cat", "[SEP]", "a", "dog", "[SEP]"]
    ]


def test_images_give_logits_and_a_map_over_their_patches() -> None:
    config = vit.Config(d_model=12, heads=2, layers=2, d_ff=16, image_size=6, patch_size=2)
    processor = ImageProcessor(size=(6, 6))
    bundle = ModelBundle(build(vit.make_spec(config)).eval(), image_processor=processor)
    images = [numpy.full((6, 6, 3), shade, numpy.uint8) for shade in (0, 200)]
    output = bundle(images, attentions=True, hidden_states=True)
    assert output.tokens[0][:2] == ["[CLS]", "patch 0"]
    assert output.attentions[1]["encoder.1.self_attention"].shape == (2, 10, 10)
    assert output.hidden_states[0].shape == (3, 10, 12)
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(output.logits), bundle.model(processor.preprocess_batch(images)))
