"""What a training loop works on: batches, their losses, a score. The loop knows no more than this of data and model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from qkv import spec
from qkv.data.batches import Place
from qkv.errors import InputError
from qkv.objectives.term import Term
from qkv.train.sections import AnyRecipe, PairRecipe, TaskRecipe
from qkv.weights.folder import AnyModel


class AnyBatch(Protocol):
    """Examples, packed."""

    @property
    def tokens(self) -> int:
        """Real ones."""
        ...

    def split(self, parts: int) -> list[Any]: ...


class Work(Protocol):
    """Pairs, text or a task. A part of a batch is what `prepare` makes: a named tuple with its number of `targets`."""

    @property
    def recipe(self) -> AnyRecipe:
        """As it is written down: with what the training data decided."""
        ...

    @property
    def spec(self) -> spec.Model: ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the losses, which are added up."""
        ...

    @property
    def metric(self) -> str:
        """The score that decides."""
        ...

    @property
    def more_is_better(self) -> bool: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the data before the first step."""
        ...

    def digest(self) -> str:
        """The same for the same training data."""
        ...

    def check(self) -> None:
        """Says what is wrong with data and settings together, before anything is written."""
        ...

    def write_down(self, folder: Path) -> None:
        """Puts what the model needs beside it into the run's folder: its tokenisers."""
        ...

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, AnyBatch]]:
        """Batches for ever, each with the place behind it."""
        ...

    def prepare(self, part: Any, step: int) -> Any:
        """What the model takes, on the host; called from any thread."""
        ...

    def losses(self, model: AnyModel, part: Any) -> tuple[Term, ...]:
        """One of each kind."""
        ...

    def model(self) -> AnyModel:
        """The model before its first step."""
        ...

    def score(self, model: AnyModel) -> dict[str, float]: ...

    def say(self, model: AnyModel) -> list[str]:
        """What the model now says of texts that it was not trained on."""
        ...


class Judge(nn.Module):
    """A model with its losses as one module: what DDP wraps has to be called as a whole."""

    def __init__(self, model: AnyModel, work: Work):
        super().__init__()
        self.model = model
        self._work = work

    def forward(self, part: Any) -> tuple[Term, ...]:
        return self._work.losses(self.model, part)


def prepare(recipe: AnyRecipe, folder: Path) -> Work:
    """Reads what a recipe names."""
    from qkv.train import pairs, pretraining, tuning

    if isinstance(recipe, PairRecipe):
        return pairs.prepare(recipe, folder)
    if recipe.train.own or recipe.train.agree:
        raise InputError("train.own and train.agree go with pairs; leave them out here")
    if isinstance(recipe, TaskRecipe):
        return tuning.prepare(recipe, folder)
    return pretraining.prepare(recipe, folder)
