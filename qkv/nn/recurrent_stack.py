"""Decoder-only recurrent network: the LSTM language model and AWD-LSTM, whose state is carried as memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qkv import spec
from qkv.nn.dropout import dropout
from qkv.nn.memory import Memory
from qkv.nn.ragged import BatchLayout, Ragged
from qkv.nn.recurrent import LayerStates, RecurrentState
from qkv.nn.stack import EncoderOutput

_STATE_NAMES = {"lstm": ("h", "c"), "gru": ("h",)}


class _TimeSteps(NamedTuple):
    """Order in which the tokens of a batch are processed: step by step, longest sequence first."""

    batch_sizes: Tensor | None  # [N] on the host; None: all sequences have the same length
    order: Tensor  # [B] sequences by decreasing length
    inverse_order: Tensor  # [B]
    sequence_ids: Tensor  # [T] rank of the sequence of each token in `order`


class RecurrentStack(nn.Module):
    """Unidirectional LSTM or GRU layers with the dropouts of Merity et al. 2018.

    Each layer is a module with dropout outside, as in `RecurrentEncoder`. Dropped hidden-to-hidden matrices are passed
    as arguments: the parameters stay what they are, so that their gradients and checkpoints do.
    """

    def __init__(self, s: spec.RecurrentStack):
        super().__init__()
        self.spec = s
        rnn_class = nn.LSTM if s.cell == "lstm" else nn.GRU
        widths = (s.d_model, *s.layer_sizes[:-1])
        self.layers = nn.ModuleList(rnn_class(width, size) for width, size in zip(widths, s.layer_sizes, strict=True))

    def initial_memory(self, num_streams: int) -> Memory:
        """Return the memory before the first token."""
        weight = next(self.parameters())
        return Memory(
            {
                f"layers.{layer}.{name}": weight.new_zeros(num_streams, size)
                for layer, size in enumerate(self.spec.layer_sizes)
                for name in _STATE_NAMES[self.spec.cell]
            }
        )

    def forward(self, x: Ragged, memory: Memory | None = None) -> EncoderOutput:
        """Return the hidden states of all tokens and the memory after the last one.  # [T, width] -> [T, output]

        Sequence i continues row i of `memory`; None: every sequence is at the beginning of its text.
        """
        memory = self.initial_memory(len(x)) if memory is None else memory
        steps = _time_steps(x.layout)
        values = x.values[x.layout.time_major().permutation]  # [T, width] step by step
        values = self._drop(values, self.spec.input_dropout, steps)
        tensors: dict[str, Tensor] = {}
        undropped = values
        for number, layer in enumerate(self.layers):
            names = [f"layers.{number}.{name}" for name in _STATE_NAMES[self.spec.cell]]
            undropped, final = self._run_layer(layer, values, steps, [memory[name][steps.order] for name in names])
            tensors |= {
                name: state[steps.inverse_order].to(memory[name].dtype)
                for name, state in zip(names, final, strict=True)
            }
            is_last = number == len(self.layers) - 1
            values = self._drop(undropped, self.spec.output_dropout if is_last else self.spec.dropout, steps)
        inverse = x.layout.time_major().inverse
        return EncoderOutput(
            x.with_values(values[inverse]),
            memory=Memory(tensors),
            undropped=undropped[inverse] if self.training else None,
        )

    def _run_layer(
        self, layer: nn.Module, values: Tensor, steps: _TimeSteps, states: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one layer from its states [B, hidden].  # [T, width] -> [T, hidden], states"""
        hx: Any = [state[None] for state in states]  # [1, B, hidden]
        is_lstm = self.spec.cell == "lstm"
        dense = (
            values.view(-1, len(steps.order), values.shape[-1]) if steps.batch_sizes is None else None
        )  # [N, B, width]
        if self.training and self.spec.weight_dropout:
            output, final = self._run_with_dropped_weight(layer, values, dense, steps, hx)
        else:
            inputs = PackedSequence(values, steps.batch_sizes) if dense is None else dense
            output, final = layer(inputs, tuple(hx) if is_lstm else hx[0])
            output = output.data if isinstance(output, PackedSequence) else output
        finals = final if isinstance(final, tuple | list) else [final]
        return output.reshape(len(values), -1), [state[0] for state in finals]

    def _run_with_dropped_weight(
        self, layer: Any, values: Tensor, dense: Tensor | None, steps: _TimeSteps, hx: list[Tensor]
    ) -> tuple[Tensor, Any]:
        weights = [layer.weight_ih_l0, dropout(layer.weight_hh_l0, self.spec.weight_dropout)]
        weights += [layer.bias_ih_l0, layer.bias_hh_l0]
        is_lstm = self.spec.cell == "lstm"
        function: Any = torch.lstm if is_lstm else torch.gru
        initial = hx if is_lstm else hx[0]
        options = (weights, True, 1, 0.0, True, False)  # bias, layers, dropout, training, bidirectional
        with warnings.catch_warnings():  # cuDNN copies a matrix that changes at each step, whatever its memory layout
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            if dense is None:
                output, *final = function(values, steps.batch_sizes, initial, *options)
            else:
                output, *final = function(dense, initial, *options, False)
        return output, final

    def _drop(self, values: Tensor, p: float, steps: _TimeSteps) -> Tensor:
        """Apply dropout to the values of all tokens; if it is locked, with one mask per sequence."""
        if not self.training or not p:
            return values
        if not self.spec.locked_dropout:
            return dropout(values, p)
        mask = dropout(values.new_ones(len(steps.order), values.shape[-1]), p)  # [B, width]
        return values * mask[steps.sequence_ids]

    def init_state(
        self,
        encoder_output: EncoderOutput | None,  # noqa: ARG002  # as `Stack.init_state`; there is no encoder
        num_rows: int,
        max_length: int = 0,  # noqa: ARG002  # a recurrent state does not grow
        like: Tensor | None = None,  # noqa: ARG002
    ) -> RecurrentState:
        """Return the state before the first token."""
        return self.decoding_state(self.initial_memory(num_rows))

    def decoding_state(self, memory: Memory) -> RecurrentState:
        """Return the state of `step` for rows that continue a memory."""
        names = _STATE_NAMES[self.spec.cell]
        layers: LayerStates = [
            tuple(memory[f"layers.{layer}.{name}"] for name in names) for layer in range(len(self.layers))
        ]
        return RecurrentState(layers, None)

    def step(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Process one new token per row.  # [R, width] -> [R, output]"""
        layers: LayerStates = []
        for module, previous in zip(self.layers, state.layers, strict=True):
            layer: Any = module
            weights = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)
            if self.spec.cell == "lstm":
                layers.append(tuple(torch.lstm_cell(x, previous, *weights)))
            else:
                layers.append((torch.gru_cell(x, previous[0], *weights),))
            x = layers[-1][0]
        state.layers = layers
        return x


def _time_steps(layout: BatchLayout) -> _TimeSteps:
    if "time_steps" not in layout.plan_cache:
        time = layout.time_major()
        sequence_ids = torch.cat([torch.arange(n) for n in time.batch_sizes]).to(layout.device)
        batch_sizes = None if layout.is_uniform else torch.tensor(time.batch_sizes)
        layout.plan_cache["time_steps"] = _TimeSteps(batch_sizes, time.order, torch.argsort(time.order), sequence_ids)
    cached: _TimeSteps = layout.plan_cache["time_steps"]
    return cached
