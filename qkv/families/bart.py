"""BART: a Transformer pretrained as a denoising autoencoder.

Lewis et al. 2020, https://arxiv.org/abs/1910.13461. It differs from the Transformer in learned positions, GELU, a norm
after the embedding, and one embedding table for source, target and output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.families import roberta, transformer
from qkv.families.hf.format import ACTIVATIONS, Architecture, ConfigKey, HFConfig, HFFormat
from qkv.families.hf.rules import Drop, Rename, Tie

PAPER = "Lewis et al. 2020"


@dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    """Keys of the recipe's `model` section for BART: those of the Transformer, and its own."""

    d_model: int = 1024
    """Width of the hidden states."""
    heads: int = 16
    """Number of attention heads per encoder layer."""
    layers: int = 12
    """Number of encoder layers."""
    d_ff: int = 4096
    """Width of the encoder's feed-forward layers."""
    decoder_heads: int = 16
    """Number of attention heads per decoder layer."""
    decoder_layers: int = 12
    """Number of decoder layers."""
    decoder_d_ff: int = 4096
    """Width of the decoder's feed-forward layers."""
    activation: s.Activation = "gelu"
    """Activation of the feed-forward layers."""
    activation_dropout: float = 0.0
    """Dropout after the activation of the feed-forward layers."""
    classifier_dropout: float = 0.0
    """Dropout in the head for sequence classification."""
    position: Literal["sinusoid", "learned", "none"] = "learned"
    """Position scheme: a learned table, sinusoids, or none."""
    max_length: int = 1024
    """Longest source and longest target in tokens."""
    scale_embedding: bool = False
    """Multiply the embeddings by the square root of d_model."""
    embedding_norm: bool = True
    """Normalize the embeddings."""
    share_embeddings: bool = True
    """Use one embedding table for source, target and output."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; 0.02 suits widths of 768 and more."""


PRESETS = {
    "base": Config(d_model=768, heads=12, layers=6, d_ff=3072, decoder_heads=12, decoder_layers=6, decoder_d_ff=3072),
    "large": Config(),
}


