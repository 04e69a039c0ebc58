"""The shell of ELMo: an encoder that carries memory and predicts words in both directions."""

from __future__ import annotations

from torch import Tensor

from qkv.nn.bilm import NUM_DIRECTIONS, BiLM
from qkv.nn.layer_mix import concat_last_layers
from qkv.nn.memory import Memory
from qkv.nn.model import Encoder
from qkv.nn.ragged import Ragged


class BiLMEncoder(Encoder):
    """Encoder over a bidirectional language model.

    Without memory every text is read from an empty state, so that it always gets the same vectors. With a head of kind
    `lm`, the logits [T, 2, vocabulary] of a word are those of the word after it and of the word before it.
    """

    encoder: BiLM

    @property
    def is_language_model(self) -> bool:
        """Whether the head predicts words."""
        return self.head is not None and self.head.spec.kind == "lm"

    def initial_memory(self, num_streams: int) -> Memory:
        return self.encoder.initial_memory(num_streams)

    def forward_with_memory(
        self, source: Ragged, memory: Memory, positions: Tensor | None = None, *, return_logits: bool = True
    ) -> tuple[Tensor, Memory]:
        memory.check_streams(len(source))
        x = self.embed_inputs(source)
        layers, memory = self.encoder.hidden_layers(x, memory)
        values = layers[-1]
        if self.spec.feature_layers != "last":
            values = concat_last_layers(layers) if self.scalar_mix is None else self.scalar_mix(layers)
        hidden = x.with_values(values)
        if self.head is None:
            return hidden.to_tokens().values, memory
        return self._apply_head(hidden, positions, return_logits), memory

    def _apply_head(self, hidden: Ragged, positions: Tensor | None, return_logits: bool) -> Tensor:
        """Apply the head; `positions` of a language model are those of states of one direction.

        State 2 w is the forward state of word w, 2 w + 1 its backward state.
        """
        assert self.head is not None
        if not self.is_language_model:
            return super()._apply_head(hidden, positions, return_logits)
        if positions is None:
            states = _split_directions(hidden.to_tokens().values)  # [T, 2, width]
        else:
            states = _split_directions(hidden.values).flatten(0, 1)[positions]  # [M, width]
        features = self.head.compute_features(states)
        return self.head.compute_logits(features) if return_logits else features


def _split_directions(hidden: Tensor) -> Tensor:
    """[T, 2 * width] -> [T, 2, width]"""
    return hidden.reshape(len(hidden), NUM_DIRECTIONS, -1)
