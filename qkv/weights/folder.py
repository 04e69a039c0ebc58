"""A model as a folder: spec.json, model.safetensors and its tokenisers beside them, or a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from qkv import families, spec
from qkv.data.images import PREPROCESSOR, Images
from qkv.errors import InputError
from qkv.files import write_text
from qkv.nn import Decoder, Encoder, EncoderDecoder
from qkv.nn.model import altered, hollow, initialise
from qkv.text.huggingface import read_tokenisers, write_tokenisers
from qkv.text.tokeniser import Tokeniser
from qkv.weights.file import load_tensors, save_tensors
from qkv.weights.hub import resolve
from qkv.weights.huggingface import (
    CONFIG,
    Read,
    config_text,
    in_their_words,
    is_checkpoint,
    read_checkpoint,
    understood,
    write_checkpoint,
)

AnyModel = Encoder | Decoder | EncoderDecoder
Layout = Literal["qkv", "huggingface"]

SPEC, WEIGHTS = "spec.json", "model.safetensors"
ADAPTER = "adapter.safetensors"  # in place of all weights, where a run trained adapters; see `qkv.weights.adapters`
SOURCE, TARGET = "source.tokenizer.json", "target.tokenizer.json"


@dataclass(frozen=True)
class Loaded:
    """A model with what turns text into its ids and back, where its folder has that."""

    model: AnyModel
    source: Tokeniser | None = None
    target: Tokeniser | None = None
    images: Images | None = None  # how a picture is prepared, for a model that looks at pictures
    fresh: tuple[str, ...] = ()  # parameters that the checkpoint did not hold: drawn at random, to be trained
    unused: tuple[str, ...] = ()  # tensors of the checkpoint that this model has no place for, such as another head's


def state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers, each once: of tied names the first."""
    return {name: tensor for name, (first, tensor) in _names(model).items() if name == first}


def _names(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Every name with the first name of its tensor."""
    firsts: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: (firsts.setdefault(id(tensor), name), tensor) for name, tensor in tensors.items()}


def fill(
    model: AnyModel, tensors: Mapping[str, Tensor], where: str, *, assign: bool, fresh: Collection[str] = ()
) -> None:
    """Puts tensors into a model: each name exactly once, each of the shape that the model has.

    `assign` makes them the model's own; otherwise they are copied into parameters that somebody already holds. `fresh`
    names need not be there.
    """
    wanted = state(model)
    for name in wanted:
        if name not in tensors and name not in fresh:
            raise InputError(f"{where}: lacks '{name}', which this model has; is it another model's checkpoint?")
    for name, tensor in tensors.items():
        if name not in wanted:
            raise InputError(f"{where}: holds '{name}', which this model lacks; is it another model's checkpoint?")
        if not tensor.is_floating_point():
            raise InputError(f"{where}: '{name}' holds {tensor.dtype}; qkv reads weights in floating point only")
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


def save(loaded: Loaded, folder: str | Path, format: Layout = "qkv") -> None:
    """Writes a model folder that `load` reads; as `huggingface` one that transformers reads too."""
    folder, model = Path(folder), loaded.model
    if format not in ("qkv", "huggingface"):
        raise InputError(f"format: a model is saved as 'qkv' or 'huggingface', not '{format}'")
    _check_free(folder, model.spec, format)
    if loaded.images is not None:
        loaded.images.save(folder / PREPROCESSOR)
    if format == "huggingface":
        write_checkpoint(folder, model.spec, state(model))
        if loaded.source is not None and loaded.target is not None:
            embed = spec.entrance(model.spec)
            counted = isinstance(embed, spec.Embed) and embed.position != "none"
            write_tokenisers(folder, loaded.source, loaded.target, embed.length if counted else None)
        return
    write_text(folder / SPEC, spec.to_json(model.spec))
    if loaded.source is not None:
        loaded.source.save(folder / SOURCE)
    if loaded.target is not None and loaded.target is not loaded.source:  # one that serves both sides is written once
        loaded.target.save(folder / TARGET)
    save_tensors(folder / WEIGHTS, state(model))


def _check_free(folder: Path, s: spec.Model, format: Layout) -> None:
    """Files of another model beside this one's would be read with it: only the same model is written over."""
    taken = (folder / SPEC).is_file() or is_checkpoint(folder)
    same = format == "qkv" and (folder / SPEC).is_file() and _same(folder / SPEC, s)
    if format == "huggingface" and is_checkpoint(folder) and not (folder / SPEC).is_file():
        same = not list(folder.glob("*.index.json")) and config_text(s) == (folder / CONFIG).read_text("utf-8")
    if taken and not same:
        raise InputError(f"{folder}: holds another model; choose another folder, or remove that one first")


def _same(path: Path, s: spec.Model) -> bool:
    """Whether a file says what a spec is; one that an older release wrote may say it in other words."""
    try:
        return spec.from_json(path.read_text("utf-8"), str(path)) == s
    except (InputError, UnicodeDecodeError):
        return False


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
) -> Loaded:
    """Reads a model folder of ours or of Hugging Face's, or a name in its cache; the model is in evaluation mode.

    `head` puts another head on the body: `sequence`, `token`, `span` and so on, with `labels` as the names of its
    outputs. `fresh` of what comes back says which parameters were not in the checkpoint.
    """
    folder = resolve(folder)
    if not (folder / SPEC).is_file() and is_checkpoint(folder):
        return _load_checkpoint(folder, device, head, labels)
    return _load_own(folder, device, head, labels)


