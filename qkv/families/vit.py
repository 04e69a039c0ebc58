"""ViT: a Transformer encoder over the patches of an image and a [CLS] vector.

Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929. The sizes are the paper's, for images of 224 x 224 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.errors import InputError, quote
from qkv.families.hf.format import ACTIVATIONS, Architecture, ConfigKey, HFConfig, HFFormat
from qkv.families.hf.rules import Drop, Rename, Rule, Tie

PAPER = "Dosovitskiy et al. 2021"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for ViT."""

    d_model: int = 768
    """Width of the hidden states."""
    heads: int = 12
    """Number of attention heads per layer."""
    layers: int = 12
    """Number of layers."""
    d_ff: int = 3072
    """Width of the feed-forward layers."""
    activation: s.Activation = "gelu"
    """Activation of the feed-forward layers."""
    dropout: float = 0.0
    """Dropout on the embeddings and on the output of every sublayer."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    image_size: int = 224
    """Height and width of the images in pixels."""
    patch_size: int = 16
    """Height and width of a patch in pixels."""
    num_channels: int = 3
    """Number of color channels."""
    qkv_bias: bool = True
    """Biases of the query, key and value projections; the output projection always has one."""
    norm_eps: float = 1e-12
    """Epsilon of the layer norms."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; 0.02 suits widths of 768 and more."""


PRESETS = {
    "base_16": Config(),
    "base_32": Config(patch_size=32),
    "large_16": Config(d_model=1024, heads=16, layers=24, d_ff=4096),
    "large_32": Config(d_model=1024, heads=16, layers=24, d_ff=4096, patch_size=32),
    "huge_14": Config(d_model=1280, heads=16, layers=32, d_ff=5120, patch_size=14),
}


def make_spec(config: Config, *, head: str = "sequence", labels: tuple[str, ...] = ("no", "yes")) -> s.Model:
    """Return an encoder of images with one of its heads, which read the [CLS] vector; `backbone` has none."""
    d_model = config.d_model
    block = s.Block(
        self_attention=s.Attention(
            query_dim=d_model,
            heads=config.heads,
            bias=config.qkv_bias,
            output_bias=True,
            dropout=config.attention_dropout,
        ),
        feedforward=s.FeedForward(d_model=d_model, d_ff=config.d_ff, activation=config.activation),
        norm=s.Norm(eps=config.norm_eps),
        norm_first=True,
        dropout=config.dropout,
    )
    heads = {
        "sequence": s.classification_head("sequence", d_model, labels),
        "pooler": s.classification_head("pooler", d_model, labels, dense_activation="tanh"),
    }
    return s.Model(
        family="vit",
        source_embedding=s.PatchEmbedding(
            image_size=config.image_size,
            patch_size=config.patch_size,
            num_channels=config.num_channels,
            d_model=d_model,
            dropout=config.dropout,
        ),
        encoder=s.TransformerStack(block=block, num_layers=config.layers, final_norm=True),
        head=s.select_head(heads, head),
        init_std=config.init_std,
    )


HF_CONFIG_KEYS = (
    ConfigKey("hidden_size", "d_model", "source_embedding.d_model"),
    ConfigKey("num_hidden_layers", "layers", "encoder.num_layers"),
    ConfigKey("num_attention_heads", "heads", "encoder.block.self_attention.heads"),
    ConfigKey("intermediate_size", "d_ff", "encoder.block.feedforward.d_ff"),
    ConfigKey("hidden_act", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    ConfigKey("hidden_dropout_prob", "dropout", "encoder.block.dropout"),
    ConfigKey("attention_probs_dropout_prob", "attention_dropout", "encoder.block.self_attention.dropout"),
    ConfigKey("image_size", "image_size", "source_embedding.image_size"),
    ConfigKey("patch_size", "patch_size", "source_embedding.patch_size"),
    ConfigKey("num_channels", "num_channels", "source_embedding.num_channels"),
    ConfigKey("qkv_bias", "qkv_bias", "encoder.block.self_attention.bias"),
    ConfigKey("layer_norm_eps", "norm_eps", "encoder.block.norm.eps"),
    ConfigKey("initializer_range", "init_std", "init_std"),
)


def from_hf_config(hf_config: HFConfig) -> HFConfig:
    """Replace [height, width] by one number; sizes that differ are refused."""
    for key in ("image_size", "patch_size"):
        sides = hf_config.get(key)
        if isinstance(sides, list) and len(sides) in (1, 2):
            if sides[0] != sides[-1]:
                raise InputError(f"config.json: {key} is {quote(sides)}; qkv supports only square images and patches")
            hf_config[key] = sides[0]
    hidden_size, pooler_size = hf_config.get("hidden_size") or Config.d_model, hf_config.get("pooler_output_size")
    if pooler_size not in (None, hidden_size):
        supported_value = f"qkv supports only hidden_size, {quote(hidden_size)}"
        raise InputError(f"config.json: pooler_output_size is {quote(pooler_size)}; {supported_value}")
    return hf_config


LAYER_NAMES = {  # name in files -> (name in transformers 5 models, our name)
    "attention.attention.query": ("attention.q_proj", "self_attention.q"),
    "attention.attention.key": ("attention.k_proj", "self_attention.k"),
    "attention.attention.value": ("attention.v_proj", "self_attention.v"),
    "attention.output.dense": ("attention.o_proj", "self_attention.o"),
    "layernorm_before": ("layernorm_before", "self_attention_residual.norm"),
    "intermediate.dense": ("mlp.fc1", "feedforward.up"),
    "output.dense": ("mlp.fc2", "feedforward.down"),
    "layernorm_after": ("layernorm_after", "feedforward_residual.norm"),
}
HF_LAYER_PATTERN = "vit.encoder.layer.{{i}}.{}.{{p}}"
BACKBONE_RULES: tuple[Rule, ...] = (
    Rename("vit.embeddings.cls_token", "source_embedding.cls_token"),
    Rename("vit.embeddings.position_embeddings", "source_embedding.position"),
    Rename("vit.embeddings.patch_embeddings.projection.{p}", "source_embedding.projection.{p}"),
    Drop("vit.embeddings.mask_token"),
    *(
        Rename(HF_LAYER_PATTERN.format(hf_name), f"encoder.blocks.{{i}}.{qkv_name}.{{p}}")
        for hf_name, (_, qkv_name) in LAYER_NAMES.items()
    ),
    *(
        Tie(f"vit.layers.{{i}}.{hf_v5_name}.{{p}}", HF_LAYER_PATTERN.format(hf_name))
        for hf_name, (hf_v5_name, _) in LAYER_NAMES.items()
    ),
    Rename("vit.layernorm.{p}", "encoder.norm.{p}"),
)

HF_FORMAT = HFFormat(
    model_type="vit",
    prefix="vit.",
    architectures={
        "ViTForImageClassification": Architecture("sequence"),
        "ViTModel": Architecture("pooler", no_prefix=True),
    },
    config_keys=HF_CONFIG_KEYS,
    supported_values={"pooler_act": "tanh"},
    backbone_rules=BACKBONE_RULES,
    head_rules={
        "sequence": (Rename("classifier.{p}", "head.linear.{p}"),),
        "pooler": (Rename("vit.pooler.dense.{p}", "head.dense.{p}"),),
        "masked_image": (Drop("decoder.{i}.{p}"),),  # such a backbone can be used with another head
    },
    from_hf_config=from_hf_config,
)
