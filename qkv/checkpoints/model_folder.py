"""A model as a folder: ours (spec.json, model.safetensors, tokenizers), a Hugging Face checkpoint, or fastai's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from qkv import families, spec
from qkv.checkpoints.bundle import ModelBundle
from qkv.checkpoints.elmo_weights import is_elmo, make_tokenizer, read_elmo_spec, read_elmo_tensors
from qkv.checkpoints.fastai import is_fastai, read_fastai
from qkv.checkpoints.generation_settings import load_generation_settings, save_generation_settings
from qkv.checkpoints.hf_checkpoint import CONFIG_FILE, hf_config_text, is_checkpoint, read_checkpoint, write_checkpoint
from qkv.checkpoints.hub import path_errors, resolve
from qkv.checkpoints.lora import BASE_REFERENCE, LORA_FILE, backbone_digest, read_base_reference
from qkv.checkpoints.peft_adapter import is_adapter, read_adapter, write_adapter
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.checkpoints.state import (
    AnyModel,
    build_from_tensors,
    check_layer_count,
    detached_state_dict,
    load_state,
    unique_state_dict,
)
from qkv.checkpoints.transformer_xl_words import find_words_file, load_word_tokenizer
from qkv.checkpoints.unfinished_run import read_unfinished_weights
from qkv.data.image_processor import PREPROCESSOR, ImageProcessor
from qkv.errors import InputError, check_choice, check_names, check_path, check_type, quote
from qkv.families.heads import with_head
from qkv.families.hf.convert import convert_checkpoint, has_hf_form, to_hf_checkpoint
from qkv.files import atomic_write_text, read_text_file
from qkv.nn.construction import build_on_meta, set_features_and_lora
from qkv.nn.device import find_device
from qkv.nn.model import is_head_or_lora
from qkv.tokenization.hf import load_tokenizers, save_tokenizers
from qkv.tokenization.tokenizer import Tokenizer

CheckpointFormat = Literal["qkv", "huggingface", "peft"]

SPEC_FILE, WEIGHTS_FILE = "spec.json", "model.safetensors"
_MAX_LORA_RUNS = 8  # LoRA runs whose base is again a LoRA run
SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE = "source.tokenizer.json", "target.tokenizer.json"


def save(bundle: ModelBundle, folder: str | Path, format: CheckpointFormat = "qkv") -> None:
    """Write a model folder that `load` reads; in the format `huggingface`, transformers reads it too.

        qkv.save(qkv.load("runs/sentiment"), "exported", format="huggingface")

    The format `peft` is for a model with LoRA weights: an adapter, which PEFT reads, next to its base model.
    """
    check_type(bundle, ModelBundle, "bundle", "a model that qkv.load returns")
    folder, model = check_path(folder, "folder"), bundle.model
    check_choice(format, get_args(CheckpointFormat), "format")
    with path_errors(folder):
        _refuse_overwrite(folder, model.spec, format)
    save_generation_settings(folder, bundle.generation_settings, model.spec)
    if format != "qkv":
        if format == "peft":
            write_adapter(folder, model.spec, detached_state_dict(model), bundle.folder)
        else:
            write_checkpoint(folder, model.spec, unique_state_dict(model))
        if bundle.image_processor is not None:
            bundle.image_processor.save(folder / PREPROCESSOR)
        if bundle.source_tokenizer is not None and bundle.target_tokenizer is not None:
            embedding = spec.input_embedding(model.spec)
            has_positions = isinstance(embedding, spec.Embedding) and embedding.position != "none"
            max_length = embedding.max_length if has_positions else None
            save_tokenizers(folder, bundle.source_tokenizer, bundle.target_tokenizer, max_length)
        return
    atomic_write_text(folder / SPEC_FILE, spec.to_json(model.spec))
    save_processors(bundle, folder)
    save_tensors(folder / WEIGHTS_FILE, unique_state_dict(model))


def save_processors(bundle: ModelBundle, folder: Path) -> None:
    """Write the tokenizers or the image processor of a model into its folder."""
    if bundle.image_processor is not None:
        bundle.image_processor.save(folder / PREPROCESSOR)
    if bundle.source_tokenizer is not None:
        bundle.source_tokenizer.save(folder / SOURCE_TOKENIZER_FILE)
    if bundle.target_tokenizer is not None and bundle.target_tokenizer is not bundle.source_tokenizer:
        bundle.target_tokenizer.save(folder / TARGET_TOKENIZER_FILE)


def _refuse_overwrite(folder: Path, model_spec: spec.Model, format: CheckpointFormat) -> None:
    """Refuse a folder that holds another model: its remaining files would be read together with this one's."""
    occupied = (folder / SPEC_FILE).is_file() or is_checkpoint(folder)
    same_model = format == "qkv" and (folder / SPEC_FILE).is_file() and _is_same_model(folder / SPEC_FILE, model_spec)
    if format != "qkv" and is_checkpoint(folder) and not (folder / SPEC_FILE).is_file():
        plain = spec.replace(model_spec, lora=None)
        same_config = hf_config_text(plain).encode() == (folder / CONFIG_FILE).read_bytes()
        same_config = same_config and is_adapter(folder) == (format == "peft")
        same_model = same_config and not list(folder.glob("*.index.json"))
    if occupied and not same_model:
        raise InputError(f"{folder}: holds another model; choose another folder, or remove that one first")