def _load_checkpoint(
    folder: Path, device: str | torch.device, head: str | None, labels: Sequence[str] | None
) -> Loaded:
    found = read_checkpoint(folder, head, labels)
    model, fresh, unused = _filled(found, str(folder), head)
    template = getattr(families.family(found.spec.family), "TEMPLATE", None)
    source, target = read_tokenisers(folder, template, families.templates()) or (None, None)
    images = Images.load(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else None
    loaded = Loaded(model.to(device).eval(), source, target, images, fresh, unused)
    _check_vocabularies(loaded, folder)
    return loaded


def _filled(found: Read, where: str, head: str | None) -> tuple[AnyModel, tuple[str, ...], tuple[str, ...]]:
    """A checkpoint's model, what of it is fresh, and what of the checkpoint has no place in it."""
    model = hollow(found.spec)
    names = _names(model)
    tensors = _without_copies(found.tensors, names, where)
    unused = found.unused
    if head is not None:  # the body serves another purpose: what this one has no place for is left, and said
        unused += tuple(name for name in tensors if name not in names)
        tensors = {name: tensor for name, tensor in tensors.items() if name in names}
    wanted = {name for name, (first, _) in names.items() if name == first}
    missing = [name for name in wanted if name not in tensors]
    fresh = tuple(sorted(n for n in missing if head is not None and n.split(".")[0] in ("head", "beside")))
    fill(model, tensors, where, assign=True, fresh=fresh)
    _draw(model, fresh)
    return model, fresh, unused


def _without_copies(
    tensors: Mapping[str, Tensor], names: Mapping[str, tuple[str, Tensor]], where: str
) -> dict[str, Tensor]:
    """Without second names of what is one tensor in the model; a copy that differs is refused."""
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        first = names[name][0] if name in names else name
        if first != name and first in tensors:
            if not torch.equal(tensor, tensors[first]):
                raise InputError(f"{where}: '{name}' and '{first}' are one tensor in this model, and differ there")
            continue
        kept[first] = tensor
    return kept


def _draw(model: AnyModel, fresh: Collection[str]) -> None:
    """Gives parameters that no checkpoint held memory of their own and a random beginning."""
    # each once and in the order of their names: a seed then draws the same
    modules = list({model.get_submodule(name.rpartition(".")[0]): None for name in fresh})
    for module in list(modules):
        held = [name for name, p in module.named_parameters(recurse=False) if not p.is_meta]
        if held == ["weight"] and isinstance(module, nn.Linear):  # the embedding's, under a language model's head
            module.bias = nn.Parameter(torch.zeros(module.out_features))
            modules.remove(module)
            continue
        if held:
            raise InputError(f"the checkpoint holds '{held[0]}' of {type(module).__name__} and lacks the rest of it")
        module.to_empty(device="cpu", recurse=False)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        for _, buffer in module.named_buffers(recurse=False):
            nn.init.zeros_(buffer)
    initialise(model.spec, modules)
    model.tie()


def _load_own(folder: Path, device: str | torch.device, head: str | None, labels: Sequence[str] | None) -> Loaded:
    s = _own_spec(folder)
    if not finished(folder) and (folder / "last.safetensors").is_file():
        raise InputError(f"{folder}: training has not finished; run the same qkv train again to resume it")
    model: AnyModel = hollow(s)
    fresh: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    file = ADAPTER if (folder / ADAPTER).is_file() else WEIGHTS
    fill(model, _own_tensors(folder, s), str(folder / file), assign=True)
    if head is not None or labels is not None:  # by way of Hugging Face's names, which tell heads' layers apart
        alone = s.head is None or s.head.joined == 1
        altered(model, "last", None)
        plain = {name: tensor.detach() for name, tensor in state(model).items()}
        found = understood(*in_their_words(model.spec, plain), str(folder), head, labels)
        if not alone:  # one that read several layers has nothing for a head that reads the last
            found = found._replace(tensors={n: t for n, t in found.tensors.items() if not n.startswith("head.")})
        model, fresh, unused = _filled(found, str(folder), head)
    source = Tokeniser.load(folder / SOURCE) if (folder / SOURCE).is_file() else None
    target = Tokeniser.load(folder / TARGET) if (folder / TARGET).is_file() else source
    images = Images.load(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else None
    loaded = Loaded(model.to(device).eval(), source, target, images, fresh, unused)
    _check_vocabularies(loaded, folder)
    return loaded


def finished(folder: Path) -> bool:
    """Whether a run there has come to its end."""
    return (folder / WEIGHTS).is_file() or (folder / ADAPTER).is_file()


def _own_tensors(folder: Path, s: spec.Model) -> dict[str, Tensor]:
    if not (folder / ADAPTER).is_file():
        return load_tensors(folder / WEIGHTS)[0]
    from qkv.weights.adapters import whole

    return whole(folder, s)


def _own_spec(folder: Path) -> spec.Model:
    path = folder / SPEC
    if not path.is_file():
        raise InputError(f"{folder}: not a model folder (it has neither {SPEC} nor config.json)")
    try:
        s = spec.from_json(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text; is this a model folder?") from None
    embed, marks = s.target, (s.start, s.end)
    # a decoder alone begins with a prompt, and there may be no token that ends it
    if embed is not None and s.encoder is not None and not all(0 <= t < embed.vocabulary for t in marks):
        raise InputError(f"{path}: start or end is no token of the target's {embed.vocabulary}")
    return s


def _check_vocabularies(loaded: Loaded, folder: Path) -> None:
    """A tokeniser of ours has a row for each token; a foreign embedding may have more rows than tokens."""
    s = loaded.model.spec
    for tokeniser, embed, name in ((loaded.source, s.source, SOURCE), (loaded.target, s.target, TARGET)):
        if tokeniser is None or not isinstance(embed, spec.Embed):
            continue
        if tokeniser.size > embed.vocabulary or (tokeniser.ours and tokeniser.size < embed.vocabulary):
            sizes = f"has {tokeniser.size} tokens, the model {embed.vocabulary}"
            where = folder / name if (folder / name).is_file() else f"{folder}: the tokeniser"
            raise InputError(f"{where}: {sizes}; they do not belong together")
