"""Workloads: what the trainer trains. The training loop uses data and losses only through this interface.

A workload is registered under the recipe key that selects it: `objective` for pretraining, `task` for fine-tuning; a
recipe with neither learns from pairs. A further workload is a class with the methods of `Workload` and a `recipe_class`
whose `key` is the name that it is registered under.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import nn

from qkv import spec
from qkv.checkpoints.state import AnyModel
from qkv.data.batching import DataPosition
from qkv.errors import InputError
from qkv.nn.memory import Memory
from qkv.objectives.loss import LossSum
from qkv.recipe.schema import RECIPE_CLASSES, BaseRecipe, Recipe
from qkv.registry import Registry

if TYPE_CHECKING:
    from qkv.train.cost_inputs import CostInputs


class AnyBatch(Protocol):
    """A batch of examples that can be split into micro-batches."""

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        ...

    def split(self, num_microbatches: int) -> list[Any]:
        """Split into at most `num_microbatches` batches of about equal token count."""
        ...


class Workload(Protocol):
    """The data of a run, with its losses and its validation.

    `collate` turns a micro-batch into model inputs: a named tuple with `num_targets`, the number of targets per loss.
    A workload whose model carries memory from batch to batch has an attribute `carries_memory` that is True, inputs
    with a field `segments`, and `losses_with_memory(model, inputs, memory)`, which returns losses and memory.
    """

    recipe_class: ClassVar[type[BaseRecipe]]
    """Schema of the recipes of this workload."""

    @classmethod
    def build(cls, recipe: Any, folder: Path, data: Any = None) -> Workload:
        """Read the data that a recipe names and load or configure its model.

        Args:
            recipe: an instance of `recipe_class`.
            folder: the run folder, whose tokenizer is used if a run is resumed.
            data: the recipe's data if it was already read; None: it is read now.
        """
        ...

    @classmethod
    def cost_inputs(
        cls, recipe: Any, folder: Path, model_spec: spec.Model | None, vocab_sizes: tuple[int, int] | None
    ) -> CostInputs:
        """Return the model and the sequence lengths for `qkv.cost`.

        Args:
            recipe: the recipe of a run, or of a new model.
            folder: the run folder; for a new model, the recipe file.
            model_spec: the model of a run; None for a new model.
            vocab_sizes: source and target vocabulary sizes of a new model; None: as in the data.
        """
        ...

    @classmethod
    def fold_recipes(cls, recipe: Any, count: int) -> list[Any]:
        """Return the recipes of a cross-validation with `count` folds, or refuse it."""
        ...

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the settings that were inferred from the training data."""
        ...

    @property
    def spec(self) -> spec.Model:
        """The model's spec."""
        ...

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses, whose means are added up."""
        ...

    @property
    def metric(self) -> str:
        """Validation metric that selects the best checkpoint."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Direction of `metric`."""
        ...

    @property
    def data_notes(self) -> tuple[str, ...]:
        """Lines about the data for the user, shown before the first step."""
        ...

    def fingerprint(self) -> str:
        """Return a digest of the training data, by which a resumed run recognizes other data."""
        ...

    def check(self) -> None:
        """Refuse data and settings that do not fit each other, before anything is written."""
        ...

    def save_assets(self, folder: Path) -> None:
        """Write the files that the model needs besides its weights, such as tokenizers, to the run folder."""
        ...

    def steps_per_epoch(self) -> int:
        """Return the number of batches in which all training examples are seen once."""
        ...

    def batches_from(self, epoch: int, batch_index: int) -> Iterator[tuple[DataPosition, AnyBatch]]:
        """Yield batches without end from a position of the data, each with the position after it."""
        ...

    def collate(self, batch: Any, step: int) -> Any:
        """Return the model inputs of a micro-batch, on the host; several threads may call this."""
        ...

    def losses(self, model: AnyModel, inputs: Any) -> tuple[LossSum, ...]:
        """Return the losses, in the order of `loss_names`."""
        ...

    def model(self) -> AnyModel:
        """Return the model before its first step."""
        ...

    def evaluate(self, model: AnyModel) -> dict[str, float]:
        """Return the metrics of a model in eval mode on the validation data; `metric` is among them."""
        ...

    def sample_outputs(self, model: AnyModel) -> list[str]:
        """Return lines with outputs of the model for some validation inputs."""
        ...


class _WorkloadRegistry(Registry[type[Workload]]):
    """Workload classes by recipe key; registering one also makes its recipe class known to the parser."""

    def register(self, name: str, entry: Any = None) -> Any:
        """Add a workload class under a new recipe key: `register("key", cls)`, or as a decorator."""
        if entry is None:
            return lambda decorated: self.register(name, decorated)
        recipe_type = getattr(entry, "recipe_class", None)
        if not (isinstance(recipe_type, type) and issubclass(recipe_type, BaseRecipe) and recipe_type.key == name):
            raise InputError(f"workload '{name}': recipe_class must be a subclass of BaseRecipe with key = '{name}'")
        super().register(name, entry)
        RECIPE_CLASSES[name] = recipe_type
        return entry


WORKLOADS: Registry[type[Workload]] = _WorkloadRegistry(
    "workload",
    {
        "objective": "qkv.train.workloads.pretraining:PretrainingWorkload",
        "task": "qkv.train.workloads.finetuning:FinetuneWorkload",
        "": "qkv.train.workloads.seq2seq:Seq2SeqWorkload",
    },
)


def workload_class(recipe: BaseRecipe) -> type[Workload]:
    """Return the workload class of a recipe."""
    return WORKLOADS.get(recipe.key)


def refuse_folds() -> InputError:
    """Return the error of workloads without cross-validation."""
    return InputError("--num-folds goes with tasks; use --num-seeds for this recipe")


class LossModule(nn.Module):
    """A model with its losses as one module, because DDP wraps what is called as a whole."""

    def __init__(self, model: AnyModel, workload: Workload) -> None:
        super().__init__()
        self.model = model
        self._workload = workload

    def forward(self, inputs: Any, memory: Memory | None = None) -> Any:
        """Return the losses of a micro-batch; with the memory of its streams, the losses and the memory after it."""
        if memory is None:
            return self._workload.losses(self.model, inputs)
        workload: Any = self._workload  # one that carries memory
        return workload.losses_with_memory(self.model, inputs, memory)