def _is_same_model(path: Path, model_spec: spec.Model) -> bool:
    """Return whether a spec.json describes this model; its text may differ, since defaults may be left out."""
    try:
        return spec.from_json(read_text_file(path), str(path)) == model_spec
    except InputError:
        return False


def load(
    folder: str | Path,
    device: str | torch.device | None = "cpu",
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
    base: str | Path | None = None,
) -> ModelBundle:
    """Load a model in eval mode, with its tokenizers or image processor.

        bundle = qkv.load("models/bert-small")
        classifier = qkv.load("models/bert-small", head="sequence", labels=["no", "yes"])

    Args:
        folder: a model folder of ours, a Hugging Face checkpoint folder, a PEFT adapter folder, or a name in the
            Hugging Face cache or hub.
        device: where to put the model: "cpu", "cuda", "cuda:1"; None: the GPU if there is one.
        head: the head to put on the backbone, such as "sequence", "token" or "span"; None: the one it was saved with.
        labels: the names of the head's outputs.
        base: the base model of a PEFT adapter, a Hugging Face checkpoint; None: the one that the adapter names.

    Parameters that the folder does not hold, such as those of a new head, are newly initialized and listed in
    `missing_keys` of the returned bundle.
    """
    torch_device = find_device(device)
    if head is not None:
        check_type(head, str, "head", "the name of a head")
    labels = None if labels is None else check_names(labels, "labels", "names of the head's outputs")
    folder = resolve(check_path(folder, "folder", "the path of a model, or its name in the Hugging Face cache"))
    with path_errors(folder):
        if base is not None and not is_adapter(folder):
            raise InputError(f"base: {folder} is a whole model, which has no base; leave it out")
        bundle = _load(folder, head, labels, (), base)
    bundle.model.to(torch_device).eval()
    return replace(bundle, folder=folder) if head is None and labels is None else bundle


def _load(
    folder: Path,
    head: str | None,
    labels: Sequence[str] | None,
    runs: tuple[str, ...],
    base: str | Path | None = None,
) -> ModelBundle:
    """Load a model; `runs` are the real paths of the LoRA runs that led to it as their base."""
    if is_adapter(folder):
        bundle = _load_adapter(folder, head, labels, base)
    elif not (folder / SPEC_FILE).is_file() and is_checkpoint(folder):
        bundle = _load_hf(folder, head, labels)
    elif not (folder / SPEC_FILE).is_file() and is_elmo(folder):
        bundle = _load_elmo(folder, head, labels)
    elif not (folder / SPEC_FILE).is_file() and is_fastai(folder):
        bundle = _load_fastai(folder, head, labels)
    else:
        bundle = _load_native(folder, head, labels, runs)
    _check_vocabularies(bundle, folder)
    _check_image_size(bundle, folder)
    settings = load_generation_settings(folder, bundle.model.spec)
    return replace(bundle, generation_settings=settings) if settings else bundle


