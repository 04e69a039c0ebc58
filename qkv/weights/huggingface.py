"""Hugging Face checkpoint folders, in and out: config.json, weights in one file or in shards, their names and ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from qkv import families, spec
from qkv.errors import InputError, nearest
from qkv.files import write_text
from qkv.weights.file import load_pickle, load_tensors, save_tensors
from qkv.weights.format import Config, Format, read_config, read_labels, write_config
from qkv.weights.rules import Copy, Drop, Moving, Rule, Tie, inward, outward, rule_for

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FILES = (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_OLD = {"gamma": "weight", "beta": "bias"}  # how checkpoints that came from TensorFlow name a norm's parameters


class Read(NamedTuple):
    """A checkpoint as we see it: our spec, tensors under our names, and the keys of other heads that were left."""

    spec: spec.Model
    tensors: dict[str, Tensor]
    unused: tuple[str, ...]


def is_checkpoint(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_checkpoint(folder: Path, head: str | None = None, labels: Sequence[str] | None = None) -> Read:
    """Reads a folder under the head that its `architectures` entry names, or under another one."""
    config = read_json(folder / CONFIG)
    families.of_model_type(str(config.get("model_type")), str(folder / CONFIG))  # before its weights are looked for
    return understood(config, read_weights(folder), str(folder), head, labels)


def understood(
    config: Config,
    raw: Mapping[str, Tensor],
    folder: str,
    head: str | None = None,
    labels: Sequence[str] | None = None,
) -> Read:
    """A config and tensors under their names, as one of our families under a head."""
    where = str(Path(folder) / CONFIG)
    family = families.of_model_type(str(config.get("model_type")), where)
    form: Format = family.HUGGING_FACE
    named = head or _own_head(form, config, where)
    outputs = tuple(labels) if labels else read_labels(config)
    config = form.look(config, raw)
    made = read_config(family, config, where, named, outputs)
    tensors = _under_one_name(form, raw, form.rules(named, made))
    if head is None and named == "pooler" and not any(rule_for(form.heads["pooler"], key) for key in tensors):
        named, made = "body", read_config(family, config, where, "body", outputs)
    mine, others = form.rules(named, made), form.every_rule()
    kept = {key: tensor for key, tensor in tensors.items() if rule_for(mine, key) or not rule_for(others, key)}
    unused = tuple(key for key in tensors if key not in kept)
    ours = inward(mine, kept, folder)
    if head is not None and _for_another_task(form, config, made, named, outputs):
        taken = [key for key in kept if _names(mine, key) & {"head.linear.weight", "head.linear.bias"}]
        ours = {name: tensor for name, tensor in ours.items() if not name.startswith("head.linear.")}
        unused += tuple(taken)
    return Read(made, ours, unused)


def _for_another_task(form: Format, config: Config, made: spec.Model, head: str, labels: Sequence[str]) -> bool:
    """Whether the file's last layer was trained for other outputs than those that are asked for."""
    if made.head is None or made.head.kind not in ("sequence", "token", "span", "choice"):
        return False
    own = form.architectures.get(_named(form, config)[0])
    return own is None or own.head != head or (bool(made.head.labels) and len(labels) != len(read_labels(config)))


def _names(rules: Sequence[Rule], key: str) -> set[str]:
    rule, places = rule_for(rules, key) or (Drop(key), {})
    return {name.format(**places) for name in rule.names} if isinstance(rule, Moving) else set()


