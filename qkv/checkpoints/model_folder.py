"""A model as a folder: ours (spec.json, model.safetensors, tokenizers) or a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from qkv import families, spec
from qkv.checkpoints.bundle import ModelBundle
from qkv.checkpoints.hf_checkpoint import CONFIG_FILE, hf_config_text, is_checkpoint, read_checkpoint, write_checkpoint
from qkv.checkpoints.hub import resolve
from qkv.checkpoints.lora import BASE_REFERENCE, LORA_FILE, backbone_digest, read_base_reference
from qkv.checkpoints.safetensors_io import load_tensors, save_tensors
from qkv.checkpoints.state import AnyModel, build_from_tensors, detached_state_dict, load_state, unique_state_dict
from qkv.data.image_processor import PREPROCESSOR, ImageProcessor
from qkv.errors import InputError
from qkv.families.heads import with_head
from qkv.families.hf.convert import convert_checkpoint, to_hf_checkpoint
from qkv.files import atomic_write_text
from qkv.nn.model import build_on_meta, is_head_or_lora, set_features_and_lora
from qkv.tokenization.hf import load_tokenizers, save_tokenizers
from qkv.tokenization.tokenizer import Tokenizer

CheckpointFormat = Literal["qkv", "huggingface"]

SPEC_FILE, WEIGHTS_FILE = "spec.json", "model.safetensors"
SOURCE_TOKENIZER_FILE, TARGET_TOKENIZER_FILE = "source.tokenizer.json", "target.tokenizer.json"


def save(bundle: ModelBundle, folder: str | Path, format: CheckpointFormat = "qkv") -> None:
    """Write a model folder that `load` reads; in the format `huggingface`, transformers reads it too."""
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
            max_length = embedding.max_length if has_positions else None
            save_tokenizers(folder, bundle.source_tokenizer, bundle.target_tokenizer, max_length)
        return
    atomic_write_text(folder / SPEC_FILE, spec.to_json(model.spec))
    if bundle.source_tokenizer is not None:
        bundle.source_tokenizer.save(folder / SOURCE_TOKENIZER_FILE)
    if bundle.target_tokenizer is not None and bundle.target_tokenizer is not bundle.source_tokenizer:
        bundle.target_tokenizer.save(folder / TARGET_TOKENIZER_FILE)
    save_tensors(folder / WEIGHTS_FILE, unique_state_dict(model))


def _refuse_overwrite(folder: Path, model_spec: spec.Model, format: CheckpointFormat) -> None:
    """Refuse a folder that holds another model: its remaining files would be read together with this one's."""
    occupied = (folder / SPEC_FILE).is_file() or is_checkpoint(folder)
    same_model = format == "qkv" and (folder / SPEC_FILE).is_file() and _is_same_model(folder / SPEC_FILE, model_spec)
    if format == "huggingface" and is_checkpoint(folder) and not (folder / SPEC_FILE).is_file():
        same_config = hf_config_text(model_spec) == (folder / CONFIG_FILE).read_text("utf-8")
        same_model = same_config and not list(folder.glob("*.index.json"))
    if occupied and not same_model:
        raise InputError(f"{folder}: holds another model; choose another folder, or remove that one first")


def _is_same_model(path: Path, model_spec: spec.Model) -> bool:
    """Return whether a spec.json describes this model; its text may differ, since defaults may be left out."""
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
    """Load a model in eval mode, with its tokenizers or image processor.

    Args:
        folder: a model folder of ours, a Hugging Face checkpoint folder, or a name in the Hugging Face cache or hub.
        device: where to put the model.
        head: the head to put on the backbone, such as "sequence", "token" or "span"; None: the one it was saved with.
        labels: the names of the head's outputs.

    Parameters that the folder does not hold, such as those of a new head, are newly initialized and listed in
    `missing_keys` of the returned bundle.
    """
    folder = resolve(folder)
    if not (folder / SPEC_FILE).is_file() and is_checkpoint(folder):
        bundle = _load_hf(folder, head, labels)
    else:
        bundle = _load_native(folder, head, labels)
    _check_vocabularies(bundle, folder)
    bundle.model.to(device).eval()
    return replace(bundle, folder=folder) if head is None and labels is None else bundle


def read_spec(folder: str | Path) -> spec.Model:
    """Return the spec of the model that `load` would load, without building it."""
    folder = resolve(folder)
    if not (folder / SPEC_FILE).is_file() and is_checkpoint(folder):
        return read_checkpoint(folder).spec
    return _load_native_spec(folder)


