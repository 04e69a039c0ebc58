"""A recipe made of a task's name, a file and a model: what `qkv train --task … --data … --from …` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv.data.examples import Choice, Labelled, Pictured, Question, Tagged
from qkv.data.tasks import has_parts, read, settings_of
from qkv.data.tasks.lines import ending
from qkv.data.tasks.table import ENDINGS
from qkv.errors import InputError
from qkv.tasks.task import find
from qkv.train.recipe import apply, from_plain, shape
from qkv.train.sections import TaskRecipe
from qkv.train.task_data import read_part, texts
from qkv.weights import load

_WORDS = dict.fromkeys((".conll", ".bio", ".iob", ".txt", ".tsv", ".annotated"), "conll") | {".conllu": "conllu"}
_LISTS = (".jsonl", ".ndjson", ".json")
# the format of a file by what a task's examples are and by how its name ends
_FORMATS: dict[type, dict[str, str]] = {
    Labelled: dict(ENDINGS),
    Tagged: _WORDS | dict.fromkeys(_LISTS, "words"),
    Question: {".json": "squad", ".jsonl": "questions", ".ndjson": "questions"},
    Choice: dict.fromkeys(ENDINGS, "choices"),
    Pictured: dict.fromkeys(ENDINGS, "images"),
}
_IDX = "idx3-ubyte"  # how MNIST's files of pictures are called, behind a dash or a dot, packed or not
_SMALL = 20_000_000  # parameters under which a model stands a larger rate
_SEEN = 60_000  # examples that a run should see: small sets come again, up to so often
_EPOCHS = (3, 20)
_BATCH, _STEPS = 2048, 10  # tokens a step at most, and steps that an epoch should have
_FRAME = 64  # more than any template adds
_PICTURES = 64  # a step at most


def made(
    task: str,
    data: str,
    start: str | None,
    changes: Sequence[str] = (),
    *,
    valid: str | None = None,
    format: str | None = None,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """A recipe as a person would write it: sensible values for a set and a model of this size, `changes` on top."""
    about: dict[str, Any] = {"format": format or _format(task, Path(data)), "train": data}
    taken = settings_of(about["format"])
    named = dict(columns or {}) | ({"number": True} if task == "rate" and "number" in taken else {})
    about |= ({"columns": named} if named else {}) | ({"skip_bad": True} if skip_bad else {})
    about |= {"valid": valid} if valid is not None else _held_out(about)
    raw: dict[str, Any] = {"name": f"{task}-{Path(data).name.partition('.')[0]}", "task": {"name": task}}
    raw |= {"model": {} if start is None else {"from": start}, "data": about, "train": {}, "valid": {"patience": 3}}
    apply(raw, changes)
    raw["train"] = _defaults(raw) | raw["train"]
    if "steps" in raw["train"]:
        del raw["train"]["epochs"]
    return raw


def _format(task: str, data: Path) -> str:
    kind: type = find(task).example
    known = _FORMATS[kind]
    if kind is Pictured and (data.is_dir() or _IDX in data.name):
        return "idx" if _IDX in data.name or any(data.glob(f"*{_IDX}*")) else "images"
    if data.is_dir():
        raise InputError(f"{data}: is a folder; say how its files are written, --format (see docs/tasks.md)")
    if ending(data) not in known:
        if not data.exists():
            raise InputError(f"{data}: no such file or folder; check the path")
        names = ", ".join(dict.fromkeys(known.values()))
        raise InputError(f"{data}: its name does not tell how it is written; give --format, for {task} one of {names}")
    return known[ending(data)]


def _held_out(about: Mapping[str, Any]) -> dict[str, Any]:
    """A tenth of the examples, unless they came in a folder with a validation part of its own."""
    if has_parts(about["format"], about["train"]):
        try:
            read(about["format"], about["train"], part="dev", columns=about.get("columns"), skip_bad=True)
        except InputError:
            return {"hold_out": {"valid": 0.1}}
        return {}
    return {"hold_out": {"valid": 0.1}}


def _picture_tokens(pictures: int, side: int) -> int:
    """Tokens a step of pictures, each of so many patches a side and one for the whole."""
    return min(_PICTURES, max(1, pictures // _STEPS)) * (side**2 + 1)


def batch_tokens(train: Sequence[Any]) -> int:
    """Tokens a step: so many that a small set makes some steps an epoch, and never fewer than its longest example has.

    By characters, of which a token has four or so and at the very least one, before any tokeniser is asked.
    """
    sizes = [sum(map(len, texts([one]))) for one in train]
    most = max(sizes, default=0) + _FRAME
    return _BATCH if most > _BATCH else min(_BATCH, max(most, sum(sizes) // (4 * _STEPS)))


def _defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    recipe = from_plain(dict(raw) | {"train": {"steps": 1}}, "the command line")
    assert isinstance(recipe, TaskRecipe)
    train = read_part(recipe.data, "train")
    examples = len(train)
    start = recipe.model.get("from")
    model = None if start is None else load(str(start)).model
    size = 0 if model is None else sum(p.numel() for p in model.parameters())
    seen = shape(recipe) if model is None else model.spec.source
    sees = isinstance(train[0], Pictured) and hasattr(seen, "patch")  # if not, that is said when it is trained
    rate = 3e-4 if size < _SMALL else 5e-5
    return {
        "epochs": min(max(round(_SEEN / max(1, examples)), _EPOCHS[0]), _EPOCHS[1]),
        "batch_tokens": _picture_tokens(examples, seen.image // seen.patch) if sees else batch_tokens(train),
        "learning_rate": rate * (10 if recipe.tune.frozen else 1),  # what is few and fresh has a longer way to go
        "betas": [0.9, 0.999],
        "epsilon": 1e-8,
        "weight_decay": 0.01,
        "schedule": "linear",
        "warmup": 0.1,
        "clip": 1.0,
    }
