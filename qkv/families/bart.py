"""BART: the Transformer, pretrained to restore a text that was spoilt.

Lewis et al. 2020, https://arxiv.org/abs/1910.13461. It replaces these of the Transformer's fields: learned positions,
GELU, a norm behind the embedding, one table for source, target and output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.families import roberta, transformer
from qkv.weights.format import ACTIVATIONS, Architecture, Config, Format, Setting
from qkv.weights.rules import Drop, Rename, Tie

PAPER = "Lewis et al. 2020"


@dataclass(frozen=True, kw_only=True)
class Shape(transformer.Shape):
    """What a recipe may say of a BART, beside what it may say of a Transformer."""

    width: int = 1024
    heads: int = 16
    layers: int = 12
    hidden: int = 4096
    decoder_heads: int = 16
    decoder_layers: int = 12
    decoder_hidden: int = 4096
    activation: s.Activation = "gelu"
    activation_dropout: float = 0.0
    head_dropout: float = 0.0  # of the classifier
    position: Literal["sinusoid", "learned", "none"] = "learned"
    length: int = 1024
    scale: bool = False  # the embedding by the root of its width
    embedding_norm: bool = True
    shared: bool = True
    spread: float = 0.02


SIZES = {
    "base": Shape(width=768, heads=12, layers=6, hidden=3072, decoder_heads=12, decoder_layers=6, decoder_hidden=3072),
    "large": Shape(),
}


def spec(
    shape: Shape,
    *,
    source: int = 50265,
    target: int = 50265,
    start: int = 2,
    end: int = 2,
    pad: int = 1,
    head: str = "generation",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """An encoder-decoder under one of its heads; `body` is none."""
    plain = transformer.spec(shape, source=source, target=target, start=start, end=end)
    dropped = {"dropout": shape.head_dropout, "dropout_first": True}
    heads = {
        "generation": s.replace(plain.head, offset=True),
        "sequence": s.label_head("sequence", shape.width, labels, pool="last", dense="tanh", **dropped),
        "span": s.label_head("span", shape.width, labels),
    }
    fields = {"scale": shape.scale, "padding": pad, "norm": s.Norm() if shape.embedding_norm else None}
    fields["offset"] = 2 if shape.position == "learned" else 0
    return s.replace(
        plain,
        family="bart",
        source=s.replace(plain.source, **fields),
        encoder=_stack(plain.encoder, shape, shape.heads, shape.hidden),
        target=s.replace(plain.target, **fields),
        decoder=_stack(plain.decoder, shape, shape.decoder_heads, shape.decoder_hidden),
        head=s.chosen(heads, head),
        spread=shape.spread,
    )


def _stack(stack: s.Stack, shape: Shape, heads: int, hidden: int) -> s.Stack:
    """The Transformer's with its own heads and hidden width, and dropout behind the activation."""
    attention = s.replace(stack.block.attention, heads=heads)
    feedforward = s.replace(stack.block.feedforward, hidden=hidden, dropout=shape.activation_dropout)
    cross = None if stack.block.cross is None else attention
    return s.replace(stack, block=s.replace(stack.block, attention=attention, cross=cross, feedforward=feedforward))


TEMPLATE = roberta.TEMPLATE

SETTINGS = (
    Setting("vocab_size", "source", "source.vocabulary"),
    Setting("d_model", "width", "source.width"),
    Setting("encoder_layers", "layers", "encoder.depth"),
    Setting("decoder_layers", "decoder_layers", "decoder.depth"),
    Setting("encoder_attention_heads", "heads", "encoder.block.attention.heads"),
    Setting("decoder_attention_heads", "decoder_heads", "decoder.block.attention.heads"),
    Setting("encoder_ffn_dim", "hidden", "encoder.block.feedforward.hidden"),
    Setting("decoder_ffn_dim", "decoder_hidden", "decoder.block.feedforward.hidden"),
    Setting("activation_function", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    Setting("dropout", "dropout", "encoder.block.dropout"),
    Setting("attention_dropout", "attention_dropout", "encoder.block.attention.dropout"),
    Setting("activation_dropout", "activation_dropout", "encoder.block.feedforward.dropout"),
    Setting("max_position_embeddings", "length", "source.length"),
    Setting("scale_embedding", "scale", "source.scale"),
    Setting("init_std", "spread", "spread"),
    Setting("decoder_start_token_id", "start", "start"),
    Setting("eos_token_id", "end", "end"),
)
OWN_SETTINGS = (
    Setting("vocab_size", "target", "target.vocabulary"),
    Setting("pad_token_id", "pad", "source.padding"),
    Setting("classifier_dropout", "head_dropout", "head.dropout", only=("sequence",)),
)
FIXED = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "is_decoder": False, "is_encoder_decoder": True}
FIXED |= {"normalize_before": False, "add_final_layer_norm": False, "add_bias_logits": False}  # of old configs

NAMES = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.out_proj": "attention.o",
    "self_attn_layer_norm": "around_attention.norm",
    "encoder_attn.q_proj": "cross.q",
    "encoder_attn.k_proj": "cross.k",
    "encoder_attn.v_proj": "cross.v",
    "encoder_attn.out_proj": "cross.o",
    "encoder_attn_layer_norm": "around_cross.norm",
    "fc1": "feedforward.up",
    "fc2": "feedforward.down",
    "final_layer_norm": "around_feedforward.norm",
}
LAYERS = tuple(
    Rename(f"model.{side}.layers.{{i}}.{theirs}.{{p}}", f"{side}.blocks.{{i}}.{ours}.{{p}}")
    for side in ("encoder", "decoder")
    for theirs, ours in NAMES.items()
)
ONE_TABLE = (
    Rename("model.shared.weight", "source.tokens.weight"),
    Tie("model.encoder.embed_tokens.weight", "model.shared.weight"),
    Tie("model.decoder.embed_tokens.weight", "model.shared.weight"),
)
EMBEDDINGS = (
    Rename("model.encoder.embed_positions.weight", "source.position.weight"),
    Rename("model.decoder.embed_positions.weight", "target.position.weight"),
    Rename("model.encoder.layernorm_embedding.{p}", "source.norm.{p}"),
    Rename("model.decoder.layernorm_embedding.{p}", "target.norm.{p}"),
    Drop("model.{side}.version"),  # a number that fairseq left
)
GENERATION = (Rename("lm_head.weight", "head.linear.weight"), Rename("final_logits_bias", "head.offset"))


def ending(config: Config) -> Config:
    """Their class would take another checkpoint's end for the one that a limit forces."""
    return config | {"forced_eos_token_id": config["eos_token_id"]}


HUGGING_FACE = Format(
    model_type="bart",
    prefix="model.",
    architectures={
        "BartForConditionalGeneration": Architecture("generation"),
        "BartForSequenceClassification": Architecture("sequence"),
        "BartForQuestionAnswering": Architecture("span"),
        "BartModel": Architecture("body", bare=True),
    },
    settings=(*SETTINGS, *OWN_SETTINGS),
    fixed={**FIXED, "normalize_embedding": True, "tie_word_embeddings": True},
    write=ending,
    body=(*ONE_TABLE, *EMBEDDINGS, *LAYERS),
    heads={
        "generation": GENERATION,
        "sequence": (
            Rename("classification_head.dense.{p}", "head.dense.{p}"),
            Rename("classification_head.out_proj.{p}", "head.linear.{p}"),
        ),
        "span": (Rename("qa_outputs.{p}", "head.linear.{p}"),),
    },
)
