"""Encoders without attention under heads: the bag of words, and the final states of a BiLSTM."""

from __future__ import annotations

import pytest
import torch

from qkv.analysis.alignments import alignments
from qkv.checkpoints import ModelBundle
from qkv.errors import InputError
from qkv.families import get_family
from qkv.families.heads import with_pooling
from qkv.nn import Ragged, build
from qkv.nn.capture import capture_attention
from qkv.tokenization.tokenizer import train_tokenizer

TEXTS = [torch.tensor([1, 2, 3, 2]), torch.tensor([4]), torch.tensor([5, 6])]


def test_a_bag_of_words_does_not_know_the_order_of_words() -> None:
    bow = get_family("bow")
    model = build(bow.make_spec(bow.Config(d_model=5), source_vocab_size=9, labels=("a", "b", "c"))).eval()
    shuffled = [text.flip(0) for text in TEXTS]
    torch.testing.assert_close(model(Ragged.pack(TEXTS)), model(Ragged.pack(shuffled)))


def test_a_bag_of_words_is_a_linear_classifier_of_counts() -> None:
    bow = get_family("bow")
    model = build(bow.make_spec(bow.Config(d_model=5), source_vocab_size=9, labels=("a", "b", "c"))).eval()
    counts = torch.stack([torch.bincount(text, minlength=9) / len(text) for text in TEXTS])
    assert model.head is not None
    assert model.head.linear is not None
    theta = model.front_end.token_weight @ model.head.linear.weight.T  # [words, labels]
    torch.testing.assert_close(model(Ragged.pack(TEXTS)), counts @ theta + model.head.linear.bias)


def test_final_pooling_reads_the_state_in_which_each_direction_ends() -> None:
    rnn = get_family("rnn")
    config = rnn.Config(d_model=4, hidden_size=6)
    spec = with_pooling(rnn.make_spec(config, source_vocab_size=9, head="sequence"), "final")
    model = build(spec).eval()
    source = Ragged.pack(TEXTS)
    final_state = model.encoder(model.embed_inputs(source)).final_state
    assert model.head is not None
    torch.testing.assert_close(model.head.pool_hidden(model.hidden_states(source).hidden), final_state)


def test_final_pooling_needs_two_directions() -> None:
    bow, rnn = get_family("bow"), get_family("rnn")
    forward = rnn.make_spec(rnn.Config(bidirectional=False), head="sequence")
    for spec in (bow.make_spec(bow.Config()), forward):
        with pytest.raises(InputError, match=r"finetune\.pooling: final reads both directions"):
            with_pooling(spec, "final")


def test_attention_pooling_over_words_is_captured() -> None:
    bow = get_family("bow")
    spec = with_pooling(bow.make_spec(bow.Config(d_model=5), source_vocab_size=9), "attention")
    bundle = ModelBundle(build(spec).eval())
    with capture_attention(bundle.model) as maps:
        bundle.model(Ragged.pack(TEXTS))
    assert [weights.shape for weights in maps["head.pool.attention"]] == [(1, 1, 4), (1, 1, 1), (1, 1, 2)]


def test_the_weights_of_attention_pooling_are_an_alignment_with_the_label() -> None:
    bow = get_family("bow")
    tokenizer = train_tokenizer("word", ["my card was stolen"], vocab_size=20, template=bow.TOKENIZER_TEMPLATE)
    spec = bow.make_spec(bow.Config(d_model=5), source_vocab_size=tokenizer.vocab_size, labels=("lost", "stolen"))
    bundle = ModelBundle(build(with_pooling(spec, "attention")).eval(), tokenizer, tokenizer)
    (alignment,) = alignments(bundle, ["my card was stolen"])
    assert alignment.source_tokens == ["my", "card", "was", "stolen"]
    assert alignment.target_tokens[0] in ("lost", "stolen")
    assert alignment.weights.shape == (1, 1, 4)
    with pytest.raises(InputError, match="or a head with attention pooling"):
        alignments(ModelBundle(build(spec).eval(), tokenizer, tokenizer), ["my card"])
