"""The recurrent encoder-decoder, without attention and with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv.families import get_family
from qkv.nn import EncoderDecoder, Ragged, build
from qkv.nn.stack import EncoderOutput

rnn = get_family("rnn")
SOURCE = Ragged.from_lengths(torch.tensor([4, 5, 6, 7]), [4])  # I ate an apple
TARGET = Ragged.from_lengths(torch.tensor([2, 8, 9, 10, 11, 12]), [6])  # <sos> Ich habe einen apfel gegessen


def model_of(attention: str) -> EncoderDecoder:
    """As on the slides: one GRU layer, the output read from the state s_t alone."""
    shape = rnn.Config(attention=attention, cell="gru", d_model=5, hidden_size=6, readout=False, dropout=0.0)
    model = build(rnn.make_spec(shape, source_vocab_size=13, target_vocab_size=13))
    assert isinstance(model, EncoderDecoder)
    return model


def test_the_simple_translation_model_passes_one_vector() -> None:
    """Sequence to Sequence models: Attention Models, "A problem with this framework": "All the information about the
    input sequence is embedded into a single vector"."""
    model = model_of("none")
    memory = model.encode(SOURCE)
    noise = memory.hidden.with_values(torch.randn_like(memory.hidden.values))
    assert memory.final_state is not None
    assert memory.final_state.shape == (1, 6)
    assert torch.equal(model.decode(EncoderOutput(noise, memory.final_state), TARGET), model.decode(memory, TARGET))


def test_the_simple_translation_model_starts_from_the_encoders_last_state() -> None:
    """Sequence to Sequence models: Attention Models, "The 'simple' translation model": the decoder "utilizes this
    representation to produce the output sequence"."""
    model = model_of("none")
    memory = model.encode(SOURCE)
    assert memory.final_state is not None
    assert not torch.allclose(
        model.decode(EncoderOutput(memory.hidden, -memory.final_state), TARGET), model.decode(memory, TARGET)
    )


@pytest.mark.parametrize("attention", ["dot", "bilinear", "additive", "mlp"])
def test_with_attention_every_output_is_related_to_every_input_directly(attention: str) -> None:
    """Sequence to Sequence models: Attention Models, "A problem with this framework": "Every output is related to the
    input directly"; the last state is held fast, so that only attention can carry the change."""
    model = model_of(attention)
    memory = model.encode(SOURCE)
    before = model.decode(memory, TARGET)
    for word in range(4):
        values = memory.hidden.values.clone()
        values[word] += 1
        after = model.decode(EncoderOutput(memory.hidden.with_values(values), memory.final_state), TARGET)
        assert bool(((after - before).abs().max(-1).values > 0).all())


def converted(model: EncoderDecoder) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The slides' loop by hand: e_i(t) = h_i^T W_g s_(t-1), w = softmax(e), c_t = Σ w_i h_i, (c_t, y_t) in, s_t out."""
    memory, decoder = model.encode(SOURCE), model.decoder
    h, matrix = memory.hidden.values, decoder.attention.score.matrix[0]
    s = torch.tanh(decoder.bridge(memory.final_state))[0]  # s_(-1)
    weights, contexts, states = [], [], []
    for y in model.target_embedding.tokens.weight[TARGET.values]:
        e = torch.stack([h_i @ matrix @ s for h_i in h])
        w = e.exp() / e.exp().sum()
        c = sum(w_i * h_i for w_i, h_i in zip(w, h, strict=True))
        s = decoder.cells[0](torch.cat([y, c])[None], s[None])[0]
        weights.append(w)
        contexts.append(c)
        states.append(s)
    return weights, contexts, states


