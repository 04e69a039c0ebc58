"""T5: an encoder-decoder for text-to-text tasks with relative position biases.

Raffel et al. 2020, https://arxiv.org/abs/1910.10683. The v1.1 sizes have gated feed-forward layers (Shazeer 2020,
https://arxiv.org/abs/2002.05202) and an untied output layer, as Flan-T5 does (Chung et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from qkv import spec as s
from qkv.errors import InputError
from qkv.families.hf.format import ACTIVATIONS, Architecture, ConfigKey, HFConfig, HFFormat, WhenSpec
from qkv.families.hf.rules import Drop, Rename, Rule, Tie
from qkv.tokenization.template import Template

if TYPE_CHECKING:
    from torch import Tensor

PAPER = "Raffel et al. 2020"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for T5."""

    d_model: int = 512
    """Width of the hidden states."""
    heads: int = 8
    """Number of attention heads per layer."""
    d_kv: int = 64
    """Size of one head's query, key and value."""
    layers: int = 6
    """Number of encoder layers."""
    decoder_layers: int | None = None
    """Number of decoder layers; null for the value of `layers`."""
    d_ff: int = 2048
    """Width of the feed-forward layers."""
    activation: s.Activation = "relu"
    """Activation of the feed-forward layers."""
    gated: bool = False
    """Use gated feed-forward layers (Shazeer 2020)."""
    dropout: float = 0.1
    """Dropout everywhere but in classification heads, on attention weights too."""
    classifier_dropout: float = 0.0
    """Dropout in the heads for sequence and token classification."""
    num_buckets: int = 32
    """Number of buckets of the relative position bias."""
    max_distance: int = 128
    """Distance from which on all positions share the last bucket."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output matrix."""
    head_input_scale: float | None = None
    """Factor on the input of the output layer; null for 1 / sqrt(d_model)."""
    max_length: int = 2**20
    """Longest source and longest target in tokens; relative positions have no limit of their own."""


def _gated_config(d_model: int, heads: int, layers: int, d_ff: int) -> Config:
    config = Config(d_model=d_model, heads=heads, layers=layers, d_ff=d_ff)
    return s.replace(config, activation="gelu_tanh", gated=True, tie_embeddings=False, head_input_scale=1.0)


PRESETS = {
    "small": Config(),
    "base": Config(d_model=768, heads=12, layers=12, d_ff=3072),
    "large": Config(d_model=1024, heads=16, layers=24, d_ff=4096),
    "3b": Config(d_model=1024, heads=32, d_kv=128, layers=24, d_ff=16384),
    "11b": Config(d_model=1024, heads=128, d_kv=128, layers=24, d_ff=65536),
    "v1.1-small": _gated_config(512, 6, 8, 1024),
    "v1.1-base": _gated_config(768, 12, 12, 2048),
    "v1.1-large": _gated_config(1024, 16, 24, 2816),
    "v1.1-xl": _gated_config(2048, 32, 24, 5120),
    "v1.1-xxl": _gated_config(4096, 64, 24, 10240),
}


def encoder_spec(config: Config) -> s.TransformerStack:
    """Return the encoder's stack."""
    attention = s.Attention(
        query_dim=config.d_model,
        heads=config.heads,
        head_dim=config.d_kv,
        score_fn="dot",
        bias=False,
        dropout=config.dropout,
    )
    block = s.Block(
        self_attention=attention,
        feedforward=s.FeedForward(
            d_model=config.d_model,
            d_ff=config.d_ff,
            activation=config.activation,
            gated=config.gated,
            bias=False,
            dropout=config.dropout,
        ),
        norm=s.Norm(kind="rms", eps=config.norm_eps),
        norm_first=True,
        dropout=config.dropout,
    )
    position_bias = s.RelativePositionBias(num_buckets=config.num_buckets, max_distance=config.max_distance)
    return s.TransformerStack(
        block=block,
        num_layers=config.layers,
        final_norm=True,
        dropout=config.dropout,
        relative_position_bias=position_bias,
    )