def make_spec(
    config: Config,
    *,
    source_vocab_size: int = 50265,
    target_vocab_size: int = 50265,
    bos_id: int = 2,
    eos_id: int = 2,
    pad_id: int = 1,
    head: str = "seq2seq_lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return an encoder-decoder with one of its heads; `backbone` has none."""
    transformer_spec = transformer.make_spec(
        config,
        source_vocab_size=source_vocab_size,
        target_vocab_size=target_vocab_size,
        bos_id=bos_id,
        eos_id=eos_id,
    )
    assert transformer_spec.head is not None
    heads = {
        "seq2seq_lm": s.replace(transformer_spec.head, final_logits_bias=True),
        "sequence": s.classification_head(
            "sequence",
            config.d_model,
            labels,
            pool="last",
            dense_activation="tanh",
            dropout=config.classifier_dropout,
            dropout_before_dense=True,
        ),
        "span": s.classification_head("span", config.d_model, labels),
    }
    return s.replace(
        transformer_spec,
        family="bart",
        source_embedding=_adapt_embedding(transformer_spec.source_embedding, config, pad_id),
        encoder=_adapt_stack(transformer_spec.encoder, config, config.heads, config.d_ff),
        target_embedding=_adapt_embedding(transformer_spec.target_embedding, config, pad_id),
        decoder=_adapt_stack(transformer_spec.decoder, config, config.decoder_heads, config.decoder_d_ff),
        head=s.select_head(heads, head),
        init_std=config.init_std,
    )


def _adapt_embedding(embedding: s.Embedding | s.PatchEmbedding | None, config: Config, pad_id: int) -> s.Embedding:
    """Return the Transformer's embedding with BART's norm, scale and position offset."""
    assert isinstance(embedding, s.Embedding)
    return s.replace(
        embedding,
        scale_by_sqrt_dim=config.scale_embedding,
        padding_idx=pad_id,
        norm=s.Norm() if config.embedding_norm else None,
        position_offset=2 if config.position == "learned" else 0,
    )


def _adapt_stack(stack: object, config: Config, heads: int, d_ff: int) -> s.TransformerStack:
    """Return the Transformer's stack with its own number of heads and d_ff, and dropout after the activation."""
    assert isinstance(stack, s.TransformerStack)
    attention = s.replace(stack.block.self_attention, heads=heads)
    feedforward = s.replace(stack.block.feedforward, d_ff=d_ff, dropout=config.activation_dropout)
    cross_attention = None if stack.block.cross_attention is None else attention
    block = s.replace(stack.block, self_attention=attention, cross_attention=cross_attention, feedforward=feedforward)
    return s.replace(stack, block=block)


TOKENIZER_TEMPLATE = roberta.TOKENIZER_TEMPLATE

HF_CONFIG_KEYS = (
    ConfigKey("vocab_size", "source_vocab_size", "source_embedding.vocab_size"),
    ConfigKey("d_model", "d_model", "source_embedding.d_model"),
    ConfigKey("encoder_layers", "layers", "encoder.num_layers"),
    ConfigKey("decoder_layers", "decoder_layers", "decoder.num_layers"),
    ConfigKey("encoder_attention_heads", "heads", "encoder.block.self_attention.heads"),
    ConfigKey("decoder_attention_heads", "decoder_heads", "decoder.block.self_attention.heads"),
    ConfigKey("encoder_ffn_dim", "d_ff", "encoder.block.feedforward.d_ff"),
    ConfigKey("decoder_ffn_dim", "decoder_d_ff", "decoder.block.feedforward.d_ff"),
    ConfigKey("activation_function", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    ConfigKey("dropout", "dropout", "encoder.block.dropout"),
    ConfigKey("attention_dropout", "attention_dropout", "encoder.block.self_attention.dropout"),
    ConfigKey("activation_dropout", "activation_dropout", "encoder.block.feedforward.dropout"),
    ConfigKey("max_position_embeddings", "max_length", "source_embedding.max_length"),
    ConfigKey("scale_embedding", "scale_embedding", "source_embedding.scale_by_sqrt_dim"),
    ConfigKey("init_std", "init_std", "init_std"),
    ConfigKey("decoder_start_token_id", "bos_id", "bos_id"),
    ConfigKey("eos_token_id", "eos_id", "eos_id"),
)
BART_CONFIG_KEYS = (
    ConfigKey("vocab_size", "target_vocab_size", "target_embedding.vocab_size"),
    ConfigKey("pad_token_id", "pad_id", "source_embedding.padding_idx"),
    ConfigKey("classifier_dropout", "classifier_dropout", "head.dropout", heads=("sequence",)),
)
HF_SUPPORTED_VALUES = {
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "is_decoder": False,
    "is_encoder_decoder": True,
}
HF_SUPPORTED_VALUES |= {
    "normalize_before": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
}  # old configs

LAYER_NAMES = {
    "self_attn.q_proj": "self_attention.q",
    "self_attn.k_proj": "self_attention.k",
    "self_attn.v_proj": "self_attention.v",
    "self_attn.out_proj": "self_attention.o",
    "self_attn_layer_norm": "self_attention_residual.norm",
    "encoder_attn.q_proj": "cross_attention.q",
    "encoder_attn.k_proj": "cross_attention.k",
    "encoder_attn.v_proj": "cross_attention.v",
    "encoder_attn.out_proj": "cross_attention.o",
    "encoder_attn_layer_norm": "cross_attention_residual.norm",
    "fc1": "feedforward.up",
    "fc2": "feedforward.down",
    "final_layer_norm": "feedforward_residual.norm",
}
LAYER_RULES = tuple(
    Rename(f"model.{side}.layers.{{i}}.{hf_name}.{{p}}", f"{side}.blocks.{{i}}.{qkv_name}.{{p}}")
    for side in ("encoder", "decoder")
    for hf_name, qkv_name in LAYER_NAMES.items()
)
SHARED_EMBEDDING_RULES = (
    Rename("model.shared.weight", "source_embedding.tokens.weight"),
    Tie("model.encoder.embed_tokens.weight", "model.shared.weight"),
    Tie("model.decoder.embed_tokens.weight", "model.shared.weight"),
)
EMBEDDING_RULES = (
    Rename("model.encoder.embed_positions.weight", "source_embedding.position.weight"),
    Rename("model.decoder.embed_positions.weight", "target_embedding.position.weight"),
    Rename("model.encoder.layernorm_embedding.{p}", "source_embedding.norm.{p}"),
    Rename("model.decoder.layernorm_embedding.{p}", "target_embedding.norm.{p}"),
    Drop("model.{side}.version"),  # a number that fairseq saved
)
LM_HEAD_RULES = (
    Rename("lm_head.weight", "head.linear.weight"),
    Rename("final_logits_bias", "head.final_logits_bias"),
)


def set_forced_eos(hf_config: HFConfig) -> HFConfig:
    """Set the token that transformers forces at the maximum length; its default is another checkpoint's EOS."""
    return hf_config | {"forced_eos_token_id": hf_config["eos_token_id"]}


HF_FORMAT = HFFormat(
    model_type="bart",
    prefix="model.",
    architectures={
        "BartForConditionalGeneration": Architecture("seq2seq_lm"),
        "BartForSequenceClassification": Architecture("sequence"),
        "BartForQuestionAnswering": Architecture("span"),
        "BartModel": Architecture("backbone", no_prefix=True),
    },
    config_keys=(*HF_CONFIG_KEYS, *BART_CONFIG_KEYS),
    supported_values={**HF_SUPPORTED_VALUES, "normalize_embedding": True, "tie_word_embeddings": True},
    to_hf_config=set_forced_eos,
    backbone_rules=(*SHARED_EMBEDDING_RULES, *EMBEDDING_RULES, *LAYER_RULES),
    head_rules={
        "seq2seq_lm": LM_HEAD_RULES,
        "sequence": (
            Rename("classification_head.dense.{p}", "head.dense.{p}"),
            Rename("classification_head.out_proj.{p}", "head.linear.{p}"),
        ),
        "span": (Rename("qa_outputs.{p}", "head.linear.{p}"),),
    },
)
