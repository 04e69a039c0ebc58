"""Our recurrent parts, ragged, against torch.nn.LSTM and torch.nn.GRU, padded and packed, with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qkv import spec
from qkv.nn import Ragged
from qkv.nn.recurrent import RecurrentDecoder, RecurrentEncoder
from qkv.nn.stack import EncoderOutput

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}
SIZES = [4, 9, 1, 7]


def ragged(width: int) -> Ragged:
    return Ragged.from_lengths(torch.randn(sum(SIZES), width), SIZES)


def encoders(cell: str, layers: int, bidirectional: bool) -> tuple[nn.RNNBase, RecurrentEncoder]:
    theirs = CELLS[cell](7, 5, layers, bidirectional=bidirectional, batch_first=True)
    ours = RecurrentEncoder(
        spec.RecurrentEncoder(d_model=7, hidden_size=5, cell=cell, layers=layers, bidirectional=bidirectional)
    )
    with torch.no_grad():
        for their, our in pairs(theirs, ours):
            our.copy_(their)
    return theirs, ours


def pairs(theirs: nn.RNNBase, ours: RecurrentEncoder) -> list[tuple[Tensor, Tensor]]:
    """Theirs holds all layers in one module, ours each in its own."""
    return [
        (getattr(theirs, name.replace("_l0", f"_l{n}")), parameter)
        for n, layer in enumerate(ours.layers)
        for name, parameter in layer.named_parameters()
    ]


def run(theirs: nn.RNNBase, x: Ragged) -> tuple[Tensor, Tensor]:
    packed = pack_padded_sequence(x.to_padded(), list(x.layout.lengths_list), batch_first=True, enforce_sorted=False)
    out, final = theirs(packed)
    h = final[0] if isinstance(final, tuple) else final
    return pad_packed_sequence(out, batch_first=True)[0][x.layout.valid_mask()], h


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (1, True), (3, True)])
def test_the_encoders_states_equal_torchs(cell: str, layers: int, bidirectional: bool) -> None:
    theirs, ours = encoders(cell, layers, bidirectional)
    x = ragged(7)
    torch.testing.assert_close(ours(x).hidden.values, run(theirs, x)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_the_encoders_last_state_equals_torchs_of_both_directions(cell: str) -> None:
    theirs, ours = encoders(cell, 2, bidirectional=True)
    x = ragged(7)
    h = run(theirs, x)[1]
    torch.testing.assert_close(ours(x).final_state, torch.cat([h[-2], h[-1]], -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_the_encoders_gradients_equal_torchs(cell: str) -> None:
    theirs, ours = encoders(cell, 2, bidirectional=True)
    x, weights = ragged(7), torch.randn(sum(SIZES), 10)
    (run(theirs, x)[0] * weights).sum().backward()
    (ours(x).hidden.values * weights).sum().backward()
    wanted, found = zip(*((their.grad, our.grad) for their, our in pairs(theirs, ours)), strict=True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_decoder_without_attention_equals_torchs_begun_at_the_bridge(cell: str, layers: int) -> None:
    s = spec.RecurrentDecoder(d_model=7, encoder_dim=6, hidden_size=5, cell=cell, layers=layers, readout=False)
    ours, theirs = RecurrentDecoder(s), CELLS[cell](7, 5, layers, batch_first=True)
    for n, own in enumerate(ours.cells):
        for name, parameter in own.named_parameters():
            getattr(theirs, f"{name}_l{n}").data.copy_(parameter.data)
    x, last = ragged(7), torch.randn(len(SIZES), 6)
    memory = EncoderOutput(ragged(6), last)
    parts = torch.tanh(ours.bridge(last)).view(len(SIZES), layers, -1, 5).permute(2, 1, 0, 3).contiguous()
    out, _ = theirs(x.to_padded(), (parts[0], parts[1]) if cell == "lstm" else parts[0])
    torch.testing.assert_close(ours(x, memory).hidden.values, out[x.layout.valid_mask()], atol=1e-5, rtol=0)
