"""A family's Hugging Face form, as data: its config.json both ways, its classes, its weight rules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

from torch import Tensor

from qkv import spec
from qkv.errors import InputError, nearest
from qkv.weights.rules import Rule

Config = dict[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


@dataclass(frozen=True)
class Setting:
    """One value: its key in config.json, the field of the family's Shape (or keyword of its `spec`), its place."""

    key: str
    field: str
    place: str  # in the spec, dotted
    values: Mapping[Any, Any] | None = None  # theirs -> ours, where they are named differently
    only: tuple[str, ...] = ()  # the heads whose spec can say it; none named: all


@dataclass(frozen=True)
class Architecture:
    """What a class of theirs is: our name of its head, and whether its body's names stand without the prefix."""

    head: str
    bare: bool = False


@dataclass(frozen=True)
class Only:
    """Rules that hold only where the spec has this value in this place: their names depend on it."""

    place: str  # dotted
    value: Any
    rules: tuple[Rule, ...]


def _as_it_is(config: Config) -> Config:
    return config


def _says_nothing(config: Config, _: Mapping[str, Tensor]) -> Config:
    return config


@dataclass(frozen=True, kw_only=True)
class Format:
    model_type: str
    prefix: str  # of the body's names in a model with a head; rules are written with it
    architectures: Mapping[str, Architecture]
    settings: tuple[Setting, ...]
    body: tuple[Rule, ...]
    heads: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)  # by our name of the head
    untied: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)  # the same where the head has its own weight
    only: tuple[Only, ...] = ()  # beside the body's
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what we have no other value of
    look: Callable[[Config, Mapping[str, Tensor]], Config] = _says_nothing  # what their tensors say and no config does
    read: Callable[[Config], Config] = _as_it_is  # where their values are not ours one by one
    write: Callable[[Config], Config] = _as_it_is

    def rules(self, head: str, model: spec.Model) -> tuple[Rule, ...]:
        """Everything that a model under this head is filled from."""
        own = self.heads.get(head, ())
        if head in self.untied and model.head is not None and not model.head.tied:
            own = self.untied[head]
        return (*self.body, *own, *self._only(lambda case: bool(_at(model, case.place) == case.value)))

    def every_rule(self) -> tuple[Rule, ...]:
        """Also those of the other heads: what may stand in a checkpoint of this family."""
        heads = (rule for table in (self.heads, self.untied) for own in table.values() for rule in own)
        return (*self.body, *heads, *self._only(lambda _: True))

    def _only(self, holds: Callable[[Only], bool]) -> tuple[Rule, ...]:
        return tuple(rule for case in self.only if holds(case) for rule in case.rules)


def read_config(family: ModuleType, config: Config, where: str, head: str, labels: tuple[str, ...]) -> spec.Model:
    """The spec that a config.json describes, under a head; a value that we do not know is refused by name."""
    form: Format = family.HUGGING_FACE
    config = form.read(dict(config))
    for key, value in form.fixed.items():
        if config.get(key, value) not in (value, None):
            raise InputError(f"{where}: {key} is {config[key]!r}; of {form.model_type} qkv has {value!r} only")
    for key, refused in _ELSEWHERE.items():
        if config.get(key) and refused(config[key]):
            raise InputError(f"{where}: {key} is {config[key]!r}, which qkv does not compute")
    values: dict[str, Any] = {}
    defaults = _defaults(family)
    for setting in form.settings:
        if config.get(setting.key) is not None:
            values[setting.field] = _ours(setting, config[setting.key], where)
            _check_kind(setting, values[setting.field], defaults[setting.field], where)
    return _used(_made(family, values, head, labels), config)


# what any family's config may say that changes the mathematics and that no family here has
_ELSEWHERE: dict[str, Callable[[Any], bool]] = {
    "quantization_config": lambda _: True,
    "pruned_heads": lambda _: True,
}


def _defaults(family: ModuleType) -> dict[str, Any]:
    keywords = {name: p.default for name, p in inspect.signature(family.spec).parameters.items()}
    return keywords | {f.name: f.default for f in fields(family.Shape)}


def _made(family: ModuleType, values: dict[str, Any], head: str, labels: tuple[str, ...]) -> spec.Model:
    in_shape = {f.name for f in fields(family.Shape)}
    shape = family.Shape(**{name: value for name, value in values.items() if name in in_shape})
    others = {name: value for name, value in values.items() if name not in in_shape}
    made: spec.Model = family.spec(shape, head=head, labels=labels, **others)
    return made


