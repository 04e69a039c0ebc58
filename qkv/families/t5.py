"""T5: every task is text in and text out; where a token stands is said by distances alone.

Raffel et al. 2020, https://arxiv.org/abs/1910.10683. The sizes named v1.1 are those of Shazeer's gated form
(https://arxiv.org/abs/2002.05202) with an output of its own, which Flan-T5 has too (Chung et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from qkv import spec as s
from qkv.errors import InputError
from qkv.text.template import Template
from qkv.weights.format import ACTIVATIONS, Architecture, Config, Format, Only, Setting
from qkv.weights.rules import Drop, Rename, Tie

PAPER = "Raffel et al. 2020"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a recipe may say of a T5."""

    width: int = 512
    heads: int = 8
    key: int = 64  # of one head
    layers: int = 6
    decoder_layers: int | None = None  # None: as many as the encoder's
    hidden: int = 2048
    activation: s.Activation = "relu"
    gated: bool = False
    dropout: float = 0.1
    head_dropout: float = 0.0  # of the classifiers
    buckets: int = 32
    distance: int = 128
    epsilon: float = 1e-6
    tied: bool = True
    scale: float | None = None  # of what the output layer reads; None: 1 over the root of the width
    length: int = 2**20  # distances have no end, so that this stops nothing but a mistake


def _gated(width: int, heads: int, layers: int, hidden: int) -> Shape:
    shape = Shape(width=width, heads=heads, layers=layers, hidden=hidden)
    return s.replace(shape, activation="gelu_tanh", gated=True, tied=False, scale=1.0)


SIZES = {
    "small": Shape(),
    "base": Shape(width=768, heads=12, layers=12, hidden=3072),
    "large": Shape(width=1024, heads=16, layers=24, hidden=4096),
    "3b": Shape(width=1024, heads=32, key=128, layers=24, hidden=16384),
    "11b": Shape(width=1024, heads=128, key=128, layers=24, hidden=65536),
    "v1.1-small": _gated(512, 6, 8, 1024),
    "v1.1-base": _gated(768, 12, 12, 2048),
    "v1.1-large": _gated(1024, 16, 24, 2816),
    "v1.1-xl": _gated(2048, 32, 24, 5120),
    "v1.1-xxl": _gated(4096, 64, 24, 10240),
}


