"""A recipe made of a task's name, a file and a model: what `qkv train --task … --data … --init-from …` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.checkpoints import load
from qkv.data.examples import ImageExample, MultipleChoiceExample, QAExample, TaggedExample, TextExample
from qkv.data.formats import has_splits, read, reader_options
from qkv.data.formats.io import file_suffix
from qkv.data.formats.table import SUFFIXES
from qkv.errors import InputError
from qkv.recipe.parse import apply_overrides, model_config, parse_recipe
from qkv.recipe.schema import FinetuneRecipe
from qkv.recipe.task_names import resolve_task_name
from qkv.tasks.base import get_task
from qkv.train.workloads.task_data import iter_texts, read_split

_CONLL_SUFFIXES = dict.fromkeys((".conll", ".bio", ".iob", ".txt", ".tsv", ".annotated"), "conll") | {".conllu": "conllu"}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# the format of a file by what a task's examples are and by how its name ends
_FORMAT_BY_SUFFIX: dict[type, dict[str, str]] = {
    TextExample: dict(SUFFIXES),
    TaggedExample: _CONLL_SUFFIXES | dict.fromkeys(_JSON_SUFFIXES, "words"),
    QAExample: {".json": "squad", ".jsonl": "questions", ".ndjson": "questions"},
    MultipleChoiceExample: dict.fromkeys(SUFFIXES, "choices"),
    ImageExample: dict.fromkeys(SUFFIXES, "images"),
}
_IDX_MARKER = "idx3-ubyte"  # how MNIST's files of pictures are called, behind a dash or a dot, packed or not
_SMALL_MODEL = 20_000_000  # parameters under which a model stands a larger rate
_EXAMPLES_TO_SEE = 60_000  # examples that a run should see: small sets come again, up to so often
_EPOCH_RANGE = (3, 20)
_MAX_BATCH_TOKENS, _MIN_STEPS_PER_EPOCH = 2048, 10  # tokens a step at most, and steps that an epoch should have
_TEMPLATE_ROOM = 64  # more than any template adds
_IMAGES_PER_BATCH = 64  # a step at most


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
) -> dict[str, Any]:
    """A recipe as a person would write it: sensible values for a set and a model of this size, `overrides` on top."""
    task = resolve_task_name(task)
    data_section: dict[str, Any] = {"format": format or _infer_format(task, Path(data)), "train": data}
    known_options = reader_options(data_section["format"])
    column_options = dict(columns or {}) | ({"regression": True} if task == "regression" and "regression" in known_options else {})
    data_section |= ({"columns": column_options} if column_options else {}) | ({"skip_bad": True} if skip_bad else {})
    data_section |= {"valid": valid} if valid is not None else _default_hold_out(data_section)
    raw: dict[str, Any] = {"name": f"{task}-{Path(data).name.partition('.')[0]}", "task": {"name": task}}
    raw |= {"model": {} if init_from is None else {"init_from": init_from}, "data": data_section, "train": {}, "validation": {"patience": 3}}
    apply_overrides(raw, overrides)
    raw["train"] = _train_defaults(raw) | raw["train"]
    if "max_steps" in raw["train"]:
        del raw["train"]["epochs"]
    return raw


def _infer_format(task: str, data: Path) -> str:
    example_type: type = get_task(task).example_type
    formats = _FORMAT_BY_SUFFIX[example_type]
    if example_type is ImageExample and (data.is_dir() or _IDX_MARKER in data.name):
        return "idx" if _IDX_MARKER in data.name or any(data.glob(f"*{_IDX_MARKER}*")) else "images"
    if data.is_dir():
        raise InputError(f"{data}: is a folder; say how its files are written, --format (see docs/tasks.md)")
    if file_suffix(data) not in formats:
        if not data.exists():
            raise InputError(f"{data}: no such file or folder; check the path")
        names = ", ".join(dict.fromkeys(formats.values()))
        raise InputError(f"{data}: its name does not tell how it is written; give --format, for {task} one of {names}")
    return formats[file_suffix(data)]


def _default_hold_out(data_section: Mapping[str, Any]) -> dict[str, Any]:
    """A tenth of the examples, unless they came in a folder with a validation part of its own."""
    if has_splits(data_section["format"], data_section["train"]):
        try:
            read(data_section["format"], data_section["train"], split="dev", columns=data_section.get("columns"), skip_bad=True)
        except InputError:
            return {"hold_out": {"valid": 0.1}}
        return {}
    return {"hold_out": {"valid": 0.1}}


def _image_batch_tokens(num_images: int, patches_per_side: int) -> int:
    """Tokens a step of pictures, each of so many patches a side and one for the whole."""
    return min(_IMAGES_PER_BATCH, max(1, num_images // _MIN_STEPS_PER_EPOCH)) * (patches_per_side**2 + 1)


def default_batch_tokens(examples: Sequence[Any]) -> int:
    """Tokens a step: so many that a small set makes some steps an epoch, and never fewer than its longest example has.

    By characters, of which a token has four or so and at the very least one, before any tokeniser is asked.
    """
    lengths = [sum(map(len, iter_texts([example]))) for example in examples]
    max_length = max(lengths, default=0) + _TEMPLATE_ROOM
    return _MAX_BATCH_TOKENS if max_length > _MAX_BATCH_TOKENS else min(_MAX_BATCH_TOKENS, max(max_length, sum(lengths) // (4 * _MIN_STEPS_PER_EPOCH)))


def _train_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    recipe = parse_recipe(dict(raw) | {"train": {"max_steps": 1}}, "the command line")
    assert isinstance(recipe, FinetuneRecipe)
    train_examples = read_split(recipe.data, "train")
    num_examples = len(train_examples)
    init_from = recipe.model.get("init_from")
    model = None if init_from is None else load(str(init_from)).model
    num_parameters = 0 if model is None else sum(p.numel() for p in model.parameters())
    input_shape = model_config(recipe) if model is None else model.spec.source_embedding
    is_image_task = isinstance(train_examples[0], ImageExample) and hasattr(input_shape, "patch_size")  # if not, that is said when it is trained
    learning_rate = 3e-4 if num_parameters < _SMALL_MODEL else 5e-5
    return {
        "epochs": min(max(round(_EXAMPLES_TO_SEE / max(1, num_examples)), _EPOCH_RANGE[0]), _EPOCH_RANGE[1]),
        "batch_tokens": _image_batch_tokens(num_examples, input_shape.image_size // input_shape.patch_size) if is_image_task else default_batch_tokens(train_examples),
        "learning_rate": learning_rate * (10 if recipe.finetune.backbone_frozen else 1),  # what is few and fresh has a longer way to go
        "betas": [0.9, 0.999],
        "adam_epsilon": 1e-8,
        "weight_decay": 0.01,
        "schedule": "linear",
        "warmup_ratio": 0.1,
        "max_grad_norm": 1.0,
    }
