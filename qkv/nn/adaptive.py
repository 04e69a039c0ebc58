"""Adaptive embedding and adaptive softmax: rarer words have narrower vectors (Baevski & Auli 2019; Grave et al. 2017).

The vocabulary is sorted by frequency and divided into clusters. The softmax over the first cluster has one more output
for each other cluster; the probability of a word in one of these is that of the cluster times that within it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import spec


def _empty_matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))


class AdaptiveEmbedding(nn.Module):
    """Vectors of words, of the width of their cluster, projected to one width."""

    def __init__(self, s: spec.Embedding):
        super().__init__()
        assert s.clusters is not None
        clusters, self.starts = s.clusters, s.clusters.starts
        sizes = clusters.sizes(s.vocab_size)
        if clusters.divisor == 1:  # one table, whose rows have the same width
            self.starts, sizes = (0,), (s.vocab_size,)
        widths = clusters.widths[: len(sizes)]
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size, width in zip(sizes, widths, strict=True))
        is_projected = clusters.divisor != 1 or clusters.embed_dim != s.d_model
        self.projections = nn.ParameterList([_empty_matrix(s.d_model, n) for n in widths] if is_projected else [])
        self.init_weights(None)

    def init_weights(self, std: float | None) -> None:
        """Draw the projections; tables are initialized like any other embedding."""
        for projection in self.projections:
            nn.init.normal_(projection, std=std or 0.02)

    @property
    def weight(self) -> Tensor:
        """Vectors of the most frequent words."""
        weight = self.tables[0].weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        """[T] -> [T, width]"""
        output: Tensor | None = None
        # every table is read for every token: the shapes are static, and nothing waits for the device
        for index, (start, table) in enumerate(zip(self.starts, self.tables, strict=True)):
            assert isinstance(table, nn.Embedding)
            size = table.num_embeddings
            rows = (ids - start).clamp(0, size - 1)
            vectors: Tensor = table(rows)
            if len(self.projections):
                vectors = F.linear(vectors, self.projections[index])
            output = vectors if output is None else torch.where((ids >= start)[:, None], vectors, output)
        assert output is not None
        return output


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of all words, or the loss of labels without those of words in other clusters."""

    def __init__(self, s: spec.Head):
        super().__init__()
        assert s.clusters is not None
        clusters, num_clusters = s.clusters, len(s.clusters.starts)
        self.starts, self.sizes = clusters.starts, clusters.sizes(s.num_outputs)
        self.divisor = clusters.divisor
        table_sizes = self.sizes if clusters.divisor != 1 else (s.num_outputs,)
        widths = clusters.widths[: len(table_sizes)]
        self.tables = nn.ModuleList(nn.Linear(n, size) for n, size in zip(widths, table_sizes, strict=True))
        self.cluster_weight = _empty_matrix(num_clusters - 1, clusters.embed_dim)
        self.cluster_bias = nn.Parameter(torch.zeros(num_clusters - 1))
        is_projected = clusters.divisor != 1 or clusters.embed_dim != s.d_model
        self.projections = nn.ParameterList(
            [_empty_matrix(s.d_model, n) for n in clusters.widths] if is_projected else []
        )
        self.init_weights(None)

    def init_weights(self, std: float | None) -> None:
        """Draw the projections and the outputs of clusters; tables are initialized like any other matrix."""
        for matrix in (self.cluster_weight, *self.projections):
            nn.init.normal_(matrix, std=std or 0.02)
        nn.init.zeros_(self.cluster_bias)

    def tie(self, embedding: AdaptiveEmbedding, tie_projections: Sequence[bool]) -> None:
        """Use the tables of an embedding, and its projections where `tie_projections` is true."""
        for table, other in zip(self.tables, embedding.tables, strict=True):
            table.weight = other.weight
        for cluster, is_tied in enumerate(tie_projections):
            if is_tied and len(self.projections):
                self.projections[cluster] = embedding.projections[cluster if self.divisor != 1 else 0]

    def forward(self, features: Tensor) -> Tensor:
        """Return the log-probability of every word.  # [R, width] -> [R, vocabulary]"""
        first = torch.log_softmax(self._cluster_logits(features, 0), -1)  # [R, size + clusters - 1]
        outputs = [first[:, : self.sizes[0]]]
        for cluster in range(1, len(self.sizes)):
            within = torch.log_softmax(self._cluster_logits(features, cluster), -1)
            outputs.append(within + first[:, self.sizes[0] + cluster - 1, None])
        return torch.cat(outputs, 1)

    def nll(self, features: Tensor, labels: Tensor, label_smoothing: float, ignore_index: int) -> Tensor:
        """Return the negative log-likelihood of the labels, summed.  # [M, width], [M] -> []"""
        if label_smoothing:  # needs the probabilities of all words
            log_probs = self(features)
            return F.cross_entropy(
                log_probs, labels, reduction="sum", label_smoothing=label_smoothing, ignore_index=ignore_index
            )
        is_label = labels != ignore_index
        clusters = torch.bucketize(labels, torch.tensor(self.starts[1:], device=labels.device), right=True)  # [M]
        # a word of a later cluster is the output of that cluster in the first softmax
        first_labels = torch.where(clusters > 0, self.sizes[0] + clusters - 1, labels)
        logits = self._cluster_logits(features, 0)
        total = F.cross_entropy(logits, first_labels, reduction="sum", ignore_index=ignore_index)
        for cluster in range(1, len(self.sizes)):
            rows = ((clusters == cluster) & is_label).nonzero().flatten()
            logits = self._cluster_logits(features[rows], cluster)
            total = total + F.cross_entropy(logits, labels[rows] - self.starts[cluster], reduction="sum")
        return total

    def _cluster_logits(self, features: Tensor, cluster: int) -> Tensor:
        """Return the logits of the words of a cluster; after those of the first one, those of the other clusters."""
        if len(self.projections):
            features = F.linear(features, self.projections[cluster].t())
        table = self.tables[cluster if self.divisor != 1 else 0]
        weight, bias = table.weight, table.bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        if self.divisor == 1:
            start = self.starts[cluster]
            weight, bias = weight[start : start + self.sizes[cluster]], bias[start : start + self.sizes[cluster]]
        if cluster == 0:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        logits = F.linear(features, weight, bias)
        return logits if logits.dtype == torch.float64 else logits.float()
