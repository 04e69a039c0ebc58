"""The one path from a model and inputs to predictions, for every kind of model.

predictor = Predictor.load("runs/sentiment")
for prediction in predictor(["a fine film", "dull"]):
    print(prediction.text, prediction.score)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkv import spec
from qkv.checkpoints import ModelBundle, load
from qkv.checkpoints.arguments import as_bundle, as_list, as_texts
from qkv.checkpoints.inputs import check_locations, describe_input
from qkv.errors import InputError, check_number, check_path, check_type
from qkv.generation.config import GenerationConfig, validate
from qkv.generation.ensemble import ensemble_bundle
from qkv.generation.scoring import TextLogProbs, text_log_probs
from qkv.limits import limit
from qkv.nn.device import find_device
from qkv.recipe import RECIPE_FILE, Recipe, read_run_recipe
from qkv.recipe.schema import FinetuneRecipe, Seq2SeqRecipe
from qkv.tasks.base import TASKS, PredictionTask
from qkv.tasks.generation import EncodedTexts, Generation
from qkv.tasks.predictions import TaskPrediction

_TASK_OF_HEAD = {
    "span": "question_answering",
    "choice": "multiple_choice",
    "next_sentence": "next_sentence",
    "pooler": "embedding",
}


class Predictor:
    """Predictions of one model. It changes no state of the model, so several threads may share it.

    predictor = qkv.Predictor.load("runs/sentiment")
    predictor(["a fine film", "dull"])[0].text
    """

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
        check_type(bundle, ModelBundle, "bundle", "a model that qkv.load returns")
        check_type(prefix, str, "prefix", "a text")
        if task is not None:
            check_type(task, PredictionTask, "task", "a task of qkv.tasks")
        if config is not None:
            check_type(config, GenerationConfig, "config", "a qkv.GenerationConfig")
        self.bundle = bundle
        self.task = (task or task_of_bundle(bundle)).with_generation(config, prefix)
        self._config = config or GenerationConfig()
        validate(self._config)

    @classmethod
    def load(
        cls,
        path: str | Path | Sequence[str | Path],
        device: str | None = None,
        config: GenerationConfig | None = None,
    ) -> Predictor:
        """Load a run, a checkpoint folder or a name in the Hugging Face cache, on the GPU if there is one.

        A run predicts by the task and the settings of its recipe; any other model by the task of its head. Several
        models of one vocabulary that generate text are an ensemble, with the settings of the first.
        """
        if isinstance(path, list | tuple):
            return cls.ensemble([cls.load(member, device) for member in path], config, [str(name) for name in path])
        recipe_file = check_path(path, "path", "the path of a run or checkpoint") / RECIPE_FILE
        recipe = read_run_recipe(recipe_file) if recipe_file.is_file() else None  # first: it names missing extensions
        assert isinstance(path, str | Path)  # see `check_path`
        bundle = load(path, find_device(device))
        task = None if recipe is None else task_of_recipe(recipe) or _default_task(bundle)
        return cls(bundle, task, config)

    @classmethod
    def ensemble(
        cls,
        predictors: Sequence[Predictor],
        config: GenerationConfig | None = None,
        names: Sequence[str] | None = None,
    ) -> Predictor:
        """Return predictors that generate text as one, which decodes with all models and the settings of the first."""
        if not predictors:
            raise InputError("model: the list of models is empty; give at least one")
        folders = [str(predictor.bundle.folder or f"model {i}") for i, predictor in enumerate(predictors, 1)]
        bundle = ensemble_bundle([predictor.bundle for predictor in predictors], names or folders)
        return cls(bundle, predictors[0].task, config)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the run that the model was loaded from; None for any other model."""
        return recipe_of_bundle(self.bundle)

    def describe_settings(self, n_best: int = 1) -> str:
        """Return one line with the task and its generation settings that differ from the defaults, and their origin."""
        from qkv.tasks.generation import Generation

        base = task_of_bundle(self.bundle)
        if not isinstance(self.task, Generation) or not isinstance(base, Generation):
            return self.task.name
        origin = "checkpoint" if self.recipe is None else "recipe"
        settings = self.task.describe_settings(base, origin, n_best)
        return f"{self.task.name}: {settings or 'default settings'}"

    def check_used(self, settings: Sequence[str]) -> None:
        """Refuse settings that were chosen for `with_settings` and have no effect on this model."""
        self.task.check_used(settings, self.bundle)

    def with_settings(self, **settings: Any) -> Predictor:
        """Return a predictor with other settings of its task, such as `threshold` or `num_beams`; None keeps one."""
        changes = {name: value for name, value in settings.items() if value is not None}
        if not changes:
            return self
        changed = Predictor(self.bundle, self.task.with_settings(changes))
        of_call = {name: changes[name] for name in ("n_best", "batch_tokens") if name in changes}
        changed._config = replace(self._config, **of_call)
        return changed

    def __call__(
        self,
        inputs: Sequence[Any],
        n_best: int | None = None,
        locations: Sequence[str] | None = None,
        first_index: int = 0,
    ) -> list[TaskPrediction]:
        """Predict for each input, in input order.

        Args:
            inputs: texts; tuples of texts, such as a question and its context; image files; or examples of the task; in
                a list, a pandas Series, an array or any other sequence. A text is parsed like a line of `qkv predict`:
                tabs separate the texts of one example. A single text is a list of one.
            n_best: how many alternatives each prediction lists; by default the config's.
            locations: names of the inputs in error messages; by default their first characters.
            first_index: number of the first input in the whole stream, which seeds sampling.
        """
        if n_best is not None:
            check_number(n_best, "n_best", 1, limit("beams"))
        check_number(first_index, "first_index", 0)
        if self.bundle.model.training:
            raise InputError("the model is in training mode; call model.eval() before predicting")
        items = as_list(inputs, "inputs")
        names = check_locations(locations, items)
        examples = [self.task.parse_input(item, name) for item, name in zip(items, names, strict=True)]
        if not examples:
            return []
        n_best = self._config.n_best if n_best is None else n_best
        return self.task.predict(
            self.bundle, examples, n_best=n_best, max_tokens=self._config.batch_tokens, first_index=first_index
        )

    def log_probs(
        self,
        texts: Sequence[Any],
        locations: Sequence[str] | None = None,
        *,
        stride: int | None = None,
        add_bos: bool = False,
    ) -> list[TextLogProbs]:
        """Return the log-probabilities of given texts, in input order.

        Args:
            texts: for a language model texts, or (prompt, continuation) pairs; for an encoder-decoder (source, target)
                pairs. The pair of a prompt and its continuation is one text, of which the continuation is scored.
            locations: names of the texts in error messages; by default their first characters.
            stride: score texts that exceed the model in windows that begin this many tokens after each other.
            add_bos: put BOS before a text of a language model, so that its first token is scored too.
        """
        items = as_texts(texts)
        if self.bundle.model.training:
            raise InputError("the model is in training mode; call model.eval() before predicting")
        names = check_locations(locations, items)
        config, prefix = getattr(self.task, "config", self._config), getattr(self.task, "prefix", "")  # of Generation
        pairs = [
            (prefix + item[0], item[1]) if isinstance(item, tuple) and not item[0].startswith(prefix) else item
            for item in items
        ]
        return text_log_probs(self.bundle, pairs, config, names, stride=stride, add_bos=add_bos) if pairs else []

    def predict_stream(
        self, inputs: Iterable[tuple[Any, str]], n_best: int | None = None
    ) -> Iterator[TaskPrediction | InputError]:
        """Generate for a stream of inputs with their locations, in its order; a bad input gives its error.

        Inputs are read while others are being generated, and few of them are in memory at a time.
        """
        examples = (_parse_or_error(self.task, value, location) for value, location in inputs)
        n_best = self._config.n_best if n_best is None else n_best
        max_tokens = self._config.batch_tokens
        return self._generation().predict_stream(self.bundle, examples, n_best=n_best, max_tokens=max_tokens)

    def stream(self, text: Any, location: str | None = None) -> Iterator[str]:
        """Yield the pieces of the text that is generated for an input, as they are made. See `qkv.stream`."""
        generation = self._generation()
        return generation.stream(self.bundle, generation.parse_input(text, location or describe_input(text)))

    def encode(self, texts: Sequence[str], config: GenerationConfig | None = None) -> EncodedTexts:
        """Let the encoder of an encoder-decoder read texts, for which `decode` can generate any number of times.

        encoded = predictor.encode(["Good morning."])
        greedy = predictor.decode(encoded)
        beams = predictor.decode(encoded, qkv.GenerationConfig(num_beams=4, n_best=4))

        The `dtype` of `config`, by default the predictor's, must be that of `decode`.
        """
        predictor = self if config is None else Predictor(self.bundle, self.task, config)
        generation, items = predictor._generation(), as_list(texts, "texts")
        locations = check_locations(None, items)
        examples = [generation.parse_input(item, name) for item, name in zip(items, locations, strict=True)]
        return generation.encode(self.bundle, examples)

    def decode(self, encoded: EncodedTexts, config: GenerationConfig | None = None) -> list[TaskPrediction]:
        """Generate for encoded texts, by default with the settings of the predictor; see `encode`."""
        check_type(encoded, EncodedTexts, "encoded", "what Predictor.encode returns")
        predictor = self if config is None else Predictor(self.bundle, self.task, config)
        n_best, max_tokens = predictor._config.n_best, predictor._config.batch_tokens
        return predictor._generation().decode(self.bundle, encoded, n_best=n_best, max_tokens=max_tokens)

    def _generation(self) -> Generation:
        """Return the task if it generates text."""
        if self.bundle.model.training:
            raise InputError("the model is in training mode; call model.eval() before predicting")
        if not isinstance(self.task, Generation):
            raise InputError(f"the task '{self.task.name}' generates no text; use predict")
        return self.task


