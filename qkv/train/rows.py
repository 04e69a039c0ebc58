"""AdamW for large embeddings of which a training set uses few rows, as in fine-tuning on a CPU.

A row that never had a gradient has no moments: all that AdamW (Loshchilov & Hutter 2019) does to it is to decay it, by
the same factor as every other such row. So these rows sleep: their common factor is kept as one number, and a row is
brought up to date where it is looked up. The others, gathered, go through AdamW as ever. With a vocabulary of 30,000
and a set that has 2,500 of its words, a step neither fills nor reads nor updates nine tenths of the embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from qkv.nn.embed import Embed

_FEWEST = 4096  # rows of an embedding that is worth it
_MOST_AWAKE = 0.5  # share of rows from which on all of them together are faster


class Table:
    """An embedding, which rows of it ever had a gradient, and how far the others are behind."""

    def __init__(self, module: nn.Embedding):
        self.module = module
        self.awake = torch.zeros(module.num_embeddings, dtype=torch.bool)
        self.rows = torch.empty(0, dtype=torch.long)  # those awake, in order
        self.decay = 1.0  # the product of all steps' factors
        self.paid = torch.ones(len(self.awake), dtype=torch.float64)  # what it was when a row was last right
        module.sparse = True
        self.hook = module.register_forward_pre_hook(lambda _, given: self.bring_up(given[0].unique()))

    def wake(self, rows: Tensor) -> None:
        if not bool(self.awake[rows].all()):
            self.awake[rows] = True
            self.rows = self.awake.nonzero()[:, 0]

    @torch.no_grad()
    def bring_up(self, rows: Tensor) -> None:
        """Rows that are asleep get the decay that they missed."""
        behind = rows[~self.awake[rows] & (self.paid[rows] != self.decay)]
        if len(behind):
            weight = self.module.weight
            factor = (self.decay / self.paid[behind]).to(weight.dtype)
            weight[behind] = weight[behind] * factor[:, None]
            self.paid[behind] = self.decay

    def settle(self) -> None:
        self.bring_up(torch.arange(len(self.awake)))

    def retire(self) -> None:
        """From now on the embedding is one like others."""
        self.settle()
        self.hook.remove()
        self.module.sparse = False


class RowAdamW(torch.optim.AdamW):
    """torch's, to whose state and figures its own are equal, where some weights are those of `tables`."""

    def __init__(self, groups: Any, tables: list[Table], **settings: Any):
        super().__init__(groups, **settings)
        self.tables = {table.module.weight: table for table in tables}

    def settle(self) -> None:
        """To be called before a weight is read by other means than a lookup: saved, scored, averaged."""
        for table in self.tables.values():
            table.settle()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        found = [(group, p) for group in self.param_groups for p in group["params"] if p in self.tables]
        held = [(group, p, p.grad.coalesce()) for group, p in found if p.grad is not None]
        for _, p, _ in held:
            p.grad = None  # torch's own kernels take no such gradient
        done = super().step(closure)
        for group, p, gradient in held:
            self._update(group, p, gradient)
        return done

    def _update(self, group: dict[str, Any], weight: Tensor, gradient: Tensor) -> None:
        table, state = self.tables[weight], self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        given = gradient.indices()[0]  # [G] in order
        table.wake(given)
        rows = table.rows  # [R]
        dense = weight.new_zeros(len(rows), weight.shape[1])
        dense[torch.searchsorted(rows, given)] = gradient.values()
        whole = [weight, state["exp_avg"], state["exp_avg_sq"]]
        parts = [tensor.index_select(0, rows) for tensor in whole]  # [R, width] each
        beta1, beta2 = group["betas"]
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
        adamw(
            parts[:1], [dense], parts[1:2], parts[2:], [], [state["step"]],
            beta1=beta1, beta2=beta2, amsgrad=False, fused=True, **settings,
        )  # fmt: skip
        for tensor, part in zip(whole, parts, strict=True):
            tensor.index_copy_(0, rows, part)
        table.decay *= 1 - group["lr"] * group["weight_decay"]
        self._let_go()

    def _let_go(self) -> None:
        """Of tables most of whose rows are awake."""
        for weight, table in list(self.tables.items()):
            if len(table.rows) > _MOST_AWAKE * len(table.awake):
                table.retire()
                del self.tables[weight]

    def load_state_dict(self, state_dict: Any) -> None:
        """The rows that have moments are those that had a gradient."""
        super().load_state_dict(state_dict)
        for weight, table in self.tables.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in self.state[weight]:
                    table.wake(self.state[weight][name].any(1).nonzero()[:, 0])
        self._let_go()


def large_tables(model: nn.Module) -> list[Table]:
    """The trained embeddings that are worth it, and that nothing but a lookup reads: not those that a head shares."""
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    found = [module.tokens for module in model.modules() if isinstance(module, Embed)]
    return [
        Table(tokens)
        for tokens in found
        if tokens.num_embeddings >= _FEWEST and tokens.weight.requires_grad and uses[id(tokens.weight)] == 1
    ]
