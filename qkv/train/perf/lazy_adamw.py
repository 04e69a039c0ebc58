"""AdamW for large embeddings of which a dataset uses few rows, as in fine-tuning on a CPU.

A row that never had a gradient has no moments: AdamW (Loshchilov & Hutter 2019) only decays it, by the same factor as
every other such row. These inactive rows share one factor, which is applied to a row when it is looked up. The active
rows are gathered and updated by AdamW. With a vocabulary of 30,000 and a dataset with 2,500 of its tokens, a step does
not touch nine tenths of the embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from qkv.nn.embedding import TokenEmbedding

_MIN_ROWS = 4096  # minimum rows of an embedding that is updated lazily
_MAX_ACTIVE_FRACTION = 0.5  # above this fraction of active rows, a dense update is faster


class LazyEmbedding:
    """An embedding with its active rows, which had a gradient, and the pending decay of the others."""

    def __init__(self, module: nn.Embedding) -> None:
        self.module = module
        self.active = torch.zeros(module.num_embeddings, dtype=torch.bool)
        self.active_rows = torch.empty(0, dtype=torch.long)  # in ascending order
        self.total_decay = 1.0  # product of the decay factors of all steps
        self.applied_decay = torch.ones(
            len(self.active), dtype=torch.float64
        )  # total_decay when a row was last updated
        module.sparse = True
        self.hook = module.register_forward_pre_hook(lambda _, inputs: self.catch_up(inputs[0].unique()))

    def activate(self, rows: Tensor) -> None:
        """Mark rows that have a gradient."""
        if not bool(self.active[rows].all()):
            self.active[rows] = True
            self.active_rows = self.active.nonzero()[:, 0]

    @torch.no_grad()
    def catch_up(self, rows: Tensor) -> None:
        """Apply the pending decay to the inactive rows among `rows`."""
        stale_rows = rows[~self.active[rows] & (self.applied_decay[rows] != self.total_decay)]
        if len(stale_rows):
            weight = self.module.weight
            factor = (self.total_decay / self.applied_decay[stale_rows]).to(weight.dtype)
            weight[stale_rows] = weight[stale_rows] * factor[:, None]
            self.applied_decay[stale_rows] = self.total_decay

    def flush(self) -> None:
        """Apply the pending decay to all rows."""
        self.catch_up(torch.arange(len(self.active)))
        self.total_decay = 1.0  # as in a run that is resumed from here
        self.applied_decay.fill_(1.0)

    def disable(self) -> None:
        """Return to dense updates of the embedding."""
        self.flush()
        self.hook.remove()
        self.module.sparse = False


class LazyEmbeddingAdamW(torch.optim.AdamW):
    """torch's AdamW with lazy updates of `embeddings`; weights and state are equal to those of torch's."""

    def __init__(self, param_groups: Any, embeddings: list[LazyEmbedding], **settings: Any) -> None:
        super().__init__(param_groups, **settings)
        self.embeddings = {embedding.module.weight: embedding for embedding in embeddings}

    def flush(self) -> None:
        """Apply all pending decay; to be called before weights are read other than by lookup, such as saved."""
        for embedding in self.embeddings.values():
            embedding.flush()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters."""
        lazy_params = [(group, p) for group in self.param_groups for p in group["params"] if p in self.embeddings]
        sparse_grads = [(group, p, p.grad.coalesce()) for group, p in lazy_params if p.grad is not None]
        for _, p, _ in sparse_grads:
            p.grad = None  # torch's AdamW refuses sparse gradients
        result = super().step(closure)
        for group, p, gradient in sparse_grads:
            self._update(group, p, gradient)
        return result

    def _update(self, group: dict[str, Any], weight: Tensor, gradient: Tensor) -> None:
        embedding, state = self.embeddings[weight], self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        grad_rows = gradient.indices()[0]  # [G] in order
        embedding.activate(grad_rows)
        rows = embedding.active_rows  # [R]
        dense_grad = weight.new_zeros(len(rows), weight.shape[1])
        dense_grad[torch.searchsorted(rows, grad_rows)] = gradient.values()
        tensors = [weight, state["exp_avg"], state["exp_avg_sq"]]
        active_tensors = [tensor.index_select(0, rows) for tensor in tensors]  # [R, width] each
        beta1, beta2 = group["betas"]
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
        adamw(
            active_tensors[:1], [dense_grad], active_tensors[1:2], active_tensors[2:], [], [state["step"]],
            beta1=beta1, beta2=beta2, amsgrad=False, fused=True, **settings,
        )  # fmt: skip
        for tensor, active_tensor in zip(tensors, active_tensors, strict=True):
            tensor.index_copy_(0, rows, active_tensor)
        embedding.total_decay *= 1 - group["lr"] * group["weight_decay"]
        self._disable_mostly_active()

    def _disable_mostly_active(self) -> None:
        """Return to dense updates of embeddings with many active rows."""
        for weight, embedding in list(self.embeddings.items()):
            if len(embedding.active_rows) > _MAX_ACTIVE_FRACTION * len(embedding.active):
                embedding.disable()
                del self.embeddings[weight]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state; rows with moments are active."""
        super().load_state_dict(state_dict)
        for weight, embedding in self.embeddings.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in self.state[weight]:
                    embedding.activate(self.state[weight][name].any(1).nonzero()[:, 0])
        self._disable_mostly_active()


def pending_decay(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the decay that lazy embeddings have not applied yet, named by the number of the parameter.

    Applying it at another step than in an undisturbed run would round differently.
    """
    if not isinstance(optimizer, LazyEmbeddingAdamW):
        return {}
    tensors = {}
    for index, embedding in _numbered_embeddings(optimizer).items():
        if bool((embedding.applied_decay[~embedding.active] != embedding.total_decay).any()):
            total = torch.tensor([embedding.total_decay], dtype=torch.float64)
            tensors[str(index)] = torch.cat([total, embedding.applied_decay])  # [1 + rows]
    return tensors


def load_pending_decay(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load what `pending_decay` returned, after the optimizer's state; an optimizer without lazy updates applies it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    embeddings = _numbered_embeddings(optimizer) if isinstance(optimizer, LazyEmbeddingAdamW) else {}
    for key, tensor in tensors.items():
        weight, total, applied = parameters[int(key)], float(tensor[0]), tensor[1:].double()
        if applied.shape != weight.shape[:1]:
            raise ValueError(f"no decay per row of parameter {key}")
        if int(key) in embeddings:
            embeddings[int(key)].total_decay = total
            embeddings[int(key)].applied_decay.copy_(applied)
        else:
            is_active = optimizer.state[weight]["exp_avg_sq"].any(1).cpu()  # [rows]
            factors = torch.where(is_active, torch.ones_like(applied), total / applied)
            with torch.no_grad():
                weight.mul_(factors.to(weight)[:, None])


def _numbered_embeddings(optimizer: LazyEmbeddingAdamW) -> dict[int, LazyEmbedding]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {index: optimizer.embeddings[p] for index, p in enumerate(parameters) if p in optimizer.embeddings}


def find_lazy_embeddings(model: nn.Module) -> list[LazyEmbedding]:
    """Return the large trained embeddings that are read only by lookup, so not those tied to a head."""
    use_counts = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    embeddings = [module.tokens for module in model.modules() if isinstance(module, TokenEmbedding)]
    return [
        LazyEmbedding(embedding)
        for embedding in embeddings
        if isinstance(embedding, nn.Embedding)
        and embedding.num_embeddings >= _MIN_ROWS
        and embedding.weight.requires_grad
        and use_counts[id(embedding.weight)] == 1
    ]
