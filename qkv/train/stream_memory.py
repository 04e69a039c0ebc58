"""The memory of the streams that a run trains on, between two steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qkv.checkpoints.state import AnyModel
from qkv.data.corpora.segments import Segments
from qkv.nn.memory import Memory
from qkv.train.distributed.processes import DistributedInfo, all_reduce_sum


class StreamMemory:
    """Memory of all streams, in the order of the streams. Each process updates the streams of its micro-batches."""

    def __init__(self, model: AnyModel, dist_info: DistributedInfo) -> None:
        self._model, self._dist_info = model, dist_info
        self._memory: Memory | None = None  # None: no stream was read yet
        self._stored: Mapping[str, Tensor] = {}  # of a checkpoint, until the number of streams is known
        self._own_streams: set[int] = set()  # streams that this process reads

    def read(self, segments: Segments) -> Memory:
        """Return the memory of the streams of a micro-batch."""
        memory = self._of_all_streams(segments.total_streams)
        rows = slice(segments.first_stream, segments.first_stream + segments.num_streams)
        return Memory({name: tensor[rows] for name, tensor in memory.tensors.items()})

    @torch.no_grad()
    def write(self, segments: Segments, memory: Memory) -> None:
        """Replace the memory of the streams of a micro-batch."""
        rows = slice(segments.first_stream, segments.first_stream + segments.num_streams)
        for name, tensor in self._of_all_streams(segments.total_streams).tensors.items():
            tensor[rows] = memory[name]
        self._own_streams.update(range(rows.start, rows.stop))

    def _of_all_streams(self, num_streams: int) -> Memory:
        if self._memory is None or len(self._memory) != num_streams:
            initial = self._model.initial_memory(num_streams)
            self._memory = Memory.from_state_dict(self._stored, initial, "checkpoint") if self._stored else initial
            self._stored = {}
        return self._memory

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory of the streams of all processes; every process must call it."""
        if self._memory is None:
            return dict(self._stored)
        if self._dist_info.is_single:
            return self._memory.to_state_dict()
        is_foreign = torch.ones(len(self._memory), dtype=torch.bool, device=self._memory.device)
        is_foreign[sorted(self._own_streams)] = False
        own_memory = self._memory.reset(is_foreign).to_state_dict()  # each stream is not zero in one process only
        return {name: all_reduce_sum(tensor, self._dist_info) for name, tensor in own_memory.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the result of `state_dict`."""
        self._memory, self._stored = None, dict(tensors)