def write_checkpoint(folder: Path, model: spec.Model, tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and model.safetensors as transformers reads them."""
    config, theirs = in_their_words(model, tensors)
    write_text(folder / CONFIG, _text(config))
    save_tensors(folder / WEIGHTS, theirs, {"format": "pt"})


def in_their_words(model: spec.Model, tensors: Mapping[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
    """A model's config and its tensors under their names."""
    if model.adapters is not None:
        raise InputError("this model has adapters, which Hugging Face's format lacks; merge them (qkv export --merge)")
    if model.read != "last":
        said = "and Hugging Face has no form for that; save it as 'qkv' (qkv import does)"
        raise InputError(f"this model's head reads {model.read} of its layers, {said}")
    family = _with_a_form(model)
    form: Format = family.HUGGING_FACE
    config, name = write_config(family, model)
    architecture = form.architectures[name]
    theirs = outward(form.rules(architecture.head, model), tensors)
    if architecture.bare:
        theirs = {key.removeprefix(form.prefix): tensor for key, tensor in theirs.items()}
    return config, theirs


def config_text(model: spec.Model) -> str:
    """What config.json says of a model."""
    return _text(write_config(_with_a_form(model), model)[0])


def _text(config: Config) -> str:
    return json.dumps(config, indent=2) + "\n"


def _with_a_form(model: spec.Model) -> ModuleType:
    family = families.family(model.family)
    if not hasattr(family, "HUGGING_FACE"):
        raise InputError(f"the family '{model.family}' has no Hugging Face form; save it as 'qkv' (qkv import does)")
    return family


def head_names(family: ModuleType) -> list[str]:
    """The heads that a family has, in the order of its table."""
    form: Format = family.HUGGING_FACE
    return list(dict.fromkeys(architecture.head for architecture in form.architectures.values()))


def read_json(path: Path) -> Config:
    """An object out of a JSON file; anything else is refused by name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); is this a checkpoint folder?") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise InputError(f"{path}: not JSON; restore it from where the checkpoint came from") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds no JSON object; restore it from where the checkpoint came from")
    return found


def _own_head(form: Format, config: Config, where: str) -> str:
    named = _named(form, config)
    if len(named) != 1 or named[0] not in form.architectures:
        raise InputError(f"{where}: architectures says '{named[0]}'; {nearest(named[0], form.architectures)}")
    return form.architectures[named[0]].head


def _named(form: Format, config: Config) -> list[str]:
    """Their classes that a config.json names; where it names none, the family's body."""
    bodies = [name for name, a in form.architectures.items() if a.head in ("pooler", "body")]
    named = config.get("architectures") or bodies
    return [str(name) for name in named] if isinstance(named, list) else [str(named)]


def _under_one_name(form: Format, tensors: Mapping[str, Tensor], mine: Sequence[Rule]) -> dict[str, Tensor]:
    """Their keys as the rules spell them: with the body's prefix, in today's words, the first of tied names there."""
    rules = (*mine, *form.every_rule())
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        stem, dot, last = key.rpartition(".")
        today = f"{stem}{dot}{_OLD.get(last, last)}"
        spelled = [today, form.prefix + today]
        name = next((name for name in spelled if rule_for(rules, name)), key)
        if name in named:
            raise InputError(f"the checkpoint holds '{name}' under two names; nothing was loaded")
        named[name] = tensor
    for key in list(named):
        rule, places = rule_for(rules, key) or (Drop(key), {})
        if isinstance(rule, Tie | Copy) and rule.same.format(**places) not in named:
            named[rule.same.format(**places)] = named.pop(key)
    return named


# ---- files ----------------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, mapped rather than read where the file is a safetensors one."""
    found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if found is None:
        raise InputError(f"{folder}: has no weights ({WEIGHTS}, its shards, or pytorch_model.bin)")
    if found.suffix != ".json":
        return _read_file(found)
    tensors: dict[str, Tensor] = {}
    for shard, names in _shards(found).items():
        part = _read_file(found.parent / shard) if (found.parent / shard).is_file() else None
        if part is None:
            raise InputError(f"{found.parent / shard}: this shard is missing; {found.name} names it")
        for name in names:
            if name not in part:
                raise InputError(f"{found.parent / shard}: lacks '{name}', which {found.name} says it holds")
        tensors |= part
    return tensors


def _shards(index: Path) -> dict[str, list[str]]:
    mapped: Any = read_json(index).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise InputError(f"{index}: has no weight_map; restore it from where the checkpoint came from")
    shards: dict[str, list[str]] = {}
    for name, shard in mapped.items():
        if Path(str(shard)).name != shard:
            raise InputError(f"{index}: '{shard}' is no file beside it")
        shards.setdefault(shard, []).append(name)
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    return load_pickle(path) if path.suffix == ".bin" else load_tensors(path)[0]
