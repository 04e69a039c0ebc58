"""Make a fine-tuning recipe from a task, a file and a model, for `qkv train --task … --data … --init-from …`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qkv import spec
from qkv.checkpoints.model_folder import read_spec
from qkv.data.examples import Examples, ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.formats import FORMATS, has_splits, read_files, reader_options
from qkv.data.formats.io import file_suffix
from qkv.data.formats.table import SUFFIXES
from qkv.errors import InputError
from qkv.nn.model import build_on_meta
from qkv.recipe.parse import apply_overrides, model_config, parse_recipe
from qkv.recipe.schema import FinetuneRecipe
from qkv.recipe.task_names import resolve_task_name
from qkv.tasks.base import get_task
from qkv.train.workloads.task_data import iter_texts, read_splits

_CONLL_SUFFIXES = dict.fromkeys((".conll", ".bio", ".iob", ".txt", ".tsv", ".annotated"), "conll")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# format of a file by the class of a task's examples and the suffix of the file name
_FORMAT_BY_SUFFIX: dict[type, dict[str, str]] = {
    TextExample: dict(SUFFIXES),
    TaggedExample: _CONLL_SUFFIXES | {".conllu": "conllu"} | dict.fromkeys(_JSON_SUFFIXES, "words"),
    QAExample: {".json": "squad", ".jsonl": "questions", ".ndjson": "questions"},
    MultipleChoiceExample: dict.fromkeys(SUFFIXES, "choices"),
    ImageExample: dict.fromkeys(SUFFIXES, "images"),
}
_IDX_MARKER = "idx3-ubyte"  # in the names of MNIST's image files
_HELD_OUT_FRACTION = 0.1
_SMALL_MODEL = 20_000_000  # parameters below which a model is trained with a larger learning rate
_EXAMPLES_TO_SEE = 60_000  # examples that a run should see; small datasets get more epochs, within _EPOCH_RANGE
_EPOCH_RANGE = (3, 20)
_MAX_BATCH_TOKENS, _MIN_STEPS_PER_EPOCH = 2048, 10
_TEMPLATE_ROOM = 64  # more tokens than any template adds
_IMAGES_PER_BATCH = 64


class AutoRecipe(NamedTuple):
    """A recipe as a mapping, and the data that was read to make it."""

    raw: dict[str, Any]
    data: dict[str, Examples[Any]]  # the splits "train" and "valid", for `qkv.fit(…, data=…)`


def make_recipe(
    task: str,
    data: str,
    init_from: str | None,
    overrides: Sequence[str] = (),
    *,
    valid: str | None = None,
    format: str | None = None,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> AutoRecipe:
    """Make a recipe with settings that fit the size of the dataset and of the model.

    Args:
        task: name or alias of a task.
        data: training file or folder.
        init_from: pretrained model; None: `overrides` describe a new one.
        overrides: `key=value` changes, which take precedence.
        valid: validation file; None: the folder's validation split, or a tenth of the examples.
        format: format of the files; None: inferred from the file name.
        columns: names of the columns and other options of the format.
        skip_bad: skip examples that cannot be read.
    """
    task = resolve_task_name(task)
    data_section: dict[str, Any] = {"format": format or _infer_format(task, Path(data)), "train": data}
    column_options = dict(columns or {})
    if task == "regression" and "regression" in reader_options(data_section["format"]):
        column_options["regression"] = True
    data_section |= ({"columns": column_options} if column_options else {}) | ({"skip_bad": True} if skip_bad else {})
    data_section |= {} if valid is None else {"valid": valid}
    raw: dict[str, Any] = {"name": f"{task}-{Path(data).name.partition('.')[0]}", "task": {"name": task}}
    raw["model"] = {} if init_from is None else {"init_from": init_from}
    raw |= {"data": data_section, "train": {}, "validation": {"patience": 3}}
    apply_overrides(raw, overrides)
    examples = _read_examples(raw)
    raw["train"] = _train_defaults(_parse(raw), examples["train"]) | raw["train"]
    for override, default in {"max_steps": "epochs", "warmup_steps": "warmup_ratio"}.items():
        if override in raw["train"]:
            del raw["train"][default]
    return AutoRecipe(raw, examples)


def _parse(raw: Mapping[str, Any]) -> FinetuneRecipe:
    """Parse a recipe whose section `train` is not complete yet."""
    recipe = parse_recipe(dict(raw) | {"train": {"max_steps": 1}}, "the command line")
    assert isinstance(recipe, FinetuneRecipe)  # it has a task
    return recipe


def _infer_format(task: str, data: Path) -> str:
    example_type: type = get_task(task).example_type
    by_suffix = _FORMAT_BY_SUFFIX.get(example_type, {})
    if example_type is ImageExample and (data.is_dir() or _IDX_MARKER in data.name):
        return "idx" if _IDX_MARKER in data.name or any(data.glob(f"*{_IDX_MARKER}*")) else "images"
    if data.is_dir():
        raise InputError(f"{data}: is a folder; give the format of its files, --format (see docs/tasks.md)")
    if file_suffix(data) in by_suffix:
        return by_suffix[file_suffix(data)]
    if not data.exists():
        raise InputError(f"{data}: no such file or folder; check the path")
    registered = [name for name in FORMATS.names() if FORMATS.get(name).example_type is example_type]
    names = ", ".join(dict.fromkeys(by_suffix.values())) or ", ".join(registered)
    raise InputError(f"{data}: the format is not clear from the file name; give --format, for {task} one of {names}")


def _read_examples(raw: dict[str, Any]) -> dict[str, Examples[Any]]:
    """Read the training and validation examples; if there is no validation split, a tenth is held out."""
    recipe, section = _parse(raw), raw["data"]
    if section.get("valid") is None and section.get("fold") is None and "valid" not in section.get("hold_out", {}):
        if all(has_splits(recipe.data.format, path) for path in _as_list(recipe.data.train)):
            try:
                return read_splits(recipe.data, ("valid", "train"))
            except InputError:
                if _has_valid_split(recipe):
                    raise
        section["hold_out"] = section.get("hold_out", {}) | {"valid": _HELD_OUT_FRACTION}
    return read_splits(_parse(raw).data, ("train", "valid"))


def _has_valid_split(recipe: FinetuneRecipe) -> bool:
    """Return whether a folder has a validation split, possibly with records that cannot be read."""
    data = recipe.data
    try:
        read_files(data.format, data.train, split="dev", columns=data.columns, skip_bad=True)
    except InputError:
        return False
    return True


def _as_list(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else paths


def _image_batch_tokens(num_images: int, num_patches: int) -> int:
    """Return the tokens per step of images with this many patches and one further token each."""
    return min(_IMAGES_PER_BATCH, max(1, num_images // _MIN_STEPS_PER_EPOCH)) * (num_patches + 1)


def default_batch_tokens(examples: Sequence[Any]) -> int:
    """Return the tokens per step: enough for the longest example, few enough for several steps per epoch.

    Tokens are estimated from characters, before there is a tokenizer: about four per token, and at least one.
    """
    lengths = [sum(map(len, iter_texts([example]))) for example in examples]
    max_length = max(lengths, default=0) + _TEMPLATE_ROOM
    if max_length > _MAX_BATCH_TOKENS:
        return _MAX_BATCH_TOKENS
    return min(_MAX_BATCH_TOKENS, max(max_length, sum(lengths) // (4 * _MIN_STEPS_PER_EPOCH)))


def _train_defaults(recipe: FinetuneRecipe, train_examples: Sequence[Any]) -> dict[str, Any]:
    num_examples, num_parameters = len(train_examples), 0
    init_from = recipe.model.get("init_from")
    if init_from is None:
        input_config = model_config(recipe)
    else:
        model_spec = read_spec(str(init_from))
        input_config = model_spec.source_embedding
        num_parameters = sum(p.numel() for p in build_on_meta(model_spec).parameters())
    batch_tokens = default_batch_tokens(train_examples)
    # another kind of model is refused when the run starts
    if get_task(recipe.task["name"]).modality == "image" and _reads_images(input_config):
        batch_tokens = _image_batch_tokens(num_examples, (input_config.image_size // input_config.patch_size) ** 2)
    learning_rate = 3e-4 if num_parameters < _SMALL_MODEL else 5e-5
    return {
        "epochs": min(max(round(_EXAMPLES_TO_SEE / max(1, num_examples)), _EPOCH_RANGE[0]), _EPOCH_RANGE[1]),
        "batch_tokens": batch_tokens,
        # the few, newly initialized parameters of a head need larger updates
        "learning_rate": learning_rate * (10 if recipe.finetune.backbone_frozen else 1),
        "betas": [0.9, 0.999],
        "adam_epsilon": 1e-8,
        "weight_decay": 0.01,
        "schedule": "linear",
        "warmup_ratio": 0.1,
        "max_grad_norm": 1.0,
    }


def _reads_images(input_config: Any) -> bool:
    return isinstance(input_config, spec.PatchEmbedding) or hasattr(input_config, "patch_size")