def spec(
    shape: Shape,
    *,
    source: int = 32128,
    target: int = 32128,
    start: int = 0,
    end: int = 1,
    head: str = "generation",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """An encoder-decoder under one of its heads; `encoder` is that half alone, and so is what `token` stands on."""
    attention = s.Attention(
        width=shape.width, heads=shape.heads, key=shape.key, score="dot", bias=False, dropout=shape.dropout
    )
    block = s.Block(
        attention=attention,
        feedforward=s.FeedForward(
            width=shape.width,
            hidden=shape.hidden,
            activation=shape.activation,
            gated=shape.gated,
            bias=False,
            dropout=shape.dropout,
        ),
        norm=s.Norm(kind="rms", epsilon=shape.epsilon),
        norm_first=True,
        dropout=shape.dropout,
    )
    distances = s.Relative(buckets=shape.buckets, distance=shape.distance)
    stack = s.Stack(block=block, depth=shape.layers, final_norm=True, dropout=shape.dropout, relative=distances)
    embed = s.Embed(vocabulary=source, width=shape.width, length=shape.length, position="none", dropout=shape.dropout)
    half = s.Model(family="t5", source=embed, encoder=stack, start=start, end=end)
    if head == "encoder":
        return half
    made = s.chosen(_heads(shape, target, labels), head)
    if head == "token":
        return s.replace(half, head=made)
    block, depth = s.replace(block, cross=attention), shape.decoder_layers or shape.layers
    return s.replace(
        half,
        target=s.replace(embed, vocabulary=target),
        decoder=s.replace(stack, block=block, depth=depth, causal=True),
        shared=True,
        head=made,
    )


def _heads(shape: Shape, target: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    width, drop = shape.width, shape.head_dropout
    scale = width**-0.5 if shape.scale is None else shape.scale
    return {
        "generation": s.Head(kind="lm", width=width, outputs=target, tied=shape.tied, scale=scale),
        "sequence": s.label_head(
            "sequence", width, labels, pool="last", dense="tanh", dropout=drop, dropout_first=True
        ),
        "token": s.label_head("token", width, labels, dropout=drop),
        "span": s.label_head("span", width, labels),
    }


TEMPLATE = Template(
    kind="unigram",
    tokens={"pad": "<pad>", "end": "</s>", "unk": "<unk>"},
    single="$A </s>",
    pair="$A </s> $B </s>",
    sentinels=100,
    classes=("T5Tokenizer",),
)

SETTINGS = (
    Setting("vocab_size", "source", "source.vocabulary"),
    Setting("vocab_size", "target", "target.vocabulary"),
    Setting("d_model", "width", "source.width"),
    Setting("d_kv", "key", "encoder.block.attention.key"),
    Setting("d_ff", "hidden", "encoder.block.feedforward.hidden"),
    Setting("num_layers", "layers", "encoder.depth"),
    Setting("num_decoder_layers", "decoder_layers", "decoder.depth"),
    Setting("num_heads", "heads", "encoder.block.attention.heads"),
    Setting("relative_attention_num_buckets", "buckets", "encoder.relative.buckets"),
    Setting("relative_attention_max_distance", "distance", "encoder.relative.distance"),
    Setting("dropout_rate", "dropout", "encoder.block.dropout"),
    Setting("classifier_dropout", "head_dropout", "head.dropout", only=("sequence", "token")),
    Setting("layer_norm_epsilon", "epsilon", "encoder.block.norm.epsilon"),
    Setting("dense_act_fn", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    Setting("is_gated_act", "gated", "encoder.block.feedforward.gated"),
    Setting("tied", "tied", "head.tied", only=("generation",)),
    Setting("head_scale", "scale", "head.scale", only=("generation",)),
    Setting("qkv_length", "length", "source.length"),  # they have no word for it
    Setting("decoder_start_token_id", "start", "start"),
    Setting("eos_token_id", "end", "end"),
)


def _look(config: Config, tensors: Mapping[str, Tensor]) -> Config:
    """transformers 5 writes that all are tied, and ties what is equal."""
    own, shared = tensors.get("lm_head.weight"), tensors.get("shared.weight")
    return config if own is None or shared is None or own.equal(shared) else config | {"tied": False}


def _read(config: Config) -> Config:
    said, tied = str(config.get("feed_forward_proj", "relu")), config.get("tie_word_embeddings") is not False
    activation = "gelu_new" if said == "gated-gelu" else said.removeprefix("gated-")
    found = {"dense_act_fn": activation, "is_gated_act": said.startswith("gated-"), "tied": tied} | config
    scaled = config.get("scale_decoder_outputs", tied)  # 1.1 is neither tied nor scaled, and once one key said both
    return found | {"head_scale": None if scaled else 1.0}


def _write(config: Config) -> Config:
    activation, gated, width = config["dense_act_fn"], config["is_gated_act"], config["d_model"]
    tied, scale = config.pop("tied", True), config.pop("head_scale", width**-0.5)
    if (gated and activation == "gelu") or scale not in (1.0, width**-0.5):
        raise InputError("t5: Hugging Face has no gate by the exact GELU, and one scale only before the output")
    if config["qkv_length"] == Shape.length:
        del config["qkv_length"]
    named = "gelu" if gated and activation == "gelu_new" else activation
    said = {"feed_forward_proj": f"gated-{named}" if gated else named, "pad_token_id": config["decoder_start_token_id"]}
    return config | said | {"tie_word_embeddings": tied or scale != 1.0, "scale_decoder_outputs": scale != 1.0}


def _part(layer: str, theirs: str, ours: str, names: Mapping[str, str]) -> tuple[Rename, ...]:
    """One part of every layer of a side, and the norm before it."""
    side, number = layer.split(".")
    layer, block = f"transformer.{side}.block.{{i}}.layer.{number}", f"{side}.blocks.{{i}}"
    weights = (Rename(f"{layer}.{theirs}.{a}.weight", f"{block}.{ours}.{b}.weight") for a, b in names.items())
    return (Rename(f"{layer}.layer_norm.weight", f"{block}.around_{ours}.norm.weight"), *weights)


def _feedforward(names: Mapping[str, str]) -> tuple[Rename, ...]:
    parts = (_part(layer, "DenseReluDense", "feedforward", names) for layer in ("encoder.1", "decoder.2"))
    return tuple(rule for part in parts for rule in part)


LOOK = {name: name for name in "qkvo"}
FIRST = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"  # the first layer's serves all
BODY = (
    Rename("transformer.shared.weight", "source.tokens.weight"),
    Tie("transformer.encoder.embed_tokens.weight", "transformer.shared.weight"),
    Tie("transformer.decoder.embed_tokens.weight", "transformer.shared.weight"),
    Rename(f"transformer.encoder.{FIRST}", "encoder.relative.weight"),
    Rename(f"transformer.decoder.{FIRST}", "decoder.relative.weight"),
    Drop("transformer.decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),  # never used
    *_part("encoder.0", "SelfAttention", "attention", LOOK),
    *_part("decoder.0", "SelfAttention", "attention", LOOK),
    *_part("decoder.1", "EncDecAttention", "cross", LOOK),
    Rename("transformer.encoder.final_layer_norm.weight", "encoder.norm.weight"),
    Rename("transformer.decoder.final_layer_norm.weight", "decoder.norm.weight"),
)
GATED = "encoder.block.feedforward.gated"

HUGGING_FACE = Format(
    model_type="t5",
    prefix="transformer.",
    architectures={
        "T5ForConditionalGeneration": Architecture("generation", bare=True),
        "T5WithLMHeadModel": Architecture("generation", bare=True),  # its first name
        "T5ForSequenceClassification": Architecture("sequence"),
        "T5ForTokenClassification": Architecture("token"),
        "T5ForQuestionAnswering": Architecture("span", bare=True),
        "T5EncoderModel": Architecture("encoder", bare=True),
        "T5Model": Architecture("body", bare=True),
    },
    settings=SETTINGS,
    fixed={"is_decoder": False},
    look=_look,
    read=_read,
    write=_write,
    body=BODY,
    only=(
        Only(GATED, False, _feedforward({"wi": "up", "wo": "down"})),
        Only(GATED, True, _feedforward({"wi_0": "gate", "wi_1": "up", "wo": "down"})),
    ),
    heads={
        "generation": (Rename("lm_head.weight", "head.linear.weight"),),
        "sequence": (
            Rename("classification_head.dense.{p}", "head.dense.{p}"),
            Rename("classification_head.out_proj.{p}", "head.linear.{p}"),
        ),
        "token": (Rename("classifier.{p}", "head.linear.{p}"),),
        "span": (Rename("qa_outputs.{p}", "head.linear.{p}"),),
    },
)
