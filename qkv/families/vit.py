"""ViT: a Transformer encoder over an image's patches, behind one vector that stands for the whole.

Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929. The sizes are the paper's, for images of 224 pixels a side.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.errors import InputError
from qkv.weights.format import ACTIVATIONS, Architecture, Config, Format, Setting
from qkv.weights.rules import Drop, Rename, Rule, Tie

PAPER = "Dosovitskiy et al. 2021"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a recipe may say of a ViT."""

    width: int = 768
    heads: int = 12
    layers: int = 12
    hidden: int = 3072
    activation: s.Activation = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    image: int = 224  # pixels a side
    patch: int = 16
    channels: int = 3
    biased: bool = True  # query, key and value; the output always is
    epsilon: float = 1e-12
    spread: float = 0.02


SIZES = {
    "base_16": Shape(),
    "base_32": Shape(patch=32),
    "large_16": Shape(width=1024, heads=16, layers=24, hidden=4096),
    "large_32": Shape(width=1024, heads=16, layers=24, hidden=4096, patch=32),
    "huge_14": Shape(width=1280, heads=16, layers=32, hidden=5120, patch=14),
}


def spec(shape: Shape, *, head: str = "sequence", labels: tuple[str, ...] = ("no", "yes")) -> s.Model:
    """An encoder of images under one of its heads, which read the first vector; `body` is none."""
    width = shape.width
    block = s.Block(
        attention=s.Attention(
            width=width, heads=shape.heads, bias=shape.biased, output_bias=True, dropout=shape.attention_dropout
        ),
        feedforward=s.FeedForward(width=width, hidden=shape.hidden, activation=shape.activation),
        norm=s.Norm(epsilon=shape.epsilon),
        norm_first=True,
        dropout=shape.dropout,
    )
    heads = {
        "sequence": s.label_head("sequence", width, labels),
        "pooler": s.label_head("pooler", width, labels, dense="tanh"),
    }
    return s.Model(
        family="vit",
        source=s.Patches(
            image=shape.image, patch=shape.patch, channels=shape.channels, width=width, dropout=shape.dropout
        ),
        encoder=s.Stack(block=block, depth=shape.layers, final_norm=True),
        head=s.chosen(heads, head),
        spread=shape.spread,
    )


SETTINGS = (
    Setting("hidden_size", "width", "source.width"),
    Setting("num_hidden_layers", "layers", "encoder.depth"),
    Setting("num_attention_heads", "heads", "encoder.block.attention.heads"),
    Setting("intermediate_size", "hidden", "encoder.block.feedforward.hidden"),
    Setting("hidden_act", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    Setting("hidden_dropout_prob", "dropout", "encoder.block.dropout"),
    Setting("attention_probs_dropout_prob", "attention_dropout", "encoder.block.attention.dropout"),
    Setting("image_size", "image", "source.image"),
    Setting("patch_size", "patch", "source.patch"),
    Setting("num_channels", "channels", "source.channels"),
    Setting("qkv_bias", "biased", "encoder.block.attention.bias"),
    Setting("layer_norm_eps", "epsilon", "encoder.block.norm.epsilon"),
    Setting("initializer_range", "spread", "spread"),
)


def read(config: Config) -> Config:
    """With one number where theirs may be height and width; sizes that we have no field for are refused."""
    for key in ("image_size", "patch_size"):
        sides = config.get(key)
        if isinstance(sides, list) and len(sides) in (1, 2):
            if sides[0] != sides[-1]:
                raise InputError(f"config.json: {key} is {sides}; of vit qkv has square images and patches only")
            config[key] = sides[0]
    width, pooled = config.get("hidden_size") or Shape.width, config.get("pooler_output_size")
    if pooled not in (None, width):
        raise InputError(f"config.json: pooler_output_size is {pooled}; of vit qkv has hidden_size, {width}, only")
    return config


LAYER = {  # in a file, in their model since version 5, in ours
    "attention.attention.query": ("attention.q_proj", "attention.q"),
    "attention.attention.key": ("attention.k_proj", "attention.k"),
    "attention.attention.value": ("attention.v_proj", "attention.v"),
    "attention.output.dense": ("attention.o_proj", "attention.o"),
    "layernorm_before": ("layernorm_before", "around_attention.norm"),
    "intermediate.dense": ("mlp.fc1", "feedforward.up"),
    "output.dense": ("mlp.fc2", "feedforward.down"),
    "layernorm_after": ("layernorm_after", "around_feedforward.norm"),
}
FILED = "vit.encoder.layer.{{i}}.{}.{{p}}"
BODY: tuple[Rule, ...] = (
    Rename("vit.embeddings.cls_token", "source.whole"),
    Rename("vit.embeddings.position_embeddings", "source.position"),
    Rename("vit.embeddings.patch_embeddings.projection.{p}", "source.projection.{p}"),
    Drop("vit.embeddings.mask_token"),
    *(Rename(FILED.format(old), f"encoder.blocks.{{i}}.{ours}.{{p}}") for old, (_, ours) in LAYER.items()),
    *(Tie(f"vit.layers.{{i}}.{new}.{{p}}", FILED.format(old)) for old, (new, _) in LAYER.items()),
    Rename("vit.layernorm.{p}", "encoder.norm.{p}"),
)

HUGGING_FACE = Format(
    model_type="vit",
    prefix="vit.",
    architectures={
        "ViTForImageClassification": Architecture("sequence"),
        "ViTModel": Architecture("pooler", bare=True),
    },
    settings=SETTINGS,
    fixed={"pooler_act": "tanh"},
    body=BODY,
    heads={
        "sequence": (Rename("classifier.{p}", "head.linear.{p}"),),
        "pooler": (Rename("vit.pooler.dense.{p}", "head.dense.{p}"),),
        "masked_image": (Drop("decoder.{i}.{p}"),),  # a body pretrained so may serve another head
    },
    read=read,
)
