"""Small random models, and a model with a table of probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkv import families, spec
from qkv.nn import EncoderDecoder, Ragged, build
from qkv.nn.kv_cache import source_rows


def tiny(family: str, seed: int = 0, vocabulary: int = 11) -> EncoderDecoder:
    """Return a random model with weights large enough that its outputs differ in probability."""
    torch.manual_seed(seed)
    module = families.get_family(family)
    small = {"d_model": 16, "layers": 1, "max_length": 40}
    small |= {"d_ff": 16, "heads": 2} if family == "transformer" else {"hidden_size": 16, "heads": 1}
    shape = replace(next(iter(module.PRESETS.values())), **small)
    model = build(module.make_spec(shape, source_vocab_size=9, target_vocab_size=vocabulary))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.eval()


def sources(*lengths: int) -> Ragged:
    chance = torch.Generator().manual_seed(sum(lengths))
    return Ragged.pack([torch.cat([torch.randint(4, 9, (n,), generator=chance), torch.tensor([3])]) for n in lengths])


@dataclass
class Walk:
    """A decoder state that contains only the tokens read so far."""

    position: int
    read: list[list[int]]

    def reorder(self, rows: Tensor) -> None:
        self.read = [list(self.read[i]) for i in rows.tolist()]

    def merge(self, kept: Tensor, other: Walk | None, rows_per_source: int) -> None:
        self.reorder(source_rows(kept, rows_per_source))
        self.read += [] if other is None else other.read


class Written(torch.nn.Module):
    """A model whose distribution after any prefix comes from a table of log-probabilities."""

    def __init__(self, table: dict[tuple[int, ...], dict[int, float]], vocabulary: int, end: int = 3):
        super().__init__()
        self.table, self.vocabulary = table, vocabulary
        self.spec = spec.Model(family="written", eos_id=end)
        self.head = torch.nn.Module()
        self.head.linear = torch.nn.Linear(1, vocabulary)

    continues_input = False
    device = torch.device("cpu")

    def max_new_tokens(self, source_lengths: list[int], requested: int) -> list[int]:
        return [requested] * len(source_lengths)

    def prefill(self, source: Ragged, rows_per_source: int, max_new_tokens: int) -> tuple[Tensor, Walk]:
        rows = len(source) * rows_per_source
        return self.step(torch.full((rows,), self.spec.bos_id), self.init_state(source, rows, max_new_tokens))

    def init_state(self, _memory: Ragged, rows: int, _limit: int) -> Walk:
        return Walk(0, [[] for _ in range(rows)])

    def step(self, tokens: Tensor, state: Walk) -> tuple[Tensor, Walk]:
        read = [[*before, token] for before, token in zip(state.read, tokens.tolist(), strict=True)]
        logits = torch.full((len(read), self.vocabulary), -30.0)
        for row, prefix in enumerate(read):
            for token, probability in self.table.get(tuple(prefix[1:]), {self.spec.eos_id: 1.0}).items():
                logits[row, token] = torch.tensor(probability).log()
        return logits, Walk(state.position + 1, read)
