"""A model as a folder: spec.json, model.safetensors, and its tokenisers beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from qkv import spec
from qkv.errors import InputError
from qkv.files import write_text
from qkv.nn import Decoder, Encoder, EncoderDecoder, build
from qkv.nn.position import Sinusoid
from qkv.text.tokeniser import Tokeniser
from qkv.weights.file import load_tensors, save_tensors

AnyModel = Encoder | Decoder | EncoderDecoder

SPEC, WEIGHTS = "spec.json", "model.safetensors"
SOURCE, TARGET = "source.tokenizer.json", "target.tokenizer.json"


class Loaded(NamedTuple):
    """A model with what turns text into its ids and back."""

    model: AnyModel
    source: Tokeniser
    target: Tokeniser


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers, each once: of tied names the first."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            found[name] = tensor
            seen.add(id(tensor))
    return found


def fill(model: AnyModel, tensors: Mapping[str, Tensor], where: str, *, assign: bool) -> None:
    """Puts tensors into a model: each name exactly once, each of the shape that the model has.

    `assign` makes them the model's own; otherwise they are copied into parameters that somebody already holds.
    """
    wanted = state(model)
    for name in wanted:
        if name not in tensors:
            raise InputError(f"{where}: lacks '{name}', which this model has; is it another model's checkpoint?")
    for name, tensor in tensors.items():
        if name not in wanted:
            raise InputError(f"{where}: holds '{name}', which this model lacks; is it another model's checkpoint?")
        if tensor.shape != wanted[name].shape:
            there, here = list(tensor.shape), list(wanted[name].shape)
            raise InputError(
                f"{where}: '{name}' is {there} there and {here} in this model; they do not belong together"
            )
    # a checkpoint in half or double precision becomes what the model computes in
    same = {name: tensor.to(wanted[name].dtype) for name, tensor in tensors.items()}
    model.load_state_dict(same, strict=False, assign=assign)
    if assign:
        model.tie()


def hollow(s: spec.Model) -> AnyModel:
    """A model with shapes and no memory: nothing is drawn at random only to be thrown away."""
    with torch.device("meta"):
        model = build(s)
    for module in model.modules():
        if isinstance(module, Sinusoid):
            module.fill()
    return model


def save(loaded: Loaded, folder: str | Path) -> None:
    """Writes a model folder that `load` reads."""
    folder = Path(folder)
    write_text(folder / SPEC, spec.to_json(loaded.model.spec))
    loaded.source.save(folder / SOURCE)
    loaded.target.save(folder / TARGET)
    save_tensors(folder / WEIGHTS, state(loaded.model))


def load(folder: str | Path, device: str | torch.device = "cpu") -> Loaded:
    """Reads a model folder; the model is in evaluation mode."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; train a model first (qkv train RECIPE), or check the path")
    path = folder / SPEC
    if not path.is_file():
        raise InputError(f"{folder}: not a model folder (it has no {SPEC})")
    try:
        model = hollow(spec.from_json(path.read_text(encoding="utf-8"), str(path)))
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text; is this a model folder?") from None
    tokens = model.spec.target.vocabulary if model.spec.target is not None else 0
    if model.spec.target is not None and not all(0 <= t < tokens for t in (model.spec.start, model.spec.end)):
        raise InputError(f"{path}: start or end is no token of the target's {tokens}")
    if not (folder / WEIGHTS).is_file() and (folder / "last.safetensors").is_file():
        raise InputError(f"{folder}: training has not finished; run the same qkv train again to resume it")
    tensors, _ = load_tensors(folder / WEIGHTS)
    fill(model, tensors, str(folder / WEIGHTS), assign=True)
    source, target = Tokeniser.load(folder / SOURCE), Tokeniser.load(folder / TARGET)
    for tokeniser, embed, name in ((source, model.spec.source, SOURCE), (target, model.spec.target, TARGET)):
        if embed is not None and tokeniser.size != embed.vocabulary:
            sizes = f"has {tokeniser.size} tokens, the model {embed.vocabulary}"
            raise InputError(f"{folder / name}: {sizes}; they do not belong together")
    return Loaded(model.to(device).eval(), source, target)
