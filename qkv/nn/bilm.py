"""The bidirectional language model of ELMo: LSTM layers with projection, residuals and clipped states.

Both directions are computed in one pass: the backward one reads each sequence reversed. They never read each other, so
that each can predict the words that it has not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.nn.dropout import dropout
from qkv.nn.memory import Memory
from qkv.nn.ragged import BatchLayout, Ragged
from qkv.nn.stack import EncoderOutput

NUM_DIRECTIONS = 2
_NUM_GATES = 4  # input, forget, candidate, output, as in torch


class _Order(NamedTuple):
    """Order in which both directions process the words of a batch: step by step, longest sequence first."""

    words: Tensor  # [2, T] word of each step
    steps: Tensor  # [2, T] its inverse
    batch_sizes: list[int]  # [N] active sequences of each step
    sequences: Tensor  # [B] by decreasing length
    rows: Tensor  # [B] its inverse


class BiLMLayer(nn.Module):
    """One LSTM layer per direction; matrices of both directions are stacked, so that one product serves both."""

    def __init__(self, s: spec.BiLM):
        super().__init__()
        self.spec = s
        num_gates = _NUM_GATES * s.hidden_size
        self.input_weight = nn.Parameter(torch.empty(NUM_DIRECTIONS, num_gates, s.d_model))
        self.state_weight = nn.Parameter(torch.empty(NUM_DIRECTIONS, num_gates, s.d_model))
        self.bias = nn.Parameter(torch.empty(NUM_DIRECTIONS, num_gates))
        self.projection = nn.Parameter(torch.empty(NUM_DIRECTIONS, s.d_model, s.hidden_size))

    def init_weights(self, std: float | None) -> None:
        """Draw all matrices; forget gates begin open (Jozefowicz et al. 2015)."""
        for weight in (self.input_weight, self.state_weight, self.projection):
            for matrix in weight.unbind():
                nn.init.xavier_uniform_(matrix) if std is None else nn.init.normal_(matrix, std=std)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.bias[:, self.spec.hidden_size : 2 * self.spec.hidden_size])

    def forward(self, x: Tensor, h: Tensor, c: Tensor, batch_sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Run all steps and return the outputs, and the states after the last step of each sequence.

        Args:
            x: inputs, step by step [2, T, width].
            h: projected states before the first step [2, B, width].
            c: cells before the first step [2, B, hidden].
            batch_sizes: active sequences of each step; they are always the first ones.
        """
        s = self.spec
        inputs = torch.baddbmm(self.bias[:, None].to(x.dtype), x, self.input_weight.transpose(1, 2))
        state_weight, projection = self.state_weight.transpose(1, 2), self.projection.transpose(1, 2)
        outputs, finals = [], []
        for gates in torch.split(inputs, batch_sizes, 1):  # [2, active, 4 hidden]
            num_active = gates.shape[1]
            if num_active < h.shape[1]:  # longest first, so that sequences that have ended are the last ones
                finals.append((h[:, num_active:], c[:, num_active:]))
                h, c = h[:, :num_active], c[:, :num_active]
            i, f, g, o = torch.baddbmm(gates, h, state_weight).chunk(_NUM_GATES, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            c = c if s.cell_clip is None else c.clamp(-s.cell_clip, s.cell_clip)
            h = torch.bmm(torch.sigmoid(o) * torch.tanh(c), projection)
            h = h if s.projection_clip is None else h.clamp(-s.projection_clip, s.projection_clip)
            outputs.append(h)
        finals.append((h, c))
        final_h, final_c = (torch.cat(states[::-1], 1) for states in zip(*finals, strict=True))
        return torch.cat(outputs, 1), final_h, final_c


class BiLM(nn.Module):
    """Layers of both directions over packed sequences; the state of both can be carried as memory."""

    def __init__(self, s: spec.BiLM):
        super().__init__()
        self.spec = s
        self.layers = nn.ModuleList(BiLMLayer(s) for _ in range(s.layers))

    def initial_memory(self, num_streams: int) -> Memory:
        """Return the memory before the first word."""
        weight, sizes = next(self.parameters()), {"h": self.spec.d_model, "c": self.spec.hidden_size}
        return Memory(
            {
                f"layers.{layer}.{name}": weight.new_zeros(num_streams, NUM_DIRECTIONS, size)
                for layer in range(len(self.layers))
                for name, size in sizes.items()
            }
        )

    def forward(self, x: Ragged, memory: Memory | None = None) -> EncoderOutput:
        """Return the hidden states of the last layer and the memory after them.  # [T, width] -> [T, 2 * width]

        Sequence i continues row i of `memory`, in both directions as the original implementation does; None: every
        sequence is a text of its own.
        """
        layers, memory = self._run(x, memory)
        return EncoderOutput(x.with_values(layers[-1]), memory=memory)

    def all_hidden_states(self, x: Ragged, encoder_output: EncoderOutput | None = None) -> list[Tensor]:  # noqa: ARG002
        """Return the embedding, twice in each vector, and the output of every layer.  # [T, 2 * width] each"""
        return self._run(x, None)[0]

    def hidden_layers(self, x: Ragged, memory: Memory) -> tuple[list[Tensor], Memory]:
        """Return the hidden states of all layers, as `all_hidden_states` does, and the memory after them."""
        return self._run(x, memory)

    def _run(self, x: Ragged, memory: Memory | None) -> tuple[list[Tensor], Memory]:
        memory = self.initial_memory(len(x)) if memory is None else memory
        order, tensors = _order(x.layout), {}
        outputs = [torch.cat([x.values, x.values], -1)]  # [T, 2 * width]
        values = x.values[order.words]  # [2, T, width]
        for number, layer in enumerate(self.layers):
            values = self._drop(values)
            names = (f"layers.{number}.h", f"layers.{number}.c")
            states = (memory[name][order.sequences].transpose(0, 1).to(values.dtype) for name in names)
            hidden, *final = layer(values, *states, order.batch_sizes)
            for name, state in zip(names, final, strict=True):
                tensors[name] = state.transpose(0, 1)[order.rows].to(memory[name].dtype)
            values = hidden + values if number and self.spec.skip_connections else hidden
            is_last = number == len(self.layers) - 1
            forward, backward = self._drop(values) if is_last else values
            outputs.append(torch.cat([forward[order.steps[0]], backward[order.steps[1]]], -1))
        return outputs, Memory(tensors)

    def _drop(self, values: Tensor) -> Tensor:
        return dropout(values, self.spec.dropout) if self.training and self.spec.dropout else values


def _order(layout: BatchLayout) -> _Order:
    if "bilm_order" not in layout.plan_cache:
        time = layout.time_major()
        sequence_ids = layout.sequence_ids()
        reversed_words = layout.cu_seqlens.long()[1:][sequence_ids] - 1 - layout.positions  # [T], its own inverse
        words = torch.stack([time.permutation, reversed_words[time.permutation]])
        steps = torch.stack([time.inverse, time.inverse[reversed_words]])
        layout.plan_cache["bilm_order"] = _Order(words, steps, time.batch_sizes, time.order, torch.argsort(time.order))
    cached: _Order = layout.plan_cache["bilm_order"]
    return cached