def _load_hf(folder: Path, head: str | None, labels: Sequence[str] | None) -> ModelBundle:
    checkpoint = read_checkpoint(folder, head, labels)
    model, missing, unused = build_from_tensors(
        checkpoint.spec, checkpoint.tensors, str(folder), new_head=head is not None
    )
    template = getattr(families.get_family(checkpoint.spec.family), "TOKENIZER_TEMPLATE", None)
    source_tokenizer, target_tokenizer = load_tokenizers(folder, template, families.tokenizer_templates()) or (
        None,
        None,
    )
    return ModelBundle(
        model,
        source_tokenizer,
        target_tokenizer,
        _load_image_processor(folder),
        missing,
        checkpoint.unexpected_keys + unused,
    )


def _load_native(folder: Path, head: str | None, labels: Sequence[str] | None) -> ModelBundle:
    model_spec = _load_native_spec(folder)
    if not is_finished(folder) and (folder / "last.safetensors").is_file():
        raise InputError(f"{folder}: training has not finished; run the same qkv train again to resume it")
    model: AnyModel = build_on_meta(model_spec)
    is_lora = (folder / LORA_FILE).is_file()
    tensors = _load_lora_tensors(folder, model_spec) if is_lora else load_tensors(folder / WEIGHTS_FILE)[0]
    load_state(model, tensors, str(folder / (LORA_FILE if is_lora else WEIGHTS_FILE)), assign=True)
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    if head is not None or labels is not None:
        model, missing, unused = _replace_head(model, head, labels, str(folder))
    source_path, target_path = folder / SOURCE_TOKENIZER_FILE, folder / TARGET_TOKENIZER_FILE
    source_tokenizer = Tokenizer.load(source_path) if source_path.is_file() else None
    target_tokenizer = Tokenizer.load(target_path) if target_path.is_file() else source_tokenizer
    return ModelBundle(model, source_tokenizer, target_tokenizer, _load_image_processor(folder), missing, unused)


def _load_image_processor(folder: Path) -> ImageProcessor | None:
    return ImageProcessor.load(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else None


def is_finished(folder: Path) -> bool:
    """Return whether a run folder holds the weights that training ends with."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / LORA_FILE).is_file()


def _load_native_spec(folder: Path) -> spec.Model:
    path = folder / SPEC_FILE
    if not path.is_file():
        raise InputError(f"{folder}: not a model folder (it has neither {SPEC_FILE} nor config.json)")
    try:
        model_spec = spec.from_json(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text; is this a model folder?") from None
    embedding, boundary_ids = model_spec.target_embedding, (model_spec.bos_id, model_spec.eos_id)
    # a decoder without an encoder begins with a prompt and may have no EOS token
    if (
        embedding is not None
        and model_spec.encoder is not None
        and not all(0 <= token_id < embedding.vocab_size for token_id in boundary_ids)
    ):
        raise InputError(f"{path}: bos_id or eos_id is not one of the target's {embedding.vocab_size} tokens")
    return model_spec


def _load_lora_tensors(folder: Path, model_spec: spec.Model) -> dict[str, Tensor]:
    """Return all tensors of a LoRA run: the backbone of its base model, and its own LoRA weights and head."""
    base_name, base_digest = read_base_reference(folder)
    head = model_spec.head
    try:
        with torch.random.fork_rng(devices=[]):  # the base's head is initialized and then not used
            base = load(
                base_name, head=None if head is None else head.kind, labels=None if head is None else head.labels
            ).model
    except InputError as error:
        reason = f"its base model '{base_name}' cannot be loaded ({error})"
        raise InputError(f"{folder}: {reason}; restore it, or write its new path into {BASE_REFERENCE}") from None
    if backbone_digest(base) != base_digest:
        reason = f"its LoRA weights were trained on other weights than '{base_name}' holds now"
        raise InputError(f"{folder}: {reason}; restore them, or write the path of the original into {BASE_REFERENCE}")
    backbone = {name: tensor for name, tensor in detached_state_dict(base).items() if not is_head_or_lora(name)}
    return backbone | load_tensors(folder / LORA_FILE)[0]


def _replace_head(
    model: AnyModel, head: str | None, labels: Sequence[str] | None, location: str
) -> tuple[AnyModel, tuple[str, ...], tuple[str, ...]]:
    """Return a model with another head on its backbone, its newly initialized parameters and the unused tensors."""
    reads_one_layer = model.spec.head is None or model.spec.head.num_concat_layers == 1
    set_features_and_lora(model, "last", None)
    tensors = detached_state_dict(model)
    if not hasattr(families.get_family(model.spec.family), "HF_FORMAT"):
        return _replace_native_head(model.spec, tensors, head, labels, location)
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
