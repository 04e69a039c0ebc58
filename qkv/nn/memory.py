"""Memory: what a model carries from one segment of a text to the next.

A batch of streams is a number of contiguous texts that are read side by side, one segment of each per step. A model
with memory (`Model.has_memory`) reads a segment with `forward_with_memory` and returns the memory for the following
one: the state of a recurrent network, the hidden states of earlier segments in Transformer-XL and XLNet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qkv.errors import InputError


class Memory:
    """Named tensors [B, …] of B streams. All zeros is the memory of a stream before its first token.

    Memories are values: every method returns a new one. A memory that has a variable number of entries per stream
    (hidden states of earlier tokens) stores their number in a tensor [B], so that zero means none.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors or len({tensor.shape[:1] for tensor in tensors.values()}) != 1:
            raise InputError("a memory needs at least one tensor, and all of its tensors one row per stream")
        self.tensors: dict[str, Tensor] = dict(tensors)

    def __len__(self) -> int:
        """Return the number of streams."""
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def check_streams(self, num_sequences: int) -> None:
        """Refuse a batch that has not one sequence per stream."""
        if len(self) != num_sequences:
            counts = f"the batch has {num_sequences} sequences, and the memory {len(self)} streams"
            raise InputError(f"{counts}; select the rows of the memory")

    def detach(self) -> Memory:
        """Return the memory without its graph: no gradient flows into the segment that it comes from."""
        return Memory({name: tensor.detach() for name, tensor in self.tensors.items()})

    def to(self, device: torch.device | str) -> Memory:
        """Return a copy on a device."""
        return Memory({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def reset(self, rows: Tensor) -> Memory:
        """Return the memory with zeros for the streams whose document ended.

        Args:
            rows: a mask [B] that is true for these streams.
        """
        return Memory(
            {
                name: tensor.masked_fill(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)
                for name, tensor in self.tensors.items()
            }
        )

    def select(self, rows: Tensor) -> Memory:
        """Return the memory of the streams of the given indices [R], in that order; an index may occur repeatedly."""
        return Memory({name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()})

    @staticmethod
    def concat(memories: Sequence[Memory]) -> Memory:
        """Join the memories of groups of streams, in that order."""
        return Memory({name: torch.cat([memory[name] for memory in memories]) for name in memories[0].tensors})

    def split(self, sizes: Sequence[int]) -> list[Memory]:
        """Return the memories of consecutive groups of streams."""
        groups = zip(*(torch.split(tensor, list(sizes)) for tensor in self.tensors.values()), strict=True)
        return [Memory(dict(zip(self.tensors, group, strict=True))) for group in groups]

    def to_state_dict(self) -> dict[str, Tensor]:
        """Return the tensors by name, as a checkpoint stores them."""
        return {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], like: Memory, location: str = "memory") -> Memory:
        """Return a stored memory.

        Args:
            state: the result of `to_state_dict`.
            like: the model's `initial_memory` for as many streams; other names and shapes are refused.
            location: the file, with which the error message begins.
        """
        for name, tensor in like.tensors.items():
            stored = state.get(name)
            if stored is None or stored.shape != tensor.shape:
                shape = "missing" if stored is None else f"of shape {list(stored.shape)}"
                remedy = "use the model and the number of streams that it was saved with"
                raise InputError(f"{location}: the memory '{name}' is {shape}, not {list(tensor.shape)}; {remedy}")
        return Memory({name: state[name].to(tensor.device, tensor.dtype) for name, tensor in like.tensors.items()})
