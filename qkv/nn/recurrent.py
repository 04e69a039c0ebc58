"""Recurrent encoder and decoder: the sequence-to-sequence model for which attention was introduced.

The decoder follows "Converting an input: Inference" (Sequence to Sequence models: Attention Models): the context c_t is
attention of the state s_(t-1) over the encoder's states; c_t and the previous output give s_t. Without attention it is
the notes' "simple translation model": the decoder gets only the encoder's final state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qkv import spec
from qkv.errors import InputError
from qkv.nn.attention import Attention
from qkv.nn.dropout import dropout
from qkv.nn.kv_cache import KeyValues, source_rows
from qkv.nn.ragged import Ragged
from qkv.nn.stack import EncoderOutput

LayerStates = list[tuple[Tensor, ...]]  # per layer: (h,) of a GRU, (h, c) of an LSTM; each [R, hidden]


class RecurrentEncoder(nn.Module):
    """Unidirectional or bidirectional LSTM or GRU over packed sequences.

    Each layer is a module, with dropout applied outside: a multi-layer cuDNN LSTM draws dropout from its own random
    state, which a checkpoint cannot store.
    """

    def __init__(self, s: spec.RecurrentEncoder):
        super().__init__()
        rnn_class = nn.LSTM if s.cell == "lstm" else nn.GRU
        widths = [s.d_model] + [s.output_dim] * (s.layers - 1)
        self.layers = nn.ModuleList(rnn_class(width, s.hidden_size, bidirectional=s.bidirectional) for width in widths)
        self.dropout = s.dropout

    def forward(self, x: Ragged) -> EncoderOutput:
        """Return the last layer's hidden states [T, output] and final states [B, output], directions concatenated."""
        time = x.layout.time_major()
        unsorted_indices = torch.argsort(time.order)
        batch_sizes = torch.tensor(time.batch_sizes)
        values = x.values[time.permutation]  # [T, width] step by step
        for layer in self.layers:
            out, final = layer(PackedSequence(values, batch_sizes, time.order, unsorted_indices))
            values = dropout(out.data, self.dropout) if self.training and self.dropout else out.data
        h = final[0] if isinstance(final, tuple) else final  # [directions, B, hidden]
        return EncoderOutput(x.with_values(values[time.inverse]), h.transpose(0, 1).flatten(1))


@dataclass
class RecurrentState:
    """State of a recurrent decoder between two steps."""

    layers: LayerStates
    cross_kv: KeyValues | None  # keys and values of the encoder output; None: no attention

    def reorder(self, indices: Tensor) -> None:
        """Let row i continue from row indices[i]."""
        self.layers = [tuple(tensor.index_select(0, indices) for tensor in layer) for layer in self.layers]

    def merge(self, kept: Tensor, other: RecurrentState | None, rows_per_source: int) -> None:
        """Keep the sources at `kept`, and append those of another state."""
        self.reorder(source_rows(kept, rows_per_source))
        if other is not None:
            layers = zip(self.layers, other.layers, strict=True)
            self.layers = [tuple(map(torch.cat, zip(ours, theirs, strict=True))) for ours, theirs in layers]
        if self.cross_kv is not None:
            self.cross_kv = self.cross_kv.merge(kept, None if other is None else other.cross_kv)

    @property
    def watchable_kv(self) -> KeyValues | None:
        """The keys of the attention over the encoder output; None: the decoder has none."""
        return self.cross_kv


