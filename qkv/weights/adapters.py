"""Models with adapters as files: what was trained lies apart from the model that it sits on.

A run's folder then holds `adapter.safetensors` (the adapters and the head) in place of all weights, and
`adapter.json`: the name of the base model, and a digest of its body, so that no other one is taken for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from qkv import spec
from qkv.errors import InputError
from qkv.files import write_text
from qkv.nn.model import altered, beside_body, hollow
from qkv.weights.file import load_tensors
from qkv.weights.folder import ADAPTER, AnyModel, Loaded, fill, load, state
from qkv.weights.huggingface import read_json

NOTES = "adapter.json"


def kept(model: AnyModel) -> dict[str, Tensor]:
    """What a run keeps of its model: all of it, or, where adapters sit on a base, what the base does not hold."""
    found = state(model)
    return found if model.spec.adapters is None else {n: t for n, t in found.items() if beside_body(n)}


def put(model: AnyModel, tensors: Mapping[str, Tensor], where: str) -> None:
    """The inverse of `kept`, into parameters that somebody already holds."""
    there = () if model.spec.adapters is None else [name for name in state(model) if not beside_body(name)]
    fill(model, tensors, where, assign=False, fresh=there)


def digest(model: AnyModel) -> str:
    """The same for the same body, whatever the head and whichever the file format."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(state(model).items()):
        if not beside_body(name):
            found.update(f"{name}{list(tensor.shape)}".encode())
            found.update(tensor.detach().float().contiguous().cpu().numpy().data)
    return found.hexdigest()


def write_notes(folder: Path, base: str, body: str) -> None:
    """Says which model a run's adapters sit on; `body` is its digest."""
    write_text(folder / NOTES, json.dumps({"base": base, "digest": body}, indent=2) + "\n")


def check_notes(folder: Path, base: str, body: str) -> None:
    """A run goes on from the model that it was begun on."""
    if (folder / NOTES).is_file() and _notes(folder)[1] != body:
        raise InputError(f"{folder}: was begun on another model than '{base}' is now; choose another --output")


def whole(folder: Path, s: spec.Model) -> dict[str, Tensor]:
    """All tensors of a run's model: its base's, and its own."""
    name, body = _notes(folder)
    kind = None if s.head is None else s.head.kind
    try:
        with torch.random.fork_rng(devices=[]):  # a head is drawn that is then replaced
            base = load(name, head=kind, labels=None if s.head is None else s.head.labels).model
    except InputError as error:
        said = f"its adapters sit on '{name}', which cannot be loaded ({error})"
        raise InputError(f"{folder}: {said}; bring it back, or write where it lies into {NOTES}") from None
    if digest(base) != body:
        said = f"its adapters were trained on another model than '{name}' is now"
        raise InputError(f"{folder}: {said}; bring that one back, or write where it lies into {NOTES}")
    tensors, _ = load_tensors(folder / ADAPTER)
    return {n: t.detach() for n, t in state(base).items() if not beside_body(n)} | tensors


def _notes(folder: Path) -> tuple[str, str]:
    found = read_json(folder / NOTES)
    if not all(isinstance(found.get(key), str) for key in ("base", "digest")):
        raise InputError(f"{folder / NOTES}: does not name a base and its digest; restore it, or train again")
    return found["base"], found["digest"]


def merged(loaded: Loaded) -> Loaded:
    """The same model as plain matrices, which need no base."""
    if loaded.model.spec.adapters is None:
        raise InputError("this model has no adapters to merge; leave that out")
    model = hollow(loaded.model.spec)
    fill(model, {n: t.detach() for n, t in state(loaded.model).items()}, "the model with adapters", assign=True)
    altered(model, model.spec.read, None)
    return replace(loaded, model=model.eval())
