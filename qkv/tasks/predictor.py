"""The one path from a model and inputs to predictions, for every kind of model.

predictor = Predictor.load("runs/sentiment")
for prediction in predictor(["a fine film", "dull"]):
    print(prediction.text, prediction.score)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qkv import spec
from qkv.checkpoints import ModelBundle, load
from qkv.checkpoints.inputs import describe_input
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig, validate
from qkv.recipe import RECIPE_FILE, Recipe, read_run_recipe
from qkv.recipe.schema import FinetuneRecipe, Seq2SeqRecipe
from qkv.tasks.base import TASKS, PredictionTask
from qkv.tasks.predictions import TaskPrediction

_TASK_OF_HEAD = {
    "span": "question_answering",
    "choice": "multiple_choice",
    "next_sentence": "next_sentence",
    "pooler": "embedding",
}


class Predictor:
    """Predictions of one model. It changes no state of the model, so several threads may share it."""

    def __init__(
        self,
        bundle: ModelBundle,
        task: PredictionTask[Any] | None = None,
        config: GenerationConfig | None = None,
        prefix: str = "",
    ) -> None:
        """Make a predictor for a model in eval mode, as `qkv.load` returns it.

        Args:
            bundle: the model with its tokenizers or image processor.
            task: the task; by default that of the model's run, or the task of its head with default settings.
            config: how texts are generated; by default as the recipe of the model's run tests it, or greedily. Other
                tasks use its `n_best` and `batch_tokens` only.
            prefix: text before each source of a generation task.
        """
        self.bundle = bundle
        self.task = (task or task_of_bundle(bundle)).with_generation(config, prefix)
        self._config = config or GenerationConfig()
        validate(self._config)

    @classmethod
    def load(cls, path: str | Path, device: str | None = None, config: GenerationConfig | None = None) -> Predictor:
        """Load a run, a checkpoint folder or a name in the Hugging Face cache, on the GPU if there is one.

        A run predicts by the task and the settings of its recipe; any other model by the task of its head.
        """
        recipe_file = Path(path) / RECIPE_FILE
        recipe = read_run_recipe(recipe_file) if recipe_file.is_file() else None  # first: it names missing extensions
        bundle = load(path, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        task = None if recipe is None else task_of_recipe(recipe) or task_of_model(bundle.model.spec)
        return cls(bundle, task, config)

    def with_settings(self, **settings: Any) -> Predictor:
        """Return a predictor with other settings of its task, such as `threshold` or `num_beams`; None keeps one."""
        changes = {name: value for name, value in settings.items() if value is not None}
        return Predictor(self.bundle, self.task.with_settings(changes)) if changes else self

    def __call__(
        self,
        inputs: Sequence[Any],
        n_best: int | None = None,
        locations: Sequence[str] | None = None,
        first_index: int = 0,
    ) -> list[TaskPrediction]:
        """Predict for each input, in input order.

        Args:
            inputs: texts; tuples of texts, such as a question and its context; image files; or examples of the task.
                A text is parsed like a line of `qkv predict`: tabs separate the texts of one example.
            n_best: how many alternatives each prediction lists; by default the config's.
            locations: names of the inputs in error messages; by default their first characters.
            first_index: number of the first input in the whole stream, which seeds sampling.
        """
        if isinstance(inputs, str):
            raise InputError("inputs are a list of texts; put the text into a list")
        if n_best is not None and n_best < 1:
            raise InputError(f"n_best must be at least 1, not {n_best}")
        if self.bundle.model.training:
            raise InputError("the model is in training mode; call model.eval() before predicting")
        names = locations or [describe_input(value) for value in inputs]
        examples = [self.task.parse_input(value, name) for value, name in zip(inputs, names, strict=True)]
        if not examples:
            return []
        n_best = self._config.n_best if n_best is None else n_best
        return self.task.predict(
            self.bundle, examples, n_best=n_best, max_tokens=self._config.batch_tokens, first_index=first_index
        )


def predict(
    model: ModelBundle | str | Path, inputs: Sequence[Any], config: GenerationConfig | None = None
) -> list[TaskPrediction]:
    """Predict for each input with a loaded model, or with the run or checkpoint at a path. See `Predictor`."""
    predictor = (
        Predictor(model, config=config) if isinstance(model, ModelBundle) else Predictor.load(model, config=config)
    )
    return predictor(inputs)


def task_of_bundle(bundle: ModelBundle) -> PredictionTask[Any]:
    """Return the task of the run that a model was loaded from, or the task of its head with default settings."""
    recipe_file = None if bundle.folder is None else bundle.folder / RECIPE_FILE
    if recipe_file is not None and recipe_file.is_file():
        task = task_of_recipe(read_run_recipe(recipe_file))
        if task is not None:
            return task
    return task_of_model(bundle.model.spec)


def task_of_recipe(recipe: Recipe) -> PredictionTask[Any] | None:
    """Return the task that a run was trained for; None for pretraining."""
    if isinstance(recipe, FinetuneRecipe):
        from qkv.tasks.recipe_task import make_task

        return make_task(recipe)
    if isinstance(recipe, Seq2SeqRecipe):
        from qkv.tasks.generation import Generation

        return Generation.from_recipe(recipe)
    return None


def task_of_model(model_spec: spec.Model) -> PredictionTask[Any]:
    """Return the task of a model's head with default settings; without a head, embedding."""
    head = model_spec.head
    if head is None:
        return _make("embedding")
    if head.kind == "lm":
        return _make("fill_mask" if model_spec.decoder is None else "generation")
    if head.kind == "token":
        return _make("token_classification", {"subword_pooling": head.subword_pooling})
    if head.kind != "sequence":
        return _make(_TASK_OF_HEAD[head.kind])
    if isinstance(model_spec.source_embedding, spec.PatchEmbedding):
        return _make("image_classification")
    if head.multi_label:
        return _make("multi_label")
    return _make("regression" if head.num_outputs == 1 else "text_classification")


def _make(name: str, settings: Mapping[str, Any] | None = None) -> PredictionTask[Any]:
    task: PredictionTask[Any] = TASKS.get(name)(**(settings or {}))
    return task
