"""The streams that the chunks of a batch belong to, for models that carry memory from batch to batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from qkv.data.rng import Bools, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """One segment of each of `num_streams` streams, in one or several pieces."""

    streams: Ints  # [P] stream of each piece, ascending, counted from the first stream of this batch
    starts: Bools  # [P] whether a piece begins with an empty memory
    num_streams: int  # streams of this batch
    total_streams: int  # streams of all micro-batches
    first_stream: int = 0  # number of the first stream of this micro-batch
    lr_factor: float = 1.0  # length of the segments in relation to their mean, by which the learning rate is scaled

    @property
    def last_pieces(self) -> Ints:
        """The last piece of each stream, whose memory the next segment continues.  # [num_streams]"""
        return np.searchsorted(self.streams, np.arange(self.num_streams), side="right") - 1

    def split(self, num_groups: int) -> list[tuple[slice, Segments]]:
        """Divide the streams into groups of similar size, the same ones in every batch; return the pieces of each."""
        edges = self.num_streams * np.arange(num_groups + 1) // num_groups
        piece_edges = np.searchsorted(self.streams, edges).tolist()
        groups = []
        for group, (low, high) in enumerate(pairwise(piece_edges)):
            first, last = int(edges[group]), int(edges[group + 1])
            group_segments = replace(
                self,
                streams=self.streams[low:high] - first,
                starts=self.starts[low:high],
                num_streams=last - first,
                first_stream=first,
            )
            groups.append((slice(low, high), group_segments))
        return groups
