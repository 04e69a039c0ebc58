"""ELMo's layers against a restatement with torch.nn.LSTM, one word and one sentence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.families import elmo
from qkv.nn import Ragged, build
from qkv.nn.bilm import BiLM
from qkv.nn.char_cnn import PADDING, WORD_BEGIN, WORD_END, CharacterEmbedding, find_words

CONFIG = elmo.Config(
    char_dim=4, filter_widths=(1, 3, 5), filter_counts=(4, 6, 8), d_model=6, hidden_size=10, layers=3, dropout=0.0
)
WORDS = ("", "", "", "", "the", "cat", "x" * 60, "é")
VOCABULARY = len(WORDS) + 256
LETTERS = len(WORDS)  # id of the letter of byte 0


def model_of(head: str = "backbone", **changes: Any) -> Any:
    torch.manual_seed(0)
    made = elmo.make_spec(CONFIG, source_vocab_size=VOCABULARY, words=WORDS, head=head)
    made = spec.replace(made, encoder=spec.replace(made.encoder, **changes))
    model = build(made).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def letters(word: str) -> list[int]:
    return [LETTERS + byte for byte in b" " + word.encode()]


def restated_lstm(stack: BiLM, x: Tensor, direction: int) -> list[Tensor]:
    """All layers of one direction for one sentence, with torch.nn.LSTM, which clips nothing.  # [n, width] each"""
    s, layers, x = stack.spec, [], x if direction == 0 else x.flip(0)
    for number, layer in enumerate(stack.layers):
        lstm = nn.LSTM(s.d_model, s.hidden_size, proj_size=s.d_model).double()
        weights = {
            "weight_ih_l0": layer.input_weight[direction],
            "weight_hh_l0": layer.state_weight[direction],
            "bias_ih_l0": layer.bias[direction],
            "bias_hh_l0": torch.zeros_like(layer.bias[direction]),
            "weight_hr_l0": layer.projection[direction],
        }
        lstm.load_state_dict(weights)
        out = lstm(x[:, None])[0][:, 0]
        x = out + x if number and s.skip_connections else out
        layers.append(x if direction == 0 else x.flip(0))
    return layers


@pytest.mark.parametrize("skip", [True, False])
@torch.no_grad()
def test_layers_of_both_directions_equal_those_of_torch(skip: bool) -> None:
    stack = model_of(cell_clip=None, projection_clip=None, skip_connections=skip).encoder
    sentences = [torch.randn(n, 6).double() for n in (4, 1, 6)]
    x = Ragged.pack(sentences)
    layers = [x.with_values(values).sequences() for values in stack.all_hidden_states(x)]
    for row, sentence in enumerate(sentences):
        torch.testing.assert_close(layers[0][row], torch.cat([sentence, sentence], -1))
        both = [restated_lstm(stack, sentence, direction) for direction in (0, 1)]
        for number in range(stack.spec.layers):
            expected = torch.cat([both[0][number], both[1][number]], -1)
            torch.testing.assert_close(layers[number + 1][row], expected)


@torch.no_grad()
def test_cells_and_projected_states_are_clipped_at_every_step() -> None:
    stack = model_of(cell_clip=0.2, projection_clip=0.1, layers=1).encoder
    x = Ragged.pack([5 * torch.randn(7, 6).double()])
    output = stack(x)
    assert output.hidden.values.abs().max() == 0.1
    assert output.memory is not None
    assert output.memory["layers.0.c"].abs().max() == 0.2
    layer, h, c = stack.layers[0], torch.zeros(6).double(), torch.zeros(10).double()
    for value, expected in zip(x.values, output.hidden.values, strict=True):  # the forward direction, step by step
        gates = layer.input_weight[0] @ value + layer.state_weight[0] @ h + layer.bias[0]
        i, f, g, o = gates.chunk(4)
        c = (f.sigmoid() * c + i.sigmoid() * g.tanh()).clamp(-0.2, 0.2)
        h = (layer.projection[0] @ (o.sigmoid() * c.tanh())).clamp(-0.1, 0.1)
        torch.testing.assert_close(expected[:6], h)


@torch.no_grad()
def test_a_prediction_never_depends_on_the_word_that_it_predicts() -> None:
    model = model_of("lm")
    ids = torch.tensor([4, 5, 4, 7, 5])
    changed = ids.clone()
    changed[2] = 6
    before, after = (model(Ragged.pack([tokens])) for tokens in (ids, changed))  # [5, 2, vocabulary]
    assert before.shape == (5, 2, VOCABULARY)
    torch.testing.assert_close(after[:2, 0], before[:2, 0])
    torch.testing.assert_close(after[3:, 1], before[3:, 1])
    assert not torch.isclose(after[2:, 0], before[2:, 0]).all(-1).any()


@torch.no_grad()
def test_filters_read_all_characters_of_a_word_padded_to_the_maximum() -> None:
    """The restatement pads every word to 50 characters; the module reads distinct words, and less padding."""
    front_end = model_of().source_embedding
    ids = torch.tensor([4, *letters("zebra"), 6, 4, 2])
    out = front_end(Ragged.pack([ids]))
    for vector, word in zip(out.values, ("the", "zebra", "x" * 60, "the", None), strict=True):
        body = [256] if word is None else list(word.encode())[:48]
        row = torch.tensor([WORD_BEGIN, *body, WORD_END, *[PADDING] * (48 - len(body))])
        x = front_end.characters[row].T[None]
        x = torch.cat([filters(x).max(-1).values for filters in front_end.filters], 1).relu()
        for layer in front_end.highway:
            gate = (x @ layer.gate.weight.T + layer.gate_bias).sigmoid()
            x = gate * layer.transform(x).relu() + (1 - gate) * x
        torch.testing.assert_close(vector, front_end.projection(x)[0])


@torch.no_grad()
def test_a_spelled_word_has_the_vector_of_the_word_in_the_vocabulary() -> None:
    model = model_of()
    sentences = [torch.tensor([2, 4, 5, 3]), torch.tensor([2, *letters("the"), *letters("cat"), 3])]
    hidden = model.hidden_states(Ragged.pack(sentences)).hidden
    assert hidden.layout.lengths_list == (4, 4)
    torch.testing.assert_close(*hidden.sequences())
    tokens = hidden.to_tokens().sequences()[1]
    torch.testing.assert_close(tokens[[1, 2, 5, 9]], hidden.sequences()[0][[1, 1, 2, 3]])
    assert len(tokens) == len(sentences[1])
    torch.testing.assert_close(model(Ragged.pack([sentences[1]])), tokens)


def test_words_begin_at_a_space_or_after_a_whole_word() -> None:
    embedding = model_of().spec.source_embedding
    assert isinstance(embedding, spec.CharacterEmbedding)
    cut_off = [LETTERS + byte for byte in b"ing"]
    ids = Ragged.pack([torch.tensor([*cut_off, 4, *letters("ab")]), torch.tensor([*letters(""), *letters("c")])])
    words = find_words(ids, embedding)
    assert words.layout.lengths_list == (3, 2)
    assert words.word_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 3, 4, 4]


def test_filters_that_do_not_fit_a_word_are_refused() -> None:
    with pytest.raises(InputError, match="filters of 5 characters do not fit words of 4"):
        build(elmo.make_spec(elmo.Config(filter_widths=(5,), filter_counts=(2,), max_characters=4)))
    with pytest.raises(InputError, match="has 2 groups of filters, and filter_counts 1"):
        build(elmo.make_spec(elmo.Config(filter_widths=(1, 2), filter_counts=(2,))))
    assert isinstance(model_of().source_embedding, CharacterEmbedding)