def _parse_or_error(task: PredictionTask[Any], value: Any, location: str) -> Any:
    try:
        return task.parse_input(value, location)
    except InputError as error:
        return error


def predict(
    model: ModelBundle | Predictor | str | Path | Sequence[ModelBundle | Predictor | str | Path],
    inputs: Sequence[Any],
    config: GenerationConfig | None = None,
) -> list[TaskPrediction]:
    """Predict for each input, in input order, with the task of the model.

        for prediction in qkv.predict("runs/sentiment", ["a fine film", "dull"]):
            print(prediction.text, prediction.score)

    Args:
        model: a model that `qkv.load` returns, a predictor, or the path of a run or checkpoint; a list of several that
            generate text is an ensemble.
        inputs: a list, a pandas Series, an array or any other sequence of texts, tuples of texts, or image files; one
            text gives a list of one prediction. See `Predictor`.
        config: how texts are generated; by default as the recipe of the model's run tests it, or greedily.
    """
    if isinstance(model, list | tuple):
        return Predictor.ensemble([_as_predictor(member) for member in model], config)(inputs)
    return _as_predictor(model, config)(inputs)


def stream(
    model: ModelBundle | Predictor | str | Path, text: str, config: GenerationConfig | None = None
) -> Iterator[str]:
    """Yield the pieces of the text that is generated for an input, as they are made.

        for piece in qkv.stream("gpt2", "Once upon a time"):
            print(piece, end="", flush=True)

    The pieces consist of whole characters, and together they are the text of `predict`, which for a continuation begins
    with its prompt. A beam search gives its text at its end.

    Args:
        model: a model that `qkv.load` returns, a predictor, or the path of a run or checkpoint; it generates text.
        text: the source or the prompt.
        config: how the text is generated; by default as the recipe of the model's run tests it, or greedily.
    """
    return _as_predictor(model, config).stream(text)


