"""A model as a folder: spec.json, model.safetensors and its tokenisers beside them, or a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from qkv import families, spec
from qkv.checkpoints.hf_checkpoint import CONFIG_FILE, hf_config_text, is_checkpoint, read_checkpoint, write_checkpoint
from qkv.checkpoints.hub import resolve
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.data.image_processor import PREPROCESSOR, ImageProcessor
from qkv.errors import InputError
from qkv.families.hf.convert import ConvertedCheckpoint, convert_checkpoint, to_hf_checkpoint
from qkv.files import atomic_write_text
from qkv.nn import Decoder, Encoder, EncoderDecoder
from qkv.nn.model import build_on_meta, init_weights, set_features_and_lora
from qkv.tokenization.hf import load_tokenizers, save_tokenizers
from qkv.tokenization.tokenizer import Tokenizer

AnyModel = Encoder | Decoder | EncoderDecoder
CheckpointFormat = Literal["qkv", "huggingface"]

SPEC_FILE, WEIGHTS_FILE = "spec.json", "model.safetensors"
LORA_FILE = "lora.safetensors"  # in place of all weights, where a run trained adapters; see `qkv.checkpoints.lora`
SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE = "source.tokenizer.json", "target.tokenizer.json"


@dataclass(frozen=True)
class ModelBundle:
    """A model with what turns text into its ids and back, where its folder has that."""

    model: AnyModel
    source_tokenizer: Tokenizer | None = None
    target_tokenizer: Tokenizer | None = None
    image_processor: ImageProcessor | None = None  # how a picture is prepared, for a model that looks at pictures
    missing_keys: tuple[str, ...] = ()  # parameters that the checkpoint did not hold: drawn at random, to be trained
    unexpected_keys: tuple[str, ...] = ()  # tensors of the checkpoint that this model has no place for, such as another head's


def unique_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers, each once: of tied names the first."""
    return {name: tensor for name, (canonical, tensor) in _canonical_names(model).items() if name == canonical}


def _canonical_names(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Every name with the first name of its tensor."""
    canonical_by_id: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: (canonical_by_id.setdefault(id(tensor), name), tensor) for name, tensor in tensors.items()}


def load_state(
    model: AnyModel, tensors: Mapping[str, Tensor], location: str, *, assign: bool, allow_missing: Collection[str] = ()
) -> None:
    """Puts tensors into a model: each name exactly once, each of the shape that the model has.

    `assign` makes them the model's own; otherwise they are copied into parameters that somebody already holds. `allow_missing`
    names need not be there.
    """
    expected = unique_state_dict(model)
    for name in expected:
        if name not in tensors and name not in allow_missing:
            raise InputError(f"{location}: lacks '{name}', which this model has; is it another model's checkpoint?")
    for name, tensor in tensors.items():
        if name not in expected:
            raise InputError(f"{location}: holds '{name}', which this model lacks; is it another model's checkpoint?")
        if not tensor.is_floating_point():
            raise InputError(f"{location}: '{name}' holds {tensor.dtype}; qkv reads weights in floating point only")
        if tensor.shape != expected[name].shape:
            found_shape, expected_shape = list(tensor.shape), list(expected[name].shape)
            raise InputError(
                f"{location}: '{name}' is {found_shape} there and {expected_shape} in this model; they do not belong together"
            )
    # a checkpoint in half or double precision becomes what the model computes in
    converted = {name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}
    model.load_state_dict(converted, strict=False, assign=assign)
    if assign:
        model.tie_weights()


def save(bundle: ModelBundle, folder: str | Path, format: CheckpointFormat = "qkv") -> None:
    """Writes a model folder that `load` reads; as `huggingface` one that transformers reads too."""
    folder, model = Path(folder), bundle.model
    if format not in ("qkv", "huggingface"):
        raise InputError(f"format: a model is saved as 'qkv' or 'huggingface', not '{format}'")
    _refuse_overwrite(folder, model.spec, format)
    if bundle.image_processor is not None:
        bundle.image_processor.save(folder / PREPROCESSOR)
    if format == "huggingface":
        write_checkpoint(folder, model.spec, unique_state_dict(model))
        if bundle.source_tokenizer is not None and bundle.target_tokenizer is not None:
            embedding = spec.input_embedding(model.spec)
            has_positions = isinstance(embedding, spec.Embedding) and embedding.position != "none"
            save_tokenizers(folder, bundle.source_tokenizer, bundle.target_tokenizer, embedding.max_length if has_positions else None)
        return
    atomic_write_text(folder / SPEC_FILE, spec.to_json(model.spec))
    if bundle.source_tokenizer is not None:
        bundle.source_tokenizer.save(folder / SOURCE_TOKENIZER_FILE)
    if bundle.target_tokenizer is not None and bundle.target_tokenizer is not bundle.source_tokenizer:  # one that serves both sides is written once
        bundle.target_tokenizer.save(folder / TARGET_TOKENIZER_FILE)
    save_tensors(folder / WEIGHTS_FILE, unique_state_dict(model))


def _refuse_overwrite(folder: Path, model_spec: spec.Model, format: CheckpointFormat) -> None:
    """Files of another model beside this one's would be read with it: only the same model is written over."""
    occupied = (folder / SPEC_FILE).is_file() or is_checkpoint(folder)
    same_model = format == "qkv" and (folder / SPEC_FILE).is_file() and _is_same_model(folder / SPEC_FILE, model_spec)
    if format == "huggingface" and is_checkpoint(folder) and not (folder / SPEC_FILE).is_file():
        same_model = not list(folder.glob("*.index.json")) and hf_config_text(model_spec) == (folder / CONFIG_FILE).read_text("utf-8")
    if occupied and not same_model:
        raise InputError(f"{folder}: holds another model; choose another folder, or remove that one first")


def _is_same_model(path: Path, model_spec: spec.Model) -> bool:
    """Whether a file says what a spec is; one that an older release wrote may say it in other words."""
    try:
        return spec.from_json(path.read_text("utf-8"), str(path)) == model_spec
    except (InputError, UnicodeDecodeError):
        return False


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
) -> ModelBundle:
    """Reads a model folder of ours or of Hugging Face's, or a name in its cache; the model is in evaluation mode.

    `head` puts another head on the body: `sequence`, `token`, `span` and so on, with `labels` as the names of its
    outputs. `missing_keys` of what comes back says which parameters were not in the checkpoint.
    """
    folder = resolve(folder)
    if not (folder / SPEC_FILE).is_file() and is_checkpoint(folder):
        return _load_hf(folder, device, head, labels)
    return _load_native(folder, device, head, labels)


