"""What a training loop works on: batches, their losses, a score. The loop knows no more than this of data and model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from qkv import spec
from qkv.checkpoints.model_folder import AnyModel
from qkv.data.batching import DataPosition
from qkv.errors import InputError
from qkv.objectives.loss import LossSum
from qkv.recipe.schema import FinetuneRecipe, Recipe, Seq2SeqRecipe


class AnyBatch(Protocol):
    """Examples, packed."""

    @property
    def tokens(self) -> int:
        """Real ones."""
        ...

    def split(self, num_microbatches: int) -> list[Any]: ...


class Workload(Protocol):
    """Pairs, text or a task. A part of a batch is what `collate` makes: a named tuple with its `num_targets`."""

    @property
    def recipe(self) -> Recipe:
        """As it is written down: with what the training data decided."""
        ...

    @property
    def spec(self) -> spec.Model: ...

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses, which are added up."""
        ...

    @property
    def metric(self) -> str:
        """The score that decides."""
        ...

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def data_notes(self) -> tuple[str, ...]:
        """What a person should know of the data before the first step."""
        ...

    def fingerprint(self) -> str:
        """The same for the same training data."""
        ...

    def check(self) -> None:
        """Says what is wrong with data and settings together, before anything is written."""
        ...

    def save_assets(self, folder: Path) -> None:
        """Puts what the model needs beside it into the run's folder: its tokenisers."""
        ...

    def batches_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, AnyBatch]]:
        """Batches for ever, each with the place behind it."""
        ...

    def collate(self, batch: Any, step: int) -> Any:
        """What the model takes, on the host; called from any thread."""
        ...

    def losses(self, model: AnyModel, inputs: Any) -> tuple[LossSum, ...]:
        """One of each kind."""
        ...

    def model(self) -> AnyModel:
        """The model before its first step."""
        ...

    def evaluate(self, model: AnyModel) -> dict[str, float]: ...

    def sample_outputs(self, model: AnyModel) -> list[str]:
        """What the model now says of texts that it was not trained on."""
        ...


class LossModule(nn.Module):
    """A model with its losses as one module: what DDP wraps has to be called as a whole."""

    def __init__(self, model: AnyModel, workload: Workload):
        super().__init__()
        self.model = model
        self._workload = workload

    def forward(self, inputs: Any) -> tuple[LossSum, ...]:
        return self._workload.losses(self.model, inputs)


def build_workload(recipe: Recipe, folder: Path) -> Workload:
    """Reads what a recipe names."""
    from qkv.train.workloads import finetuning, pretraining, seq2seq

    if isinstance(recipe, Seq2SeqRecipe):
        return seq2seq.build_seq2seq_workload(recipe, folder)
    if recipe.train.scheduled_sampling or recipe.train.rdrop_alpha:
        raise InputError("train.scheduled_sampling and train.rdrop_alpha go with pairs; leave them out here")
    if isinstance(recipe, FinetuneRecipe):
        return finetuning.build_finetune_workload(recipe, folder)
    return pretraining.build_pretraining_workload(recipe, folder)