def read_spec(folder: str | Path) -> spec.Model:
    """Return the spec of the model that `load` would load, without building it."""
    folder = resolve(folder)
    with path_errors(folder):
        if is_adapter(folder):
            return read_adapter(folder, None)[0].spec
        if not (folder / SPEC_FILE).is_file() and is_checkpoint(folder):
            return read_checkpoint(folder).spec
        if not (folder / SPEC_FILE).is_file() and is_elmo(folder):
            return read_elmo_spec(folder)
        if not (folder / SPEC_FILE).is_file() and is_fastai(folder):
            return read_fastai(folder).spec
        return _load_native_spec(folder)


def _load_hf(folder: Path, head: str | None, labels: Sequence[str] | None) -> ModelBundle:
    checkpoint = read_checkpoint(folder, head, labels)
    model, missing, unused = build_from_tensors(
        checkpoint.spec, checkpoint.tensors, str(folder), new_head=head is not None
    )
    source_tokenizer, target_tokenizer = _load_hf_tokenizers(folder, checkpoint.spec)
    image_processor, unexpected = _load_image_processor(folder, checkpoint.spec), checkpoint.unexpected_keys + unused
    return ModelBundle(model, source_tokenizer, target_tokenizer, image_processor, missing, unexpected)


def _load_elmo(folder: Path, head: str | None, labels: Sequence[str] | None) -> ModelBundle:
    model_spec = read_elmo_spec(folder)
    model, missing, unused = build_from_tensors(
        model_spec, read_elmo_tensors(folder, model_spec), str(folder), new_head=False
    )
    if head is not None or labels is not None:
        model, missing, unused = _replace_head(model, head, labels, str(folder))
    tokenizer = make_tokenizer()
    return ModelBundle(model, tokenizer, tokenizer, None, missing, unused)


def _load_hf_tokenizers(folder: Path, model_spec: spec.Model) -> tuple[Tokenizer | None, Tokenizer | None]:
    template = getattr(families.get_family(model_spec.family), "TOKENIZER_TEMPLATE", None)
    words_file = find_words_file(folder) if model_spec.family == "transformer_xl" else None
    if words_file is not None:
        tokenizer = load_word_tokenizer(words_file)
        return tokenizer, tokenizer
    return load_tokenizers(folder, template, families.tokenizer_templates()) or (None, None)


def _load_fastai(folder: Path, head: str | None, labels: Sequence[str] | None) -> ModelBundle:
    checkpoint = read_fastai(folder)
    model, missing, unused = build_from_tensors(checkpoint.spec, checkpoint.tensors, str(folder), new_head=False)
    if head is not None or labels is not None:
        model, missing, unused = _replace_head(model, head, labels, str(folder))
    return ModelBundle(model, checkpoint.tokenizer, checkpoint.tokenizer, None, missing, unused)


def _load_adapter(folder: Path, head: str | None, labels: Sequence[str] | None, base: str | Path | None) -> ModelBundle:
    """Load a PEFT adapter with its base model; tokenizer and image processor are in the folder of either."""
    checkpoint, base_folder = read_adapter(folder, base)
    model, missing, unused = build_from_tensors(checkpoint.spec, checkpoint.tensors, str(folder), new_head=True)
    unused += checkpoint.unexpected_keys
    if head is not None or labels is not None:
        model, missing, unused = _replace_head(model, head, labels, str(folder))
    source_tokenizer, target_tokenizer = _load_hf_tokenizers(folder, model.spec)
    if source_tokenizer is None:
        source_tokenizer, target_tokenizer = _load_hf_tokenizers(base_folder, model.spec)
    image_processor = _load_image_processor(folder, model.spec) or _load_image_processor(base_folder, model.spec)
    return ModelBundle(model, source_tokenizer, target_tokenizer, image_processor, missing, unused)


