"""Checks of model specifications: every number has a type and a range, and the sections agree with each other.

They serve whatever a model can come from: spec.json, a foreign config.json, the `model` section of a recipe, and specs
made in Python. A range is known by the name of its field, which configs and specs share. Imports no torch.
"""

from __future__ import annotations

import os
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from qkv.errors import InputError, describe_value
from qkv.limits import limit, raise_hint
from qkv.spec import model as s
from qkv.spec.characters import NUM_CHARACTERS, NUM_LETTERS, CharacterEmbedding

# smallest value and name of the limit (`qkv.limits`) of whole numbers, by the name of the field
_RANGES: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("layers", "num_layers", "decoder_layers"), (1, "layers")),
    **dict.fromkeys(("vocab_size", "source_vocab_size", "target_vocab_size", "num_outputs"), (1, "vocabulary")),
    **dict.fromkeys(("max_length", "max_distance"), (1, "vocabulary")),
    **dict.fromkeys(("num_segments", "position_offset", "padding_idx"), (0, "vocabulary")),
    **dict.fromkeys(("bos_id", "eos_id", "pad_id"), (-1, "vocabulary")),  # -1: there is no such token
    "suppress_tokens": (0, "vocabulary"),
    "memory_length": (0, "vocabulary"),  # 0: no memory
    **dict.fromkeys(("reuse_length", "window", "cutoffs"), (1, "vocabulary")),
    "num_highway": (0, "layers"),
    "start_beams": (0, "dimension"),  # 0: no beams
}
AnyStack = s.TransformerStack | s.RecurrentEncoder | s.BagOfWords | s.BiLM | s.RecurrentDecoder | s.RecurrentStack
_DIMENSION = (1, "dimension")  # the range of all other whole numbers
_MAX_FLOAT = 1e9
_BYTES_PER_PARAMETER = 4
_HEAD_OUTPUTS = {"span": 2, "choice": 1, "next_sentence": 2}


