"""The bidirectional language model of ELMo, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BiLM:
    """Forward and backward LSTM layers with projection, which never read each other (Peters et al. 2018, 3.1).

    The hidden state of a token is that of both directions, concatenated; layer 0 is its embedding, twice.
    """

    d_model: int  # width of the embeddings, and of one direction's output
    hidden_size: int  # size of one direction's cells, which are projected to d_model
    layers: int = 2  # number of layers
    cell_clip: float | None = 3.0  # largest absolute value of a cell; None: no limit
    projection_clip: float | None = 3.0  # largest absolute value of a projected state; None: no limit
    skip_connections: bool = True  # add the input of each layer but the first to its output
    dropout: float = 0.0  # dropout on the input of each layer and on the output of the last

    @property
    def output_dim(self) -> int:
        return 2 * self.d_model