def make_spec(
    config: Config,
    *,
    source_vocab_size: int = 32128,
    target_vocab_size: int = 32128,
    bos_id: int = 0,
    eos_id: int = 1,
    head: str = "seq2seq_lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return an encoder-decoder with one of its heads; `encoder` and `token` use the encoder alone."""
    stack = encoder_spec(config)
    embedding = s.Embedding(
        vocab_size=source_vocab_size,
        d_model=config.d_model,
        max_length=config.max_length,
        position="none",
        dropout=config.dropout,
    )
    encoder_model = s.Model(family="t5", source_embedding=embedding, encoder=stack, bos_id=bos_id, eos_id=eos_id)
    if head == "encoder":
        return encoder_model
    head_spec = s.select_head(_make_heads(config, target_vocab_size, labels), head)
    if head == "token":
        return s.replace(encoder_model, head=head_spec)
    decoder_block = s.replace(stack.block, cross_attention=stack.block.self_attention)
    return s.replace(
        encoder_model,
        target_embedding=s.replace(embedding, vocab_size=target_vocab_size),
        decoder=s.replace(stack, block=decoder_block, num_layers=config.decoder_layers or config.layers, causal=True),
        share_embeddings=True,
        head=head_spec,
    )


def _make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    d_model, dropout = config.d_model, config.classifier_dropout
    input_scale = d_model**-0.5 if config.head_input_scale is None else config.head_input_scale
    return {
        "seq2seq_lm": s.Head(
            kind="lm",
            d_model=d_model,
            num_outputs=vocab_size,
            tie_embeddings=config.tie_embeddings,
            input_scale=input_scale,
        ),
        "sequence": s.classification_head(
            "sequence",
            d_model,
            labels,
            pool="last",
            dense_activation="tanh",
            dropout=dropout,
            dropout_before_dense=True,
        ),
        "token": s.classification_head("token", d_model, labels, dropout=dropout),
        "span": s.classification_head("span", d_model, labels),
    }


TOKENIZER_TEMPLATE = Template(
    kind="unigram",
    special_tokens={"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    single="$A </s>",
    pair="$A </s> $B </s>",
    num_sentinels=100,
    hf_classes=("T5Tokenizer",),
)

HF_CONFIG_KEYS = (
    ConfigKey("vocab_size", "source_vocab_size", "source_embedding.vocab_size"),
    ConfigKey("vocab_size", "target_vocab_size", "target_embedding.vocab_size"),
    ConfigKey("d_model", "d_model", "source_embedding.d_model"),
    ConfigKey("d_kv", "d_kv", "encoder.block.self_attention.head_dim"),
    ConfigKey("d_ff", "d_ff", "encoder.block.feedforward.d_ff"),
    ConfigKey("num_layers", "layers", "encoder.num_layers"),
    ConfigKey("num_decoder_layers", "decoder_layers", "decoder.num_layers"),
    ConfigKey("num_heads", "heads", "encoder.block.self_attention.heads"),
    ConfigKey("relative_attention_num_buckets", "num_buckets", "encoder.relative_position_bias.num_buckets"),
    ConfigKey("relative_attention_max_distance", "max_distance", "encoder.relative_position_bias.max_distance"),
    ConfigKey("dropout_rate", "dropout", "encoder.block.dropout"),
    ConfigKey("classifier_dropout", "classifier_dropout", "head.dropout", heads=("sequence", "token")),
    ConfigKey("layer_norm_epsilon", "norm_eps", "encoder.block.norm.eps"),
    ConfigKey("dense_act_fn", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    ConfigKey("is_gated_act", "gated", "encoder.block.feedforward.gated"),
    ConfigKey("tied", "tie_embeddings", "head.tie_embeddings", heads=("seq2seq_lm",)),
    ConfigKey("head_scale", "head_input_scale", "head.input_scale", heads=("seq2seq_lm",)),
    ConfigKey("qkv_length", "max_length", "source_embedding.max_length"),  # Hugging Face has no such key
    ConfigKey("decoder_start_token_id", "bos_id", "bos_id"),
    ConfigKey("eos_token_id", "eos_id", "eos_id"),
)


def _infer_from_weights(hf_config: HFConfig, tensors: Mapping[str, Tensor]) -> HFConfig:
    """Mark the output layer as untied if its weights differ; transformers 5 always writes it as tied."""
    lm_head, embedding = tensors.get("lm_head.weight"), tensors.get("shared.weight")
    is_tied = lm_head is None or embedding is None or lm_head.equal(embedding)
    return hf_config if is_tied else hf_config | {"tied": False}


def _from_hf_config(hf_config: HFConfig) -> HFConfig:
    feed_forward_proj = str(hf_config.get("feed_forward_proj", "relu"))
    tie_embeddings = hf_config.get("tie_word_embeddings") is not False
    activation = "gelu_new" if feed_forward_proj == "gated-gelu" else feed_forward_proj.removeprefix("gated-")
    is_gated = feed_forward_proj.startswith("gated-")
    resolved = {"dense_act_fn": activation, "is_gated_act": is_gated, "tied": tie_embeddings} | hf_config
    # v1.1 is neither tied nor scaled; older configs have one key for both
    scale_outputs = hf_config.get("scale_decoder_outputs", tie_embeddings)
    return resolved | {"head_scale": None if scale_outputs else 1.0}


def _to_hf_config(hf_config: HFConfig) -> HFConfig:
    activation, gated, d_model = hf_config["dense_act_fn"], hf_config["is_gated_act"], hf_config["d_model"]
    tie_embeddings, input_scale = hf_config.pop("tied", True), hf_config.pop("head_scale", d_model**-0.5)
    if (gated and activation == "gelu") or input_scale not in (1.0, d_model**-0.5):
        raise InputError(
            "t5: Hugging Face has no exact GELU gate, and no other scale before the output than 1/sqrt(d_model)"
        )
    if hf_config["qkv_length"] == Config.max_length:
        del hf_config["qkv_length"]
    activation_name = "gelu" if gated and activation == "gelu_new" else activation
    return hf_config | {
        "feed_forward_proj": f"gated-{activation_name}" if gated else activation_name,
        "pad_token_id": hf_config["decoder_start_token_id"],
        "tie_word_embeddings": tie_embeddings or input_scale != 1.0,
        "scale_decoder_outputs": input_scale != 1.0,
    }


def _sublayer_rules(layer: str, hf_name: str, qkv_name: str, weight_names: Mapping[str, str]) -> tuple[Rename, ...]:
    """Return the rules of one sublayer of every layer and of the norm before it; `layer` is "encoder.0" and so on."""
    side, sublayer_index = layer.split(".")
    hf_layer, qkv_block = f"transformer.{side}.block.{{i}}.layer.{sublayer_index}", f"{side}.blocks.{{i}}"
    weights = (
        Rename(f"{hf_layer}.{hf_name}.{hf_weight}.weight", f"{qkv_block}.{qkv_name}.{qkv_weight}.weight")
        for hf_weight, qkv_weight in weight_names.items()
    )
    return (Rename(f"{hf_layer}.layer_norm.weight", f"{qkv_block}.{qkv_name}_residual.norm.weight"), *weights)


def _feedforward_rules(weight_names: Mapping[str, str]) -> tuple[Rename, ...]:
    rules = (
        _sublayer_rules(layer, "DenseReluDense", "feedforward", weight_names) for layer in ("encoder.1", "decoder.2")
    )
    return tuple(chain.from_iterable(rules))


QKVO = {name: name for name in "qkvo"}
RELATIVE_BIAS_KEY = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"  # all layers use the first one's
BACKBONE_RULES: tuple[Rule, ...] = (
    Rename("transformer.shared.weight", "source_embedding.tokens.weight"),
    Tie("transformer.encoder.embed_tokens.weight", "transformer.shared.weight"),
    Tie("transformer.decoder.embed_tokens.weight", "transformer.shared.weight"),
    Rename(f"transformer.encoder.{RELATIVE_BIAS_KEY}", "encoder.relative_position_bias.weight"),
    Rename(f"transformer.decoder.{RELATIVE_BIAS_KEY}", "decoder.relative_position_bias.weight"),
    Drop("transformer.decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),  # never used
    *_sublayer_rules("encoder.0", "SelfAttention", "self_attention", QKVO),
    *_sublayer_rules("decoder.0", "SelfAttention", "self_attention", QKVO),
    *_sublayer_rules("decoder.1", "EncDecAttention", "cross_attention", QKVO),
    Rename("transformer.encoder.final_layer_norm.weight", "encoder.norm.weight"),
    Rename("transformer.decoder.final_layer_norm.weight", "decoder.norm.weight"),
)
GATED_PATH = "encoder.block.feedforward.gated"

HF_FORMAT = HFFormat(
    model_type="t5",
    prefix="transformer.",
    architectures={
        "T5ForConditionalGeneration": Architecture("seq2seq_lm", no_prefix=True),
        "T5WithLMHeadModel": Architecture("seq2seq_lm", no_prefix=True),  # its name in early releases
        "T5ForSequenceClassification": Architecture("sequence"),
        "T5ForTokenClassification": Architecture("token"),
        "T5ForQuestionAnswering": Architecture("span", no_prefix=True),
        "T5EncoderModel": Architecture("encoder", no_prefix=True),
        "T5Model": Architecture("backbone", no_prefix=True),
    },
    config_keys=HF_CONFIG_KEYS,
    supported_values={"is_decoder": False},
    infer_from_weights=_infer_from_weights,
    from_hf_config=_from_hf_config,
    to_hf_config=_to_hf_config,
    backbone_rules=BACKBONE_RULES,
    conditional_rules=(
        WhenSpec(GATED_PATH, False, _feedforward_rules({"wi": "up", "wo": "down"})),
        WhenSpec(GATED_PATH, True, _feedforward_rules({"wi_0": "gate", "wi_1": "up", "wo": "down"})),
    ),
    head_rules={
        "seq2seq_lm": (Rename("lm_head.weight", "head.linear.weight"),),
        "sequence": (
            Rename("classification_head.dense.{p}", "head.dense.{p}"),
            Rename("classification_head.out_proj.{p}", "head.linear.{p}"),
        ),
        "token": (Rename("classifier.{p}", "head.linear.{p}"),),
        "span": (Rename("qa_outputs.{p}", "head.linear.{p}"),),
    },
)