def _load_native(folder: Path, head: str | None, labels: Sequence[str] | None, runs: tuple[str, ...]) -> ModelBundle:
    model_spec = _load_native_spec(folder)
    path, tensors = _read_native_tensors(folder, model_spec, runs)
    check_layer_count(model_spec, tensors, str(path))
    model: AnyModel = build_on_meta(model_spec)
    load_state(model, tensors, str(path), assign=True)
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    if head is not None or labels is not None:
        model, missing, unused = _replace_head(model, head, labels, str(folder))
    source_path, target_path = folder / SOURCE_TOKENIZER_FILE, folder / TARGET_TOKENIZER_FILE
    source_tokenizer = Tokenizer.load(source_path) if source_path.is_file() else None
    target_tokenizer = Tokenizer.load(target_path) if target_path.is_file() else source_tokenizer
    image_processor = _load_image_processor(folder, model_spec)
    return ModelBundle(model, source_tokenizer, target_tokenizer, image_processor, missing, unused)


def _read_native_tensors(folder: Path, model_spec: spec.Model, runs: tuple[str, ...]) -> tuple[Path, dict[str, Tensor]]:
    """Return the weights of a model folder or of an unfinished run; a LoRA run has its backbone elsewhere."""
    unfinished = None if is_finished(folder) else read_unfinished_weights(folder)
    is_lora = (folder / (LORA_FILE if unfinished is None else BASE_REFERENCE)).is_file()
    path = folder / (LORA_FILE if is_lora else WEIGHTS_FILE)
    path, tensors = unfinished or (path, load_tensors(path)[0])
    return path, (_load_backbone(folder, model_spec, runs) | tensors if is_lora else tensors)


def _load_image_processor(folder: Path, model_spec: spec.Model) -> ImageProcessor | None:
    reads_images = spec.input_embedding(model_spec).modality == "image"
    return ImageProcessor.load(folder / PREPROCESSOR) if reads_images and (folder / PREPROCESSOR).is_file() else None


def is_finished(folder: Path) -> bool:
    """Return whether a run folder holds the weights that training ends with."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / LORA_FILE).is_file()


def _load_native_spec(folder: Path) -> spec.Model:
    path = folder / SPEC_FILE
    if not path.is_file():
        raise InputError(f"{folder}: not a model folder (it has neither {SPEC_FILE} nor config.json)")
    return spec.from_json(read_text_file(path), str(path))


def _load_backbone(folder: Path, model_spec: spec.Model, runs: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of the backbone of a LoRA run, from its base model, which may be a LoRA run as well."""
    base_name, base_digest = read_base_reference(folder)
    head, runs = model_spec.head, (*runs, os.path.realpath(folder))
    try:
        base_folder = resolve(base_name)
        if os.path.realpath(base_folder) in runs:
            raise InputError("the reference leads back to the run itself")
        if len(runs) > _MAX_LORA_RUNS:
            raise InputError(f"this is a chain of more than {_MAX_LORA_RUNS} LoRA runs; merge one of them")
        with torch.random.fork_rng(devices=[]):  # the base's head is initialized and then not used
            kind, labels = (None, None) if head is None else (head.kind, head.labels)
            base = _load(base_folder, kind, labels, runs).model
    except InputError as error:
        reason = f"its base model {quote(base_name)} cannot be loaded ({error})"
        raise InputError(f"{folder}: {reason}; restore it, or write its new path into {BASE_REFERENCE}") from None
    if backbone_digest(base) != base_digest:
        reason = f"its LoRA weights were trained on other weights than {quote(base_name)} holds now"
        raise InputError(f"{folder}: {reason}; restore them, or write the path of the original into {BASE_REFERENCE}")
    return {name: tensor for name, tensor in detached_state_dict(base).items() if not is_head_or_lora(name)}