def _ours(setting: Setting, value: Any, where: str) -> Any:
    if setting.values is None:
        return value
    known = [str(name) for name in setting.values]
    if not isinstance(value, str | int | bool) or value not in setting.values:
        raise InputError(f"{where}: {setting.key} '{value}' is unknown; {nearest(str(value), known)}")
    return setting.values[value]


def _check_kind(setting: Setting, value: Any, default: Any, where: str) -> None:
    if default is None or default is inspect.Parameter.empty:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = number if isinstance(default, float) else type(value) is type(default)
    if fits and (isinstance(default, float) or setting.field in _COUNTS):
        fits = value > 0 if setting.field in _COUNTS else value >= 0
    if not fits:
        raise InputError(f"{where}: {setting.key} cannot be {value!r}")


_COUNTS = ("width", "heads", "layers", "hidden", "length", "source", "target", "image", "patch", "channels")


def write_config(family: ModuleType, model: spec.Model) -> tuple[Config, str]:
    """The config.json of a spec, and their class for its head. What the table cannot say again is refused."""
    form: Format = family.HUGGING_FACE
    labels = model.head.labels if model.head is not None else ()
    plain = model if model.head is None else replace(model, head=replace(model.head, several=False, word="first"))
    for name, architecture in form.architectures.items():
        # a body may stand under their class that has a pooler, which it is read without where its weights are not there
        head = "body" if model.head is None and architecture.head == "pooler" else architecture.head
        config, values = _said(form, model, head)
        if _made(family, values, head, labels) == plain:
            return _named(form.write(config | dict(form.fixed)), form, name, labels) | _use(model), name
    raise InputError(f"this model is no plain {form.model_type} any more; Hugging Face has no form for it")


_PROBLEM, _SEVERAL = "problem_type", "multi_label_classification"
_WORD = "qkv_word"  # a key of ours: their models leave it to whoever uses them


def _used(model: spec.Model, config: Config) -> spec.Model:
    """With what a config says of the use of the head's logits, which is no part of the mathematics."""
    head = model.head
    if head is not None and head.kind == "sequence" and config.get(_PROBLEM) == _SEVERAL:
        return replace(model, head=replace(head, several=True))
    if head is not None and head.kind == "token" and config.get(_WORD) == "mean":
        return replace(model, head=replace(head, word="mean"))
    return model


def _use(model: spec.Model) -> Config:
    """The inverse of `_used`."""
    if model.head is not None and model.head.several:
        return {_PROBLEM: _SEVERAL}
    return {_WORD: "mean"} if model.head is not None and model.head.word == "mean" else {}


def _said(form: Format, model: spec.Model, head: str) -> tuple[Config, dict[str, Any]]:
    """Their keys and our fields with what the spec has in those places."""
    config: Config = {}
    values: dict[str, Any] = {}
    for setting in form.settings:
        value = _at(model, setting.place)
        if value is not None and (not setting.only or head in setting.only):
            values[setting.field] = value
            config[setting.key] = value if setting.values is None else _theirs(setting, value)
    return config, values


def _at(model: spec.Model, place: str) -> Any:
    found: Any = model
    for name in place.split("."):
        found = getattr(found, name, None)
    return found


def _theirs(setting: Setting, value: Any) -> Any:
    assert setting.values is not None
    for theirs, ours in setting.values.items():
        if ours == value:
            return theirs
    raise InputError(f"{setting.field} {value!r} has no name in Hugging Face's {setting.key}")


def _named(config: Config, form: Format, architecture: str, labels: tuple[str, ...]) -> Config:
    named: Config = {"architectures": [architecture], "model_type": form.model_type, "dtype": "float32"} | config
    if labels:  # else theirs are two
        named["id2label"] = {str(number): label for number, label in enumerate(labels)}
        named["label2id"] = {label: number for number, label in enumerate(labels)}
    return named


def read_labels(config: Config) -> tuple[str, ...]:
    """The names of a classifier's outputs; two where a config says nothing."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        if sorted(named, key=str) != sorted(map(str, range(len(named)))):
            raise InputError(f"config.json: id2label should number its labels 0 to {len(named) - 1}")
        return tuple(str(named[str(number)]) for number in range(len(named)))
    count = config.get("num_labels", config.get("_num_labels", 2))
    return tuple(f"LABEL_{number}" for number in range(count if isinstance(count, int) else 2))
