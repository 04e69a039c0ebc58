"""Recurrent encoder and decoder: the seq2seq model that attention was invented for.

The decoder follows "Converting an input: Inference" (Sequence to Sequence models: Attention Models): the context c_t is
an attention of the state s_(t-1) over the encoder's states; c_t and the last output go in, s_t comes out. With no
attention it is the notes' "simple translation model": only the encoder's last state reaches the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qkv import spec
from qkv.nn.attention import Attention
from qkv.nn.cache import Keys
from qkv.nn.dropout import dropout
from qkv.nn.ragged import Ragged
from qkv.nn.stack import Encoded

State = list[tuple[Tensor, ...]]  # a layer: (h,) for a GRU, (h, c) for an LSTM; each [R, hidden]


class Recurrent(nn.Module):
    """LSTM or GRU, one direction or both, over ragged sequences without padding.

    A layer is a module of its own and the dropout after it is ours: what cuDNN draws inside a deep LSTM comes from a
    state of its own, which no checkpoint can hold.
    """

    def __init__(self, s: spec.Recurrent):
        super().__init__()
        kind = nn.LSTM if s.cell == "lstm" else nn.GRU
        widths = [s.width] + [s.output] * (s.layers - 1)
        self.layers = nn.ModuleList(kind(width, s.hidden, bidirectional=s.bidirectional) for width in widths)
        self.dropout = s.dropout

    def forward(self, x: Ragged) -> Encoded:
        """[T, width] -> [T, output], and the last layer's final state of each direction, joined, [B, output]"""
        time = x.layout.time_major()
        unsorted = torch.argsort(time.order)
        sizes = torch.tensor(time.alive)
        values = x.values[time.permutation]  # [T, width] step by step
        for layer in self.layers:
            out, final = layer(PackedSequence(values, sizes, time.order, unsorted))
            values = dropout(out.data, self.dropout) if self.training and self.dropout else out.data
        h = final[0] if isinstance(final, tuple) else final  # [directions, B, hidden]
        return Encoded(x.like(values[time.inverse]), h.transpose(0, 1).flatten(1))


@dataclass
class RecurrentState:
    layers: State
    memory: Keys | None

    def reorder(self, rows: Tensor) -> None:
        self.layers = [tuple(part.index_select(0, rows) for part in layer) for layer in self.layers]


class RecurrentDecoder(nn.Module):
    def __init__(self, s: spec.RecurrentDecoder):
        super().__init__()
        self.spec = s
        self.attention = None if s.attention is None else Attention(s.attention)
        context = 0 if s.attention is None else s.attention.output
        cell = nn.LSTMCell if s.cell == "lstm" else nn.GRUCell
        inputs = [s.width + context] + [s.hidden] * (s.layers - 1)
        self.cells = nn.ModuleList(cell(n, s.hidden) for n in inputs)
        self.parts = 2 if s.cell == "lstm" else 1
        self.bridge = nn.Linear(s.memory, s.layers * self.parts * s.hidden)
        self.readout = nn.Linear(s.hidden + context + s.width, s.hidden) if s.readout else None

    def forward(
        self, x: Ragged, memory: Encoded, feed: Callable[[Tensor, int], Tensor] | None = None, own: float = 0.0
    ) -> Encoded:
        """All steps, teacher-forced, or fed the model's own outputs at rate `own`.  # [T, width] -> [T, hidden]

        `feed` maps a step's hidden [R, hidden] to the embedding [R, width] of what the model would say, at a place.
        """
        time = x.layout.time_major()
        rows = time.rows
        steps = torch.split(x.values[time.permutation], time.alive)
        state = self.start(memory, len(x))
        state.reorder(time.order)
        if state.memory is not None:
            state.memory = state.memory.select(time.order, [state.memory.sizes[i] for i in rows])
        outputs: list[Tensor] = []
        for t, y in enumerate(steps):  # the longest sequences come first, so that those alive are always a prefix
            alive = len(y)
            if t and own and feed is not None:
                mine = torch.rand(alive, 1, device=y.device) < own
                y = torch.where(mine, feed(outputs[-1][:alive], t), y)
            state.layers = [tuple(part[:alive] for part in layer) for layer in state.layers]
            outputs.append(self._advance(y, state, rows[:alive]))
        return Encoded(x.like(torch.cat(outputs)[time.inverse]))

    def start(self, memory: Encoded, rows: int) -> RecurrentState:
        """s_(-1) from the encoder's last state, once for each of a sentence's rows."""
        assert memory.last is not None
        beams = rows // len(memory.hidden)
        first = torch.tanh(self.bridge(memory.last)).repeat_interleave(beams, 0)  # [R, layers * parts * hidden]
        layers = first.view(rows, self.spec.layers, self.parts, self.spec.hidden).unbind(1)
        keys = None if self.attention is None else self.attention.remember(memory.hidden)
        return RecurrentState([tuple(part.contiguous() for part in layer.unbind(1)) for layer in layers], keys)

    def step(self, x: Tensor, state: RecurrentState) -> Tensor:
        """[R, width] -> [R, hidden]"""
        return self._advance(x, state, None)

    def _advance(self, y: Tensor, state: RecurrentState, rows: list[int] | None) -> Tensor:
        inputs = [y]
        if self.attention is not None and state.memory is not None:
            alive = state.memory if rows is None else state.memory.first(len(rows))
            inputs.append(self.attention.look(state.layers[-1][0], alive, rows))  # c_t from s_(t-1)
        below = torch.cat(inputs, -1)
        layers: State = []
        for cell, before in zip(self.cells, state.layers, strict=True):
            after = cell(below, before if self.parts == 2 else before[0])
            layers.append(tuple(after) if self.parts == 2 else (after,))
            below = self._drop(layers[-1][0])
        state.layers = layers
        if self.readout is None:
            return below
        return self._drop(torch.tanh(self.readout(torch.cat([below, *inputs[1:], y], -1))))  # [R, hidden]

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x
