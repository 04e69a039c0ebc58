from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv import spec
from qkv.families import get_family
from qkv.nn import EncoderDecoder, Ragged, build
from qkv.nn.recurrent import RecurrentEncoder
from qkv.nn.stack import EncoderOutput

rnn = get_family("rnn")
SCORES = ["none", "dot", "bilinear", "additive", "mlp"]


def alone(module: RecurrentEncoder, sequence: Tensor) -> Tensor:
    """The layers one after the other over one sequence, with nothing packed."""
    for layer in module.layers:
        sequence = layer(sequence)[0]
    return sequence


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_encoding_a_batch_equals_running_each_sequence_alone(cell: str, bidirectional: bool, layers: int) -> None:
    module = RecurrentEncoder(
        spec.RecurrentEncoder(d_model=3, hidden_size=4, cell=cell, bidirectional=bidirectional, layers=layers)
    )
    x = Ragged.from_lengths(torch.randn(11, 3), [2, 5, 1, 3])
    torch.testing.assert_close(module(x).hidden.values, torch.cat([alone(module, s) for s in x.sequences()]))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_last_state_joins_the_end_of_both_directions(cell: str) -> None:
    module = RecurrentEncoder(spec.RecurrentEncoder(d_model=3, hidden_size=4, cell=cell, layers=2))
    x = Ragged.from_lengths(torch.randn(11, 3), [2, 5, 1, 3])
    encoded = module(x)
    ends = [torch.cat([s[-1, :4], s[0, 4:]]) for s in encoded.hidden.sequences()]  # forward's last, backward's first
    torch.testing.assert_close(encoded.final_state, torch.stack(ends))


def model_of(**fields: object) -> EncoderDecoder:
    shape = rnn.Config(**{"d_model": 5, "hidden_size": 8, "layers": 1, "decoder_layers": 2, "dropout": 0.0} | fields)
    model = build(rnn.make_spec(shape, source_vocab_size=11, target_vocab_size=13))
    assert isinstance(model, EncoderDecoder)
    return model.double().eval()


SOURCE = Ragged.from_lengths(torch.arange(9) % 11, [4, 2, 3])
TARGET = Ragged.from_lengths(torch.arange(3, 12), [2, 5, 2])


def stepped(model: EncoderDecoder, choose: object) -> list[Tensor]:
    """Each sentence's logits when the model is walked one step at a time; `choose(t, logits)` gives the next tokens."""
    padded = TARGET.to_padded(fill_value=0)
    state, tokens, logits = model.init_state(model.encode(SOURCE), num_rows=3, max_length=5), padded[:, 0], []
    for t in range(padded.shape[1]):
        step, state = model.step(tokens, state)
        logits.append(step)
        if t + 1 < padded.shape[1]:
            tokens = choose(t + 1, step)
    return [row[:n] for row, n in zip(torch.stack(logits, 1), TARGET.layout.lengths_list, strict=True)]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("attention", SCORES)
@pytest.mark.parametrize("readout", [False, True])
def test_teacher_forcing_equals_stepping_over_the_same_tokens(cell: str, attention: str, readout: bool) -> None:
    model = model_of(cell=cell, attention=attention, readout=readout)
    padded = TARGET.to_padded(fill_value=0)
    steps = stepped(model, lambda t, _: padded[:, t])
    torch.testing.assert_close(model(SOURCE, TARGET), torch.cat(steps))


@pytest.mark.parametrize("attention", SCORES)
def test_feeding_its_own_outputs_equals_a_greedy_loop(attention: str) -> None:
    model = model_of(attention=attention)
    steps = stepped(model, lambda _, logits: logits.argmax(-1))
    torch.testing.assert_close(model(SOURCE, TARGET, scheduled_sampling=1.0), torch.cat(steps))


def test_feeding_its_own_outputs_differs_from_teacher_forcing() -> None:
    model = model_of()
    assert not torch.allclose(model(SOURCE, TARGET, scheduled_sampling=1.0), model(SOURCE, TARGET))


def test_feeding_its_own_outputs_needs_a_recurrent_decoder() -> None:
    transformer = get_family("transformer")
    model = build(
        transformer.make_spec(
            transformer.Config(d_model=8, heads=2, layers=1, d_ff=8), source_vocab_size=11, target_vocab_size=13
        )
    )
    with pytest.raises(ValueError, match="recurrent"):
        model(SOURCE, TARGET, scheduled_sampling=0.5)


def test_without_attention_only_the_last_state_matters() -> None:
    model = model_of(attention="none")
    memory = model.encode(SOURCE)
    other = EncoderOutput(memory.hidden.with_values(torch.randn_like(memory.hidden.values)), memory.final_state)
    assert torch.equal(model.decode(memory, TARGET), model.decode(other, TARGET))


def test_without_attention_the_last_state_does_matter() -> None:
    model = model_of(attention="none")
    memory = model.encode(SOURCE)
    assert memory.final_state is not None
    other = EncoderOutput(memory.hidden, memory.final_state + 1)
    assert not torch.allclose(model.decode(memory, TARGET), model.decode(other, TARGET))


@pytest.mark.parametrize("attention", SCORES[1:])
def test_with_attention_every_state_matters(attention: str) -> None:
    model = model_of(attention=attention)
    memory = model.encode(SOURCE)
    hidden = memory.hidden.values.detach().requires_grad_()
    out = model.decode(EncoderOutput(memory.hidden.with_values(hidden), memory.final_state), TARGET)
    (gradient,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), hidden)
    assert bool((gradient.abs().sum(-1) > 0).all())


def test_the_query_is_the_top_layers_state() -> None:
    model = model_of(attention="dot", decoder_layers=2)
    state = model.init_state(model.encode(SOURCE), num_rows=3, max_length=2)
    model.step(torch.tensor([2, 2, 2]), state)
    asked = []
    model.decoder.attention.attend_precomputed = lambda query, *_: (
        asked.append(query) or torch.zeros(3, 8, dtype=torch.double)
    )
    top = state.layer_states.layers[-1][0]
    model.step(torch.tensor([4, 4, 4]), state)
    assert torch.equal(asked[0], top)


def test_a_watched_decoder_tells_which_sentences_are_still_alive() -> None:
    model, alive = model_of(), []
    model.decoder.attention.hook = lambda weights, rows, *_: alive.append((len(weights), sorted(rows)))
    model(SOURCE, TARGET)  # targets of 2, 5 and 2 tokens
    assert alive == [(3, [0, 1, 2])] * 2 + [(1, [1])] * 3