def test_decoding_follows_the_slides_step_by_step() -> None:
    """Sequence to Sequence models: Attention Models, "Converting an input: Inference" and "Attention-based decoding":
    e_i(t) = g(h_i, s_(t-1)), w_i(t) = softmax, c_t = Σ w_i(t) h_i, "Input c_0 and <sos> to the decoder", s_t out."""
    model = model_of("bilinear")
    _, _, states = converted(model)
    torch.testing.assert_close(model.decode(model.encode(SOURCE), TARGET), torch.stack(states))


def test_the_weights_at_time_t_come_from_the_state_before() -> None:
    """Sequence to Sequence models: Attention Models, "Attention weights at time t": w_i(t) = a(h_i, s_(t-1))."""
    model, seen = model_of("bilinear"), []
    weights, _, _ = converted(model)
    model.decoder.attention.hook = lambda told, *_: seen.append(told.flatten())
    model(SOURCE, TARGET)
    torch.testing.assert_close(seen, weights)


def test_the_word_at_time_t_is_not_used_for_its_weights() -> None:
    """Sequence to Sequence models: Attention Models, "Attention weights at time t": "Also, the input word at time t,
    but generally not used for simplicity"."""
    model, seen = model_of("additive"), []
    model.decoder.attention.hook = lambda told, *_: seen.append(told.flatten())
    for first in (2, 8):
        model(SOURCE, Ragged.from_lengths(torch.tensor([first]), [1]))
    assert torch.equal(seen[0], seen[1])


def test_the_output_is_a_distribution_read_from_the_state() -> None:
    """Sequence to Sequence models: Attention Models, "Converting an input: Inference": "The decoder computes s_0; a
    probability distribution over the output vocabulary: output of softmax output layer"."""
    model = model_of("bilinear")
    _, _, states = converted(model)
    wanted = torch.softmax(torch.stack(states) @ model.head.linear.weight.T + model.head.linear.bias, -1)
    torch.testing.assert_close(torch.softmax(model(SOURCE, TARGET), -1), wanted)


def test_the_drawn_word_goes_in_at_the_next_step() -> None:
    """Sequence to Sequence models: Attention Models, "Converting an input: Inference": "Input c_1 and first output word
    to the decoder"."""
    model = model_of("bilinear")
    logits, state = model.step(torch.tensor([2]), model.init_state(model.encode(SOURCE), num_rows=1, max_length=6))
    drawn = logits.argmax(-1)
    second, _ = model.step(drawn, state)
    forced = model(SOURCE, Ragged.from_lengths(torch.cat([torch.tensor([2]), drawn]), [2]))
    torch.testing.assert_close(second[0], forced[1])


def test_keys_and_values_are_the_encoders_states_and_the_query_is_the_decoders() -> None:
    """Multilingual NLP, 4. Attention & Transformer, "Attention Mechanism", use case #2: k_i = v_i = s_i^Encoder, query
    q: "hidden state of the decoder"."""
    model = model_of("dot")
    memory = model.encode(SOURCE)
    h, state = memory.hidden.values, torch.randn(1, 6)
    attention = model.decoder.attention
    looked = attention.attend_precomputed(state, attention.precompute_kv(memory.hidden))
    torch.testing.assert_close(looked[0], torch.softmax(h @ state[0], 0) @ h)


def test_a_bidirectional_state_joins_both_directions() -> None:
    """Transformers and Pretraining, 2.1 "ELMo": "concatenating hidden states of both directions together"."""
    model = model_of("dot")
    gru, x = model.encoder.layers[0], model.source_embedding(SOURCE).values
    forward = torch.nn.GRU(5, 3)
    forward.load_state_dict({n: p for n, p in gru.state_dict().items() if not n.endswith("_reverse")})
    backward = torch.nn.GRU(5, 3)
    backward.load_state_dict(
        {n.removesuffix("_reverse"): p for n, p in gru.state_dict().items() if n.endswith("_reverse")}
    )
    both = torch.cat([forward(x)[0], backward(x.flip(0))[0].flip(0)], -1)
    torch.testing.assert_close(model.encode(SOURCE).hidden.values, both)
