"""XLNet: an encoder with relative positions and memory, pretrained by permutation language modeling.

Yang et al. 2019, https://arxiv.org/abs/1906.08237. `base` and `large` are the released sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.families.hf.format import ACTIVATIONS, Architecture, ConfigKey, HFConfig, HFFormat
from qkv.families.hf.rules import HeadMatrix, Rename, Reshape, Rule
from qkv.tokenization.template import Template

PAPER = "Yang et al. 2019"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for XLNet."""

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
    dropout: float = 0.1
    """Dropout everywhere but in classification heads, on attention weights too."""
    classifier_dropout: float = 0.1
    """Dropout before the output layer of heads that read whole sequences."""
    summary: Literal["last", "first", "mean"] = "last"
    """Vector of a sequence for classification heads: that of its last token (`<cls>`), of its first, or the mean."""
    start_beams: int = 5
    """Number of the best starts of an answer for which ends are scored, in the head `span_beam`."""
    max_distance: int | None = None
    """Distance between two tokens from which on all distances share an encoding; null for no limit."""
    memory_length: int = 0
    """Preceding tokens of a text whose hidden states each layer attends to as well; 0 for no memory."""
    reuse_length: int | None = None
    """Tokens of a segment, from its start, that enter the memory; null for all."""
    norm_eps: float = 1e-12
    """Epsilon of the layer norms."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output matrix of the language model head."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; 0.02 suits widths of 768 and more."""
    max_length: int = 2**20
    """Longest input in tokens; relative positions have no limit of their own."""


PRESETS = {
    "base": Config(),
    "large": Config(d_model=1024, heads=16, layers=24, d_ff=4096),
}


def encoder_spec(config: Config) -> s.TransformerStack:
    """Return the encoder's stack."""
    attention = s.Attention(
        query_dim=config.d_model,
        heads=config.heads,
        bias=False,
        dropout=config.dropout,
        relative_positions=s.RelativePositions(max_distance=config.max_distance, segments=True),
    )
    block = s.Block(
        self_attention=attention,
        feedforward=s.FeedForward(
            d_model=config.d_model, d_ff=config.d_ff, activation=config.activation, dropout=config.dropout
        ),
        norm=s.Norm(eps=config.norm_eps),
        dropout=config.dropout,
    )
    return s.TransformerStack(
        block=block,
        num_layers=config.layers,
        dropout=config.dropout,
        memory_length=config.memory_length,
        reuse_length=config.reuse_length,
    )


