"""The registry of pretraining objectives. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkv.errors import InputError
from qkv.recipe.objectives import OBJECTIVE_CONFIGS, ObjectiveConfig
from qkv.registry import Registry

if TYPE_CHECKING:
    from qkv.objectives.base import Objective


class _ObjectiveRegistry(Registry["type[Objective[Any]]"]):
    """Objective classes by name; registering one also makes its config class known to recipes."""

    def register(self, name: str, entry: Any = None) -> Any:
        """Add an objective class under a new name: `register("name", cls)`, or as a decorator `@register("name")`."""
        if entry is None:
            return lambda decorated: self.register(name, decorated)
        config_class = getattr(entry, "config_class", None)
        if not (isinstance(config_class, type) and issubclass(config_class, ObjectiveConfig)):
            raise InputError(
                f"objective '{name}': config_class must be a subclass of qkv.recipe.objectives.ObjectiveConfig"
            )
        super().register(name, entry)
        OBJECTIVE_CONFIGS.register(name, config_class)
        if "name" not in vars(entry):
            entry.name = name
        return entry


OBJECTIVES: Registry[type[Objective[Any]]] = _ObjectiveRegistry(
    "objective",
    {
        "clm": "qkv.objectives.clm:CausalLM",
        "mlm": "qkv.objectives.mlm:MaskedLM",
        "plm": "qkv.objectives.plm:PermutationLM",
        "bilm": "qkv.objectives.bilm:BidirectionalLM",
        "denoising": "qkv.objectives.denoising:Denoising",
        "span_corruption": "qkv.objectives.span_corruption:SpanCorruption",
        "skipgram": "qkv.objectives.word2vec:SkipGram",
        "cbow": "qkv.objectives.word2vec:CBOW",
    },
)