class RecurrentDecoder(nn.Module):
    """LSTM or GRU decoder, with attention over the encoder output or without."""

    def __init__(self, s: spec.RecurrentDecoder):
        super().__init__()
        self.spec = s
        self.attention = None if s.attention is None else Attention(s.attention)
        context_dim = 0 if s.attention is None else s.attention.output_dim
        cell = nn.LSTMCell if s.cell == "lstm" else nn.GRUCell
        input_dims = [s.d_model + context_dim] + [s.hidden_size] * (s.layers - 1)
        self.cells = nn.ModuleList(cell(n, s.hidden_size) for n in input_dims)
        self.num_states = 2 if s.cell == "lstm" else 1
        self.bridge = nn.Linear(s.encoder_dim, s.layers * self.num_states * s.hidden_size)
        self.readout = nn.Linear(s.hidden_size + context_dim + s.d_model, s.hidden_size) if s.readout else None

    def forward(
        self,
        x: Ragged,
        encoder_output: EncoderOutput,
        embed_prediction: Callable[[Tensor, int], Tensor] | None = None,
        scheduled_sampling: float = 0.0,
    ) -> EncoderOutput:
        """Run all steps with teacher forcing.  # [T, width] -> [T, hidden]

        Args:
            x: embedded target tokens.
            encoder_output: hidden states and final state of the encoder.
            embed_prediction: maps a step's hidden states [R, hidden] and the next position to the embedding [R, width]
                of the predicted tokens.
            scheduled_sampling: probability of reading the prediction instead of the target token.
        """
        time = x.layout.time_major()
        order = time.order_list
        steps = torch.split(x.values[time.permutation], time.batch_sizes)
        state = self.init_state(encoder_output, len(x))
        state.reorder(time.order)
        if state.cross_kv is not None:
            state.cross_kv = state.cross_kv.select(time.order, [state.cross_kv.lengths[i] for i in order])
        outputs: list[Tensor] = []
        for t, y in enumerate(steps):  # longest first, so that active sequences are always a prefix
            num_active = len(y)
            if t and scheduled_sampling and embed_prediction is not None:
                use_prediction = torch.rand(num_active, 1, device=y.device) < scheduled_sampling
                y = torch.where(use_prediction, embed_prediction(outputs[-1][:num_active], t), y)
            state.layers = [tuple(tensor[:num_active] for tensor in layer) for layer in state.layers]
            outputs.append(self._step(y, state, order[:num_active]))
        return EncoderOutput(x.with_values(torch.cat(outputs)[time.inverse]))

    def init_state(
        self,
        encoder_output: EncoderOutput | None,
        num_rows: int,
        max_length: int = 0,  # noqa: ARG002  # as `Stack.init_state`; a recurrent state does not grow
        like: Tensor | None = None,  # noqa: ARG002
    ) -> RecurrentState:
        """Return s_(-1), computed from the encoder's final state and repeated for the rows of each source."""
        if encoder_output is None or encoder_output.final_state is None:
            raise InputError("a recurrent decoder starts from the final state of a recurrent encoder")
        beams = num_rows // len(encoder_output.hidden)
        initial = torch.tanh(self.bridge(encoder_output.final_state)).repeat_interleave(
            beams, 0
        )  # [R, layers * states * hidden]
        layers = initial.view(num_rows, self.spec.layers, self.num_states, self.spec.hidden_size).unbind(1)
        cross_kv = None if self.attention is None else self.attention.precompute_kv(encoder_output.hidden)
        return RecurrentState([tuple(tensor.contiguous() for tensor in layer.unbind(1)) for layer in layers], cross_kv)

    def step(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Process one new token per row.  # [R, width] -> [R, hidden]"""
        return self._step(x, state, None)

    def _step(self, y: Tensor, state: RecurrentState, row_ids: list[int] | None) -> Tensor:
        inputs = [y]
        if self.attention is not None and state.cross_kv is not None:
            kv = state.cross_kv if row_ids is None else state.cross_kv.first_rows(len(row_ids))
            inputs.append(self.attention.attend_precomputed(state.layers[-1][0], kv, row_ids))  # c_t from s_(t-1)
        hidden = torch.cat(inputs, -1)
        layers: LayerStates = []
        for cell, previous in zip(self.cells, state.layers, strict=True):
            updated = cell(hidden, previous if self.num_states == 2 else previous[0])
            layers.append(tuple(updated) if self.num_states == 2 else (updated,))
            hidden = self._apply_dropout(layers[-1][0])
        state.layers = layers
        if self.readout is None:
            return hidden
        return self._apply_dropout(torch.tanh(self.readout(torch.cat([hidden, *inputs[1:], y], -1))))  # [R, hidden]

    def _apply_dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x