def _as_predictor(model: Any, config: GenerationConfig | None = None) -> Predictor:
    if isinstance(model, Predictor):
        return model if config is None else Predictor(model.bundle, model.task, config)
    if isinstance(model, str | Path):
        return Predictor.load(model, config=config)
    return Predictor(as_bundle(model), config=config)


def task_of_bundle(bundle: ModelBundle) -> PredictionTask[Any]:
    """Return the task of the run that a model was loaded from, or the task of its head with default settings."""
    recipe = recipe_of_bundle(bundle)
    task = None if recipe is None else task_of_recipe(recipe)
    return _default_task(bundle) if task is None else task


def _default_task(bundle: ModelBundle) -> PredictionTask[Any]:
    """Return the task of a model's head; a model that generates does so with the settings of its checkpoint."""
    task = task_of_model(bundle.model.spec)
    settings = bundle.generation_settings
    return task.with_generation(GenerationConfig(**settings), "") if settings else task


def recipe_of_bundle(bundle: ModelBundle) -> Recipe | None:
    """Return the recipe of the run that a model was loaded from; None for any other model."""
    recipe_file = None if bundle.folder is None else bundle.folder / RECIPE_FILE
    return read_run_recipe(recipe_file) if recipe_file is not None and recipe_file.is_file() else None


def task_of_recipe(recipe: Recipe) -> PredictionTask[Any] | None:
    """Return the task that a run was trained for; None for pretraining."""
    if isinstance(recipe, FinetuneRecipe):
        from qkv.tasks.recipe_task import make_task

        return make_task(recipe)
    if isinstance(recipe, Seq2SeqRecipe):
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
    if spec.input_embedding(model_spec).modality == "image":
        return _make("image_classification")
    if head.multi_label:
        return _make("multi_label")
    return _make("regression" if head.num_outputs == 1 else "text_classification")


def _make(name: str, settings: Mapping[str, Any] | None = None) -> PredictionTask[Any]:
    task: PredictionTask[Any] = TASKS.get(name)(**(settings or {}))
    return task