def make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Return each head by its name."""
    d_model = config.d_model
    pool: Literal["last", "mean"] | None = None if config.summary == "first" else config.summary
    lm_head = s.Head(
        kind="lm", d_model=d_model, num_outputs=vocab_size, bias=True, tie_embeddings=config.tie_embeddings
    )
    pooled = {"pool": pool, "dense_activation": "tanh", "dropout": config.classifier_dropout}
    return {
        "lm": lm_head,
        "sequence": s.classification_head("sequence", d_model, labels, **pooled),
        "choice": s.classification_head("choice", d_model, labels, **pooled),
        "token": s.classification_head("token", d_model, labels),
        "span": s.classification_head("span", d_model, labels),
        "span_beam": s.classification_head(
            "span", d_model, labels, start_beams=config.start_beams, norm=s.Norm(eps=config.norm_eps)
        ),
    }


def make_spec(
    config: Config, *, source_vocab_size: int = 32000, head: str = "lm", labels: tuple[str, ...] = ("no", "yes")
) -> s.Model:
    """Return an encoder with one of its heads; `backbone` has none."""
    return s.Model(
        family="xlnet",
        source_embedding=s.Embedding(
            vocab_size=source_vocab_size,
            d_model=config.d_model,
            max_length=config.max_length,
            position="none",
            query_vector=True,
            dropout=config.dropout,
        ),
        encoder=encoder_spec(config),
        head=s.select_head(make_heads(config, source_vocab_size, labels), head),
        init_std=config.init_std,
    )


TOKENIZER_TEMPLATE = Template(
    kind="unigram",
    special_tokens={
        "unk": "<unk>",
        "bos": "<s>",
        "eos": "</s>",
        "cls": "<cls>",
        "sep": "<sep>",
        "pad": "<pad>",
        "mask": "<mask>",
    },
    additional_special_tokens=("<eop>", "<eod>"),
    single="$A <sep> <cls>:2",
    pair="$A <sep> $B:1 <sep>:1 <cls>:2",
    mask_lstrip=True,
    strip_accents=True,
    hf_classes=("XLNetTokenizer",),
)

_POOLED_HEADS = ("sequence", "choice")
_SUMMARIES = {"last": "last", "first": "first", "mean": "mean", "cls_index": "last"}  # the last token is `<cls>`
HF_CONFIG_KEYS = (
    ConfigKey("vocab_size", "source_vocab_size", "source_embedding.vocab_size"),
    ConfigKey("d_model", "d_model", "source_embedding.d_model"),
    ConfigKey("n_layer", "layers", "encoder.num_layers"),
    ConfigKey("n_head", "heads", "encoder.block.self_attention.heads"),
    ConfigKey("d_inner", "d_ff", "encoder.block.feedforward.d_ff"),
    ConfigKey("ff_activation", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    ConfigKey("dropout", "dropout", "encoder.block.dropout"),
    ConfigKey("summary_last_dropout", "classifier_dropout", "head.dropout", heads=_POOLED_HEADS),
    ConfigKey("summary_type", "summary", "head.pool", _SUMMARIES, heads=_POOLED_HEADS, none_value="first"),
    ConfigKey("start_n_top", "start_beams", "head.start_beams", heads=("span_beam",)),
    ConfigKey("clamp_len", "max_distance", "encoder.block.self_attention.relative_positions.max_distance"),
    ConfigKey("mem_len", "memory_length", "encoder.memory_length"),
    ConfigKey("reuse_len", "reuse_length", "encoder.reuse_length"),
    ConfigKey("layer_norm_eps", "norm_eps", "encoder.block.norm.eps"),
    ConfigKey("tie_word_embeddings", "tie_embeddings", "head.tie_embeddings", heads=("lm",)),
    ConfigKey("initializer_range", "init_std", "init_std"),
    ConfigKey("qkv_length", "max_length", "source_embedding.max_length"),  # Hugging Face has no such key
)


def _from_hf_config(hf_config: HFConfig) -> HFConfig:
    """Rename what Hugging Face spells differently: no limit of distances is -1, no reuse 0, no memory null."""
    resolved = dict(hf_config)
    clamp_len = resolved.get("clamp_len")
    if isinstance(clamp_len, int) and clamp_len <= 0:
        del resolved["clamp_len"]
    if resolved.get("reuse_len") == 0:
        resolved.pop("reuse_len")
    return resolved


def _to_hf_config(hf_config: HFConfig) -> HFConfig:
    if hf_config["qkv_length"] == Config.max_length:
        del hf_config["qkv_length"]
    hf_config.setdefault("clamp_len", -1)
    if not hf_config["mem_len"]:
        hf_config["mem_len"] = None
    hf_config["d_head"] = hf_config["d_model"] // hf_config["n_head"]
    return hf_config


def _layer_rules() -> tuple[Rule, ...]:
    hf_layer, qkv_block = "transformer.layer.{i}", "encoder.blocks.{i}"
    projections = (
        HeadMatrix(f"{hf_layer}.rel_attn.{name}", f"{qkv_block}.self_attention.{name}.weight") for name in "qkvr"
    )
    names = {
        "rel_attn.r_w_bias": "self_attention.content_bias",
        "rel_attn.r_r_bias": "self_attention.position_bias",
        "rel_attn.r_s_bias": "self_attention.segment_bias",
        "rel_attn.seg_embed": "self_attention.segment_embedding",
        "rel_attn.layer_norm.{p}": "self_attention_residual.norm.{p}",
        "ff.layer_1.{p}": "feedforward.up.{p}",
        "ff.layer_2.{p}": "feedforward.down.{p}",
        "ff.layer_norm.{p}": "feedforward_residual.norm.{p}",
    }
    return (
        *projections,
        HeadMatrix(f"{hf_layer}.rel_attn.o", f"{qkv_block}.self_attention.o.weight", is_output=True),
        *(Rename(f"{hf_layer}.{hf_name}", f"{qkv_block}.{qkv_name}") for hf_name, qkv_name in names.items()),
    )


_POOLED_RULES = (
    Rename("sequence_summary.summary.{p}", "head.dense.{p}"),
    Rename("logits_proj.{p}", "head.linear.{p}"),
)

HF_FORMAT = HFFormat(
    model_type="xlnet",
    prefix="transformer.",
    architectures={
        "XLNetLMHeadModel": Architecture("lm"),
        "XLNetForSequenceClassification": Architecture("sequence"),
        "XLNetForTokenClassification": Architecture("token"),
        "XLNetForQuestionAnsweringSimple": Architecture("span"),
        "XLNetForQuestionAnswering": Architecture("span_beam"),
        "XLNetForMultipleChoice": Architecture("choice"),
        "XLNetModel": Architecture("backbone", no_prefix=True),
    },
    config_keys=HF_CONFIG_KEYS,
    supported_values={
        "attn_type": "bi",
        "bi_data": False,
        "same_length": False,
        "untie_r": True,
        "summary_use_proj": True,
        "summary_activation": "tanh",
    },
    from_hf_config=_from_hf_config,
    to_hf_config=_to_hf_config,
    backbone_rules=(
        Rename("transformer.word_embedding.weight", "source_embedding.tokens.weight"),
        Reshape("transformer.mask_emb", "source_embedding.query_vector", hf_shape=(1, 1, -1)),
        *_layer_rules(),
    ),
    head_rules={
        "lm": (Rename("lm_loss.{p}", "head.linear.{p}"),),
        "sequence": _POOLED_RULES,
        "choice": _POOLED_RULES,
        "token": (Rename("classifier.{p}", "head.linear.{p}"),),
        "span": (Rename("qa_outputs.{p}", "head.linear.{p}"),),
        "span_beam": (
            Rename("start_logits.dense.{p}", "head.linear.{p}"),
            Rename("end_logits.dense_0.{p}", "head.end_dense.{p}"),
            Rename("end_logits.LayerNorm.{p}", "head.end_norm.{p}"),
            Rename("end_logits.dense_1.{p}", "head.end_linear.{p}"),
            Rename("answer_class.dense_0.{p}", "head.answer_dense.{p}"),
            Rename("answer_class.dense_1.{p}", "head.answer_linear.{p}"),
        ),
    },
)