def check_value(name: str, hint: Any, value: Any, label: str) -> None:
    """Refuse a value whose type is not that of its field, and a number out of its field's range.

    Args:
        name: the name of the field, which determines the range.
        hint: the type of the field.
        value: the value.
        label: the name of the value in messages.
    """
    if not matches_type(value, hint):
        raise InputError(f"{label} cannot be {describe_value(value)}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if _is_float(hint):
            _check_float(name, number, label)
        else:
            _check_int(name, int(number), label)


def matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of a field; True and False are no numbers, and 3.0 is no whole number."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches_type(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(matches_type(item, typing.get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


@cache
def _is_float(hint: Any) -> bool:
    return hint is float or float in getattr(hint, "__args__", ())


def _check_float(name: str, number: float, label: str) -> None:
    if "dropout" in name:
        is_valid, expected = 0 <= number < 1, "at least 0 and below 1"
    elif name.endswith(("eps", "std")):
        is_valid, expected = 0 <= number <= 1, "from 0 to 1"
    else:
        is_valid, expected = -_MAX_FLOAT <= number <= _MAX_FLOAT, "a finite number"
    if not is_valid:  # a NaN compares false with everything
        raise InputError(f"{label} cannot be {describe_value(number)}: it must be {expected}")


def _check_int(name: str, number: int, label: str) -> None:
    low, limit_name = _RANGES.get(name, _DIMENSION)
    if number < low:
        raise InputError(f"{label} cannot be {describe_value(number)}: it must be {low} or more")
    if number > limit(limit_name):
        raise InputError(f"{label} cannot be {describe_value(number)}; {raise_hint(limit_name)}")


def check_model(model: s.Model) -> None:
    """Refuse a spec with a value out of range, or whose sections do not belong together."""
    _check_fields(model, "")
    encoder, decoder = model.encoder, model.decoder
    if encoder is None and decoder is None:
        raise InputError("the model has neither an encoder nor a decoder")
    if encoder is None and isinstance(decoder, s.RecurrentDecoder):
        raise InputError(f"{model.family}: a RecurrentDecoder needs an encoder; without one use a RecurrentStack")
    if encoder is not None and isinstance(decoder, s.RecurrentStack):
        raise InputError(f"{model.family}: a RecurrentStack has no encoder; use a RecurrentDecoder")
    memory_dim = None if encoder is None else _output_dim(encoder)
    if encoder is not None:
        _check_embedding(model.source_embedding, encoder, "encoder", "source_embedding")
        _check_stack(encoder, "encoder", None)
    if decoder is not None:
        _check_embedding(model.target_embedding, decoder, "decoder", "target_embedding")
        _check_stack(decoder, "decoder", memory_dim)
    _check_sharing(model)
    _check_token_ids(model)
    for head, name in ((model.head, "head"), (model.aux_head, "aux_head")):
        if head is not None:
            _check_head(model, head, name)


def _check_fields(section: Any, path: str) -> None:
    hints = _field_types(section.__class__)
    for field in fields(section):
        value, label = getattr(section, field.name), f"{path}{field.name}"
        check_value(field.name, hints[field.name], value, label)
        if is_dataclass(value):
            _check_fields(value, f"{label}.")


@cache
def _field_types(section_class: type[object]) -> dict[str, Any]:
    return get_type_hints(section_class)


def _equal(left: int, right: int, left_name: str, right_name: str) -> None:
    if left != right:
        raise InputError(f"{left_name} is {left}, and {right_name} is {right}; they must be equal")


def _output_dim(stack: AnyStack) -> int:
    if isinstance(stack, s.TransformerStack):
        return stack.d_model
    return stack.hidden_size if isinstance(stack, s.RecurrentDecoder) else stack.output_dim


def _check_embedding(
    embedding: s.Embedding | s.PatchEmbedding | None,
    stack: AnyStack,
    stack_name: str,
    name: str,
) -> None:
    if embedding is None:
        raise InputError(f"the model has no {name}, which the {stack_name} needs")
    _equal(embedding.d_model, stack.d_model, f"{name}.d_model", f"the width of the {stack_name}")
    if isinstance(embedding, s.PatchEmbedding):
        if embedding.patch_size > embedding.image_size:
            raise InputError(f"{name}.patch_size: {embedding.patch_size} pixels are more than the image has")
        pixels = embedding.image_size**2
        if max(pixels, embedding.patch_size**2 * embedding.num_channels) > limit("image_pixels"):
            raise InputError(f"{name}.image_size: {pixels:,} pixels are too many; {raise_hint('image_pixels')}")
    else:
        if isinstance(embedding, CharacterEmbedding):
            _check_characters(embedding, name)
        _check_clusters(embedding.clusters, embedding.vocab_size, f"{name}.clusters")
        if embedding.padding_idx is not None and embedding.padding_idx >= embedding.vocab_size:
            raise InputError(
                f"{name}.padding_idx: {embedding.padding_idx} is no token of a vocabulary of {embedding.vocab_size}"
            )
        is_computed = embedding.position.startswith("sinusoid")  # such a table is in memory, not in the checkpoint
        if is_computed and embedding.max_length * embedding.d_model > limit("position_table"):
            table = f"a table of {embedding.max_length:,} positions is too large"
            raise InputError(f"{name}.max_length: {table}; {raise_hint('position_table')}")


def _check_clusters(clusters: s.Clusters | None, vocab_size: int, name: str) -> None:
    if clusters is None:
        return
    if list(clusters.cutoffs) != sorted(set(clusters.cutoffs)) or not clusters.cutoffs[-1:] < (vocab_size,):
        raise InputError(f"{name}.cutoffs: must increase and be below the vocabulary of {vocab_size} tokens")
    if clusters.widths[-1] < 1:
        reason = f"a width of {clusters.embed_dim} divided by {clusters.divisor} per cluster leaves nothing"
        raise InputError(f"{name}.divisor: {reason} for the last of {len(clusters.widths)}; use fewer cutoffs")


def _check_characters(embedding: CharacterEmbedding, name: str) -> None:
    widths, counts = embedding.filter_widths, embedding.filter_counts
    if not widths or len(widths) != len(counts):
        raise InputError(f"{name}.filter_widths: has {len(widths)} groups of filters, and filter_counts {len(counts)}")
    if embedding.max_characters < 3:
        raise InputError(f"{name}.max_characters: a word needs 3 with its beginning and end; set more")
    if max(widths) > embedding.max_characters:
        reason = f"filters of {max(widths)} characters do not fit words of {embedding.max_characters}"
        raise InputError(f"{name}.filter_widths: {reason}; set a larger max_characters")
    if embedding.position != "none" or embedding.num_segments:
        raise InputError(f"{name}.position: characters have neither positions nor segments here; set none")
    num_words = embedding.first_letter_id
    if num_words < 0 or len(embedding.words) > num_words:
        reason = f"{len(embedding.words):,} words and {NUM_LETTERS if embedding.letters else 0} letters"
        raise InputError(f"{name}.words: {reason} are more than its vocabulary of {embedding.vocab_size:,} tokens")


def _check_stack(stack: AnyStack, name: str, memory_dim: int | None) -> None:
    """Check the layers of an encoder or decoder; `memory_dim` is the width of the encoder output that it attends to."""
    if isinstance(stack, s.TransformerStack):
        block, path = stack.block, f"{name}.block"
        _check_attention(block.self_attention, f"{path}.self_attention", stack.d_model, stack.d_model)
        _equal(block.feedforward.d_model, stack.d_model, f"{path}.feedforward.d_model", f"the width of the {name}")
        if (block.cross_attention is None) != (memory_dim is None):
            verb = "has no encoder output to attend to" if memory_dim is None else "must attend to the encoder output"
            raise InputError(f"{path}.cross_attention: the {name} {verb}")
        if block.cross_attention is not None and memory_dim is not None:
            _check_attention(block.cross_attention, f"{path}.cross_attention", stack.d_model, memory_dim)
        _check_buckets(stack, name)
        if stack.memory_length and block.self_attention.relative_positions is None:
            raise InputError(f"{name}.memory_length: needs {path}.self_attention.relative_positions; set it to 0")
    elif isinstance(stack, s.RecurrentDecoder):
        assert memory_dim is not None  # a recurrent decoder has an encoder
        _equal(stack.encoder_dim, memory_dim, f"{name}.encoder_dim", "the width of the encoder output")
        if stack.attention is not None:
            _check_attention(stack.attention, f"{name}.attention", stack.hidden_size, memory_dim)


def _check_attention(attention: s.Attention, path: str, query_dim: int, kv_dim: int) -> None:
    _equal(attention.query_dim, query_dim, f"{path}.query_dim", "the width of its queries")
    _equal(attention.effective_kv_dim, kv_dim, f"{path}.kv_dim", "the width of its keys and values")
    widths = [query_dim, kv_dim] if not attention.use_projections else [query_dim] if attention.head_dim is None else []
    for width in widths:
        if width % attention.heads:
            raise InputError(f"attention: a width of {width} does not divide into {attention.heads} heads")
    head_dim = max(attention.k_head_dim, attention.effective_v_head_dim)
    if attention.heads * head_dim > limit("dimension"):
        raise InputError(f"{path}: {attention.heads} heads of {head_dim} are too wide; {raise_hint('dimension')}")


def _check_buckets(stack: s.TransformerStack, name: str) -> None:
    bias = stack.relative_position_bias
    if bias is None:
        return
    max_exact = bias.num_buckets // (2 if stack.causal else 4)  # distances with a bucket of their own
    if max_exact < 1 or bias.max_distance <= max_exact:
        reason = f"{bias.num_buckets} buckets distinguish {max_exact} distances exactly"
        raise InputError(
            f"{name}.relative_position_bias: {reason}; max_distance must be larger, not {bias.max_distance}"
        )


def _check_sharing(model: s.Model) -> None:
    if not model.share_embeddings:
        return
    source, target = model.source_embedding, model.target_embedding
    if not isinstance(source, s.Embedding) or target is None:
        raise InputError("model.share_embeddings: source and target must both be tokens to share embeddings")
    if source.clusters is not None or target.clusters is not None:
        raise InputError("model.share_embeddings: embeddings with clusters cannot be shared; leave it out")
    _equal(source.d_model, target.d_model, "source_embedding.d_model", "target_embedding.d_model")
    if source.vocab_size != target.vocab_size:
        raise InputError(
            f"model.share_embeddings: source and target have {source.vocab_size} and {target.vocab_size} tokens; "
            "one table needs one vocabulary (tokenizer.joint_vocab)"
        )


def _check_token_ids(model: s.Model) -> None:
    """Check that the tokens of a decoder are in its vocabulary; without an encoder, BOS and EOS are optional."""
    if model.target_embedding is None:
        return
    vocab_size = model.target_embedding.vocab_size
    lowest = -1 if model.encoder is None else 0
    token_ids = [("bos_id", model.bos_id), ("eos_id", model.eos_id)]
    for name, token_id in token_ids:
        if not lowest <= token_id < vocab_size:
            raise InputError(f"{name}: {token_id} is not one of the target's {vocab_size} tokens")
    optional_ids = [("pad_id", model.pad_id), *(("suppress_tokens", token_id) for token_id in model.suppress_tokens)]
    for name, optional_id in optional_ids:
        if optional_id is not None and optional_id >= vocab_size:
            raise InputError(f"{name}: {optional_id} is not one of the target's {vocab_size} tokens")


def _check_head(model: s.Model, head: s.Head, name: str) -> None:
    """Check a head against the hidden states that it reads and against its own labels."""
    if model.head is None:
        raise InputError(f"{model.family}: aux_head is set but head is None; set head instead")
    stack = model.decoder if model.decoder is not None else model.encoder
    assert stack is not None
    is_bilm = isinstance(stack, s.BiLM) and head.kind == "lm"  # it predicts from one direction at a time
    width = stack.d_model if is_bilm else _output_dim(stack)
    _equal(head.d_model, width, f"{name}.d_model", "the width of the hidden states")
    if isinstance(head.pool, s.Attention):
        _check_attention(head.pool, f"{name}.pool", head.pool.query_dim, head.d_model)
    if head.pool == "final" and not is_bidirectional(stack):
        raise InputError(f"{name}.pool: 'final' needs a bidirectional recurrent encoder; use last or mean")
    embedding = model.target_embedding if model.decoder is not None else model.source_embedding
    vocab_size = embedding.vocab_size if isinstance(embedding, s.Embedding) else 0
    _check_clusters(head.clusters, head.num_outputs, f"{name}.clusters")
    if head.clusters is not None and (head.kind != "lm" or head.dense_activation is not None):
        raise InputError(f"{name}.clusters: only a plain language model head has clusters; leave them out")
    if len(head.tie_projections) not in (0, 0 if head.clusters is None else len(head.clusters.starts)):
        raise InputError(f"{name}.tie_projections: needs one value per cluster")
    shared = embedding.clusters if isinstance(embedding, s.Embedding) else None
    if head.tie_embeddings and (head.clusters is None) != (shared is None):
        raise InputError(f"{name}.clusters: a tied head needs the clusters of the embedding")
    if head.kind == "lm":
        _equal(head.num_outputs, vocab_size, f"{name}.num_outputs", "the size of the vocabulary")
    if head.tie_embeddings and (
        embedding is None or (head.num_outputs, head.d_model) != (vocab_size, embedding.d_model)
    ):
        raise InputError(f"{model.family}: a tied head needs the vocabulary and the width of the embedding")
    expected = _HEAD_OUTPUTS.get(head.kind, head.d_model if head.kind == "pooler" else head.num_outputs)
    _equal(head.num_outputs, expected, f"{name}.num_outputs", f"the number of outputs of a '{head.kind}' head")
    if head.labels and len(head.labels) != head.num_outputs:  # without names, outputs are numbered
        raise InputError(f"{name}.labels: has {len(head.labels)} names, and the head {head.num_outputs} outputs")
    if head.start_beams and (head.kind != "span" or head.norm is None or not model.has_token_types):
        raise InputError(f"{name}.start_beams: needs a span head with a norm, and a model with segments; set it to 0")
    if head.kind == "pooler" and head.dense_activation is None:
        raise InputError(f"{name}: a pooler needs dense_activation")


def is_bidirectional(stack: object) -> bool:
    """Return whether a stack is recurrent and reads in both directions."""
    return isinstance(stack, s.BiLM) or (isinstance(stack, s.RecurrentEncoder) and stack.bidirectional)


# ---- size -----------------------------------------------------------------------------------------------------------


def check_memory(model: s.Model) -> None:
    """Refuse a model whose weights do not fit into the memory of this machine."""
    num_bytes, available = min_parameters(model) * _BYTES_PER_PARAMETER, total_memory()
    if available is not None and num_bytes > available:
        size = f"at least {min_parameters(model):,} parameters, {num_bytes / 1e9:,.0f} GB"
        memory = f"this machine has {available / 1e9:,.0f} GB of memory"
        raise InputError(f"{model.family}: this model has {size}, and {memory}; make it smaller")


def min_parameters(model: s.Model) -> int:
    """Return the number of parameters in the large matrices of a model, which is nearly all."""
    total = sum(_stack_parameters(stack) for stack in (model.encoder, model.decoder) if stack is not None)
    embeddings = [model.source_embedding, None if model.share_embeddings else model.target_embedding]
    for embedding in embeddings:
        if isinstance(embedding, CharacterEmbedding):
            total += _character_parameters(embedding)
        elif isinstance(embedding, s.Embedding):
            positions = embedding.max_length if embedding.position == "learned" else 0
            total += (embedding.vocab_size + positions) * embedding.d_model
        elif embedding is not None:
            total += (embedding.patch_size**2 * embedding.num_channels + embedding.max_length) * embedding.d_model
    heads = (head for head in (model.head, model.aux_head) if head is not None and not head.tie_embeddings)
    return total + sum(head.num_outputs * head.d_model for head in heads)


def _character_parameters(embedding: CharacterEmbedding) -> int:
    groups = zip(embedding.filter_widths, embedding.filter_counts, strict=True)
    filters = sum(width * count for width, count in groups) + NUM_CHARACTERS
    highway = 2 * embedding.num_highway * embedding.num_filters
    return embedding.char_dim * filters + embedding.num_filters * (highway + embedding.d_model)


def _stack_parameters(stack: AnyStack) -> int:
    if isinstance(stack, s.BagOfWords):
        return 0
    if isinstance(stack, s.BiLM):
        return 2 * stack.layers * stack.hidden_size * (4 * 2 * stack.d_model + stack.d_model)
    if isinstance(stack, s.RecurrentStack):
        sizes = stack.layer_sizes
        inputs = (stack.d_model, *sizes[:-1])
        return sum(3 * size * (size + width) for size, width in zip(sizes, inputs, strict=True))
    if not isinstance(stack, s.TransformerStack):
        return 3 * stack.hidden_size * (stack.layers * stack.hidden_size + stack.d_model)
    block = stack.block
    attentions = [attention for attention in (block.self_attention, block.cross_attention) if attention is not None]
    per_block = sum(
        attention.heads
        * (attention.k_head_dim + attention.effective_v_head_dim)
        * (attention.query_dim + attention.effective_kv_dim)
        for attention in attentions
    )
    per_block += block.feedforward.d_model * block.feedforward.d_ff * (3 if block.feedforward.gated else 2)
    return stack.num_layers * per_block


@cache
def total_memory() -> int | None:
    """Return the memory of this machine, or of the container that limits it; None: it is not known."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        container_limit = Path("/sys/fs/cgroup/memory.max")
        text = container_limit.read_text().strip() if container_limit.is_file() else ""
    except (OSError, ValueError, AttributeError):  # another operating system
        return None
    return min(total, int(text)) if text.isdigit() else total