def _replace_head(
    model: AnyModel, head: str | None, labels: Sequence[str] | None, location: str
) -> tuple[AnyModel, tuple[str, ...], tuple[str, ...]]:
    """Return a model with another head on its backbone, its newly initialized parameters and the unused tensors."""
    reads_one_layer = model.spec.head is None or model.spec.head.num_concat_layers == 1
    set_features_and_lora(model, "last", None)
    tensors = detached_state_dict(model)
    if not hasattr(families.get_family(model.spec.family), "HF_FORMAT"):
        return _replace_native_head(model.spec, tensors, head, labels, location)
    old_head = model.spec.head
    if old_head is not None and not has_hf_form(model.spec):  # such as a head that reads the mean of all tokens
        is_same_head = reads_one_layer and head in (None, old_head.kind)
        if is_same_head and len(labels or old_head.labels) == len(old_head.labels):
            new_head = spec.replace(old_head, labels=tuple(labels or old_head.labels))
            new_spec = spec.replace(model.spec, head=new_head)
            return build_from_tensors(new_spec, tensors, location, new_head=False)
        model.spec = spec.replace(model.spec, head=None, aux_head=None)
        tensors = {name: tensor for name, tensor in tensors.items() if not is_head_or_lora(name)}
    # Hugging Face names distinguish the layers of one head from those of another
    checkpoint = convert_checkpoint(*to_hf_checkpoint(model.spec, tensors), location, head, labels)
    tensors = checkpoint.tensors
    if not reads_one_layer:  # the weights of a head that read several layers do not fit one that reads the last
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    new_model, missing, unused = build_from_tensors(checkpoint.spec, tensors, location, new_head=head is not None)
    return new_model, missing, checkpoint.unexpected_keys + unused


def _replace_native_head(
    model_spec: spec.Model, tensors: dict[str, Tensor], head: str | None, labels: Sequence[str] | None, location: str
) -> tuple[AnyModel, tuple[str, ...], tuple[str, ...]]:
    """Replace the head of a family without a Hugging Face form; weights stay if kind and number of outputs stay."""
    old_head = model_spec.head
    head_name = head or ("backbone" if old_head is None else "seq2seq_lm" if old_head.kind == "lm" else old_head.kind)
    if head is None and (old_head is None or not old_head.labels):
        raise InputError(f"{location}: labels: its head ({head_name}) has no labels; give the head that they belong to")
    if head_name in ("sequence", "token") and not labels and (old_head is None or old_head.kind != head_name):
        raise InputError(f"{location}: head: '{head_name}' needs labels, the names of its outputs")
    old_labels = () if old_head is None else old_head.labels
    new_spec = with_head(model_spec, head_name, tuple(labels) if labels else old_labels)
    keep_head = (
        old_head is not None
        and new_spec.head is not None
        and spec.replace(old_head, labels=new_spec.head.labels) == new_spec.head
    )
    carried = {
        name: tensor for name, tensor in tensors.items() if keep_head or name.split(".")[0] not in ("head", "aux_head")
    }
    model, missing, unused = build_from_tensors(new_spec, carried, location, new_head=True)
    return model, missing, (*unused, *(name for name in tensors if name not in carried))


def _check_vocabularies(bundle: ModelBundle, folder: Path) -> None:
    """Check that the embeddings have a row per token; only a foreign embedding may have more rows than tokens."""
    model_spec = bundle.model.spec
    for tokenizer, embedding, name in (
        (bundle.source_tokenizer, model_spec.source_embedding, SOURCE_TOKENIZER_FILE),
        (bundle.target_tokenizer, model_spec.target_embedding, TARGET_TOKENIZER_FILE),
    ):
        if tokenizer is None or not isinstance(embedding, spec.Embedding):
            continue
        if tokenizer.vocab_size > embedding.vocab_size or (
            tokenizer.is_native and tokenizer.vocab_size < embedding.vocab_size
        ):
            mismatch = f"has {tokenizer.vocab_size} tokens, the model {embedding.vocab_size}"
            location = folder / name if (folder / name).is_file() else f"{folder}: the tokenizer"
            raise InputError(f"{location}: {mismatch}; they do not belong together")


def _check_image_size(bundle: ModelBundle, folder: Path) -> None:
    """Check that the image processor makes images of the size that the model reads, if it makes them of one size."""
    processor, embedding = bundle.image_processor, spec.input_embedding(bundle.model.spec)
    if processor is None or not isinstance(embedding, spec.PatchEmbedding):
        return
    size, side = processor.crop_size or processor.size, embedding.image_size
    if isinstance(size, tuple) and size != (side, side):
        mismatch = f"makes images of {size[0]} x {size[1]} pixels, and the model reads {side} x {side}"
        raise InputError(f"{folder / PREPROCESSOR}: {mismatch}; they do not belong together")