def _load_hf(
    folder: Path, device: str | torch.device, head: str | None, labels: Sequence[str] | None
) -> ModelBundle:
    checkpoint = read_checkpoint(folder, head, labels)
    model, missing_keys, unexpected_keys = _build_from(checkpoint, str(folder), head)
    template = getattr(families.get_family(checkpoint.spec.family), "TOKENIZER_TEMPLATE", None)
    source_tokenizer, target_tokenizer = load_tokenizers(folder, template, families.tokenizer_templates()) or (None, None)
    image_processor = ImageProcessor.load(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else None
    bundle = ModelBundle(model.to(device).eval(), source_tokenizer, target_tokenizer, image_processor, missing_keys, unexpected_keys)
    _check_vocabularies(bundle, folder)
    return bundle


def _build_from(checkpoint: ConvertedCheckpoint, location: str, head: str | None) -> tuple[AnyModel, tuple[str, ...], tuple[str, ...]]:
    """A checkpoint's model, what of it is fresh, and what of the checkpoint has no place in it."""
    model = build_on_meta(checkpoint.spec)
    canonical_names = _canonical_names(model)
    tensors = _drop_tied_copies(checkpoint.tensors, canonical_names, location)
    unexpected_keys = checkpoint.unexpected_keys
    if head is not None:  # the body serves another purpose: what this one has no place for is left, and said
        unexpected_keys += tuple(name for name in tensors if name not in canonical_names)
        tensors = {name: tensor for name, tensor in tensors.items() if name in canonical_names}
    expected = {name for name, (canonical, _) in canonical_names.items() if name == canonical}
    absent = [name for name in expected if name not in tensors]
    missing_keys = tuple(sorted(n for n in absent if head is not None and n.split(".")[0] in ("head", "aux_head")))
    load_state(model, tensors, location, assign=True, allow_missing=missing_keys)
    _init_missing(model, missing_keys)
    return model, missing_keys, unexpected_keys


def _drop_tied_copies(
    tensors: Mapping[str, Tensor], canonical_names: Mapping[str, tuple[str, Tensor]], location: str
) -> dict[str, Tensor]:
    """Without second names of what is one tensor in the model; a copy that differs is refused."""
    deduplicated: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        canonical = canonical_names[name][0] if name in canonical_names else name
        if canonical != name and canonical in tensors:
            if not torch.equal(tensor, tensors[canonical]):
                raise InputError(f"{location}: '{name}' and '{canonical}' are one tensor in this model, and differ there")
            continue
        deduplicated[canonical] = tensor
    return deduplicated


def _init_missing(model: AnyModel, missing_keys: Collection[str]) -> None:
    """Gives parameters that no checkpoint held memory of their own and a random beginning."""
    # each once and in the order of their names: a seed then draws the same
    modules = list({model.get_submodule(name.rpartition(".")[0]): None for name in missing_keys})
    for module in list(modules):
        loaded_names = [name for name, parameter in module.named_parameters(recurse=False) if not parameter.is_meta]
        if loaded_names == ["weight"] and isinstance(module, nn.Linear):  # the embedding's, under a language model's head
            module.bias = nn.Parameter(torch.zeros(module.out_features))
            modules.remove(module)
            continue
        if loaded_names:
            raise InputError(f"the checkpoint holds '{loaded_names[0]}' of {type(module).__name__} and lacks the rest of it")
        module.to_empty(device="cpu", recurse=False)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        for _, buffer in module.named_buffers(recurse=False):
            nn.init.zeros_(buffer)
    init_weights(model.spec, modules)
    model.tie_weights()


def _load_native(folder: Path, device: str | torch.device, head: str | None, labels: Sequence[str] | None) -> ModelBundle:
    model_spec = _load_native_spec(folder)
    if not is_finished(folder) and (folder / "last.safetensors").is_file():
        raise InputError(f"{folder}: training has not finished; run the same qkv train again to resume it")
    model: AnyModel = build_on_meta(model_spec)
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    file = LORA_FILE if (folder / LORA_FILE).is_file() else WEIGHTS_FILE
    load_state(model, _load_native_tensors(folder, model_spec), str(folder / file), assign=True)
    if head is not None or labels is not None:  # by way of Hugging Face's names, which tell heads' layers apart
        single_layer_head = model_spec.head is None or model_spec.head.num_concat_layers == 1
        set_features_and_lora(model, "last", None)
        state_dict = {name: tensor.detach() for name, tensor in unique_state_dict(model).items()}
        checkpoint = convert_checkpoint(*to_hf_checkpoint(model.spec, state_dict), str(folder), head, labels)
        if not single_layer_head:  # one that read several layers has nothing for a head that reads the last
            checkpoint = checkpoint._replace(tensors={n: t for n, t in checkpoint.tensors.items() if not n.startswith("head.")})
        model, missing_keys, unexpected_keys = _build_from(checkpoint, str(folder), head)
    source_tokenizer = Tokenizer.load(folder / SOURCE_TOKENIZER_FILE) if (folder / SOURCE_TOKENIZER_FILE).is_file() else None
    target_tokenizer = Tokenizer.load(folder / TARGET_TOKENIZER_FILE) if (folder / TARGET_TOKENIZER_FILE).is_file() else source_tokenizer
    image_processor = ImageProcessor.load(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else None
    bundle = ModelBundle(model.to(device).eval(), source_tokenizer, target_tokenizer, image_processor, missing_keys, unexpected_keys)
    _check_vocabularies(bundle, folder)
    return bundle


def is_finished(folder: Path) -> bool:
    """Whether a run there has come to its end."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / LORA_FILE).is_file()


def _load_native_tensors(folder: Path, model_spec: spec.Model) -> dict[str, Tensor]:
    if not (folder / LORA_FILE).is_file():
        return load_tensors(folder / WEIGHTS_FILE)[0]
    from qkv.checkpoints.lora import full_state_dict

    return full_state_dict(folder, model_spec)


def _load_native_spec(folder: Path) -> spec.Model:
    path = folder / SPEC_FILE
    if not path.is_file():
        raise InputError(f"{folder}: not a model folder (it has neither {SPEC_FILE} nor config.json)")
    try:
        model_spec = spec.from_json(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text; is this a model folder?") from None
    embedding, boundary_ids = model_spec.target_embedding, (model_spec.bos_id, model_spec.eos_id)
    # a decoder alone begins with a prompt, and there may be no token that ends it
    if embedding is not None and model_spec.encoder is not None and not all(0 <= token_id < embedding.vocab_size for token_id in boundary_ids):
        raise InputError(f"{path}: bos_id or eos_id is no token of the target's {embedding.vocab_size}")
    return model_spec


def _check_vocabularies(bundle: ModelBundle, folder: Path) -> None:
    """A tokeniser of ours has a row for each token; a foreign embedding may have more rows than tokens."""
    model_spec = bundle.model.spec
    for tokenizer, embedding, name in ((bundle.source_tokenizer, model_spec.source_embedding, SOURCE_TOKENIZER_FILE), (bundle.target_tokenizer, model_spec.target_embedding, TARGET_TOKENIZER_FILE)):
        if tokenizer is None or not isinstance(embedding, spec.Embedding):
            continue
        if tokenizer.vocab_size > embedding.vocab_size or (tokenizer.is_native and tokenizer.vocab_size < embedding.vocab_size):
            mismatch = f"has {tokenizer.vocab_size} tokens, the model {embedding.vocab_size}"
            location = folder / name if (folder / name).is_file() else f"{folder}: the tokeniser"
            raise InputError(f"{location}: {mismatch}; they do not belong together")
