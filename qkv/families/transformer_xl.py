"""Transformer-XL: a language model whose layers attend to the hidden states of preceding segments.

Dai et al. 2019, https://arxiv.org/abs/1901.02860. Positions are relative, so that a longer memory than in training can
be used; rare words have narrower vectors (adaptive embedding and softmax). `wt103_base` and `wt103_large` are the
released models of WikiText-103.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.errors import InputError
from qkv.families import gpt2
from qkv.families.hf.format import Architecture, ConfigKey, HFConfig, HFFormat, WhenSpec
from qkv.families.hf.rules import Drop, Rename, Rule, Split

PAPER = "Dai et al. 2019"
TOKENIZER_TEMPLATE = gpt2.TOKENIZER_TEMPLATE
_WT103_CUTOFFS = (20000, 40000, 200000)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for Transformer-XL."""

    d_model: int = 512
    """Width of the hidden states."""
    heads: int = 8
    """Number of attention heads per layer."""
    head_dim: int | None = None
    """Size of one head; null for d_model / heads."""
    layers: int = 12
    """Number of layers."""
    d_ff: int = 2048
    """Width of the feed-forward layers."""
    embed_dim: int | None = None
    """Width of the vectors of the most frequent tokens; null for d_model."""
    cutoffs: tuple[int, ...] = ()
    """First token of each cluster of rarer tokens; empty for one softmax over all tokens."""
    cluster_divisor: int = 1
    """Factor by which the vectors of a cluster are narrower than those of the one before."""
    memory_length: int = 512
    """Preceding tokens of a text whose hidden states each layer attends to as well; 0 for no memory."""
    max_distance: int | None = None
    """Distance between two tokens from which on all distances share an encoding; null for no limit."""
    window: int | None = None
    """Tokens that a token attends to at most, itself included; null for no limit."""
    norm_first: bool = False
    """Normalize the input of each sublayer (pre-norm) instead of its output."""
    dropout: float = 0.1
    """Dropout everywhere but on attention weights."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    norm_eps: float = 1e-5
    """Epsilon of the layer norms."""
    tie_embeddings: bool = True
    """Use the embedding matrices as output matrices of the language model head."""
    tie_projections: tuple[bool, ...] = ()
    """Whether each cluster's output uses the projection of its embedding; empty for all but the first."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; 0.02 suits widths of 512 and more."""
    max_length: int = 2**20
    """Longest input in tokens; relative positions have no limit of their own."""


PRESETS = {
    "small": Config(d_model=256, heads=4, layers=6, d_ff=1024, memory_length=256),
    "base": Config(),
    "wt103_base": Config(d_model=410, heads=10, layers=16, d_ff=2100, cutoffs=_WT103_CUTOFFS, memory_length=150),
    "wt103_large": Config(
        d_model=1024,
        heads=16,
        layers=18,
        d_ff=4096,
        cutoffs=_WT103_CUTOFFS,
        cluster_divisor=4,
        memory_length=1600,
        max_distance=1000,
        window=1600,
    ),
}


def decoder_spec(config: Config) -> s.TransformerStack:
    """Return the decoder's stack."""
    attention = s.Attention(
        query_dim=config.d_model,
        heads=config.heads,
        head_dim=config.head_dim,
        bias=False,
        dropout=config.attention_dropout,
        relative_positions=s.RelativePositions(max_distance=config.max_distance, window=config.window),
    )
    block = s.Block(
        self_attention=attention,
        feedforward=s.FeedForward(d_model=config.d_model, d_ff=config.d_ff, dropout=config.dropout),
        norm=s.Norm(eps=config.norm_eps),
        norm_first=config.norm_first,
        dropout=config.dropout,
    )
    return s.TransformerStack(
        block=block,
        num_layers=config.layers,
        causal=True,
        dropout=config.dropout,
        memory_length=config.memory_length,
    )


def make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Return each head by its name."""
    width, clusters = config.d_model, _clusters(config)
    tied = config.tie_projections or (False, *(True for _ in config.cutoffs))
    lm_head = s.Head(
        kind="lm",
        d_model=width,
        num_outputs=vocab_size,
        bias=True,
        tie_embeddings=config.tie_embeddings,
        clusters=clusters,
        tie_projections=() if clusters is None or not config.tie_embeddings else tied,
    )
    return {
        "lm": lm_head,
        "sequence": s.classification_head("sequence", width, labels, pool="last", bias=False),
        "token": s.classification_head("token", width, labels),
        "span": s.classification_head("span", width, labels),
        "choice": s.classification_head("choice", width, labels, pool="last"),
    }


def _clusters(config: Config) -> s.Clusters | None:
    if not config.cutoffs:
        return None
    embed_dim = config.d_model if config.embed_dim is None else config.embed_dim
    return s.Clusters(cutoffs=config.cutoffs, embed_dim=embed_dim, divisor=config.cluster_divisor)


def make_spec(
    config: Config,
    *,
    target_vocab_size: int = 267735,
    bos_id: int = -1,
    eos_id: int = -1,
    pad_id: int | None = None,
    head: str = "lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return a decoder with one of its heads; `backbone` has none."""
    embedding = s.Embedding(
        vocab_size=target_vocab_size,
        d_model=config.d_model,
        max_length=config.max_length,
        position="none",
        scale_by_sqrt_dim=True,
        dropout=config.dropout,
        clusters=_clusters(config),
    )
    return s.Model(
        family="transformer_xl",
        target_embedding=embedding,
        decoder=decoder_spec(config),
        head=s.select_head(make_heads(config, target_vocab_size, labels), head),
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        init_std=config.init_std,
    )


_ATTENTION = "decoder.block.self_attention"
HF_CONFIG_KEYS = (
    ConfigKey("vocab_size", "target_vocab_size", "target_embedding.vocab_size"),
    ConfigKey("d_model", "d_model", "target_embedding.d_model"),
    ConfigKey("n_head", "heads", f"{_ATTENTION}.heads"),
    ConfigKey("d_head", "head_dim", f"{_ATTENTION}.head_dim"),
    ConfigKey("n_layer", "layers", "decoder.num_layers"),
    ConfigKey("d_inner", "d_ff", "decoder.block.feedforward.d_ff"),
    ConfigKey("d_embed", "embed_dim", "target_embedding.clusters.embed_dim"),
    ConfigKey("cutoffs", "cutoffs", "target_embedding.clusters.cutoffs"),
    ConfigKey("div_val", "cluster_divisor", "target_embedding.clusters.divisor"),
    ConfigKey("mem_len", "memory_length", "decoder.memory_length"),
    ConfigKey("clamp_len", "max_distance", f"{_ATTENTION}.relative_positions.max_distance"),
    ConfigKey("qkv_window", "window", f"{_ATTENTION}.relative_positions.window"),  # Hugging Face: same_length
    ConfigKey("pre_lnorm", "norm_first", "decoder.block.norm_first"),
    ConfigKey("dropout", "dropout", "decoder.block.dropout"),
    ConfigKey("dropatt", "attention_dropout", f"{_ATTENTION}.dropout"),
    ConfigKey("layer_norm_epsilon", "norm_eps", "decoder.block.norm.eps"),
    ConfigKey("tie_word_embeddings", "tie_embeddings", "head.tie_embeddings", heads=("lm",)),
    ConfigKey("tie_projs", "tie_projections", "head.tie_projections", heads=("lm",)),
    ConfigKey("init_std", "init_std", "init_std"),
    ConfigKey("bos_token_id", "bos_id", "bos_id"),
    ConfigKey("eos_token_id", "eos_id", "eos_id"),
    ConfigKey("pad_token_id", "pad_id", "pad_id"),
    ConfigKey("qkv_length", "max_length", "target_embedding.max_length"),  # Hugging Face has no such key
)


def _from_hf_config(hf_config: HFConfig) -> HFConfig:
    """Rename what Hugging Face spells differently: no limit of distances is -1, a window has the memory's length."""
    resolved = dict(hf_config)
    if not isinstance(resolved.get("clamp_len"), int) or resolved["clamp_len"] <= 0:
        resolved.pop("clamp_len", None)
    if resolved.pop("same_length", True) and isinstance(resolved.get("mem_len"), int) and resolved["mem_len"] > 0:
        resolved.setdefault("qkv_window", resolved["mem_len"])
    for key in ("cutoffs", "tie_projs"):
        if isinstance(resolved.get(key), list):
            resolved[key] = tuple(resolved[key])
    if not resolved.get("cutoffs"):
        if resolved.get("d_embed", resolved.get("d_model")) != resolved.get("d_model"):
            raise InputError("d_embed: without cutoffs it must be d_model")
        for key in ("cutoffs", "d_embed", "div_val", "tie_projs"):
            resolved.pop(key, None)
    heads, width = resolved.get("n_head"), resolved.get("d_model")
    if isinstance(heads, int) and isinstance(width, int) and heads * resolved.get("d_head", 0) == width:
        del resolved["d_head"]
    return resolved


def _to_hf_config(hf_config: HFConfig) -> HFConfig:
    if hf_config["qkv_length"] == Config.max_length:
        del hf_config["qkv_length"]
    if hf_config["bos_token_id"] < 0:  # a vocabulary without BOS
        del hf_config["bos_token_id"]
    window = hf_config.get("qkv_window")
    hf_config["same_length"] = window is not None
    if window is not None and window == hf_config["mem_len"]:
        del hf_config["qkv_window"]
    hf_config.setdefault("clamp_len", -1)
    hf_config.setdefault("d_head", hf_config["d_model"] // hf_config["n_head"])
    hf_config |= {"d_embed": hf_config["d_model"], "div_val": 1} if not hf_config.get("cutoffs") else {}
    for key in ("cutoffs", "tie_projs"):
        hf_config[key] = list(hf_config.get(key, ()))
    return hf_config


def _layer_rules() -> tuple[Rule, ...]:
    hf_layer, qkv_block = "transformer.layers.{i}", "decoder.blocks.{i}"
    attention = f"{qkv_block}.self_attention"
    names = {
        "dec_attn.o_net.weight": "self_attention.o.weight",
        "dec_attn.r_net.weight": "self_attention.r.weight",
        "dec_attn.r_w_bias": "self_attention.content_bias",
        "dec_attn.r_r_bias": "self_attention.position_bias",
        "dec_attn.layer_norm.{p}": "self_attention_residual.norm.{p}",
        "pos_ff.CoreNet.0.{p}": "feedforward.up.{p}",
        "pos_ff.CoreNet.3.{p}": "feedforward.down.{p}",
        "pos_ff.layer_norm.{p}": "feedforward_residual.norm.{p}",
    }
    projections = tuple(f"{attention}.{name}.weight" for name in "qkv")
    return (
        Split(f"{hf_layer}.dec_attn.qkv_net.weight", projections),
        *(Rename(f"{hf_layer}.{hf_name}", f"{qkv_block}.{qkv_name}") for hf_name, qkv_name in names.items()),
    )


HF_FORMAT = HFFormat(
    model_type="transfo-xl",
    prefix="transformer.",
    architectures={
        "TransfoXLLMHeadModel": Architecture("lm"),
        "TransfoXLForSequenceClassification": Architecture("sequence"),
        "TransfoXLModel": Architecture("backbone", no_prefix=True),
    },
    config_keys=HF_CONFIG_KEYS,
    supported_values={"attn_type": 0},
    from_hf_config=_from_hf_config,
    to_hf_config=_to_hf_config,
    backbone_rules=(
        *_layer_rules(),
        Drop("transformer.pos_emb.inv_freq"),
        # biases that all layers share (untie_r false) are in each layer as well
        Drop("transformer.r_w_bias"),
        Drop("transformer.r_r_bias"),
    ),
    head_rules={"sequence": (Rename("score.weight", "head.linear.weight"),)},
    conditional_rules=(
        WhenSpec(
            "target_embedding.is_adaptive",
            True,
            (
                Rename("transformer.word_emb.emb_layers.{i}.weight", "target_embedding.tokens.tables.{i}.weight"),
                Rename("transformer.word_emb.emb_projs.{i}", "target_embedding.tokens.projections.{i}"),
            ),
        ),
        WhenSpec(
            "target_embedding.is_adaptive",
            False,
            (Rename("transformer.word_emb.emb_layers.0.weight", "target_embedding.tokens.weight"),),
        ),
        WhenSpec(
            "head.softmax",
            "adaptive",
            (
                Rename("crit.out_layers.{i}.{p}", "head.adaptive_softmax.tables.{i}.{p}"),
                Rename("crit.out_projs.{i}", "head.adaptive_softmax.projections.{i}"),
                Rename("crit.cluster_{p}", "head.adaptive_softmax.cluster_{p}"),
            ),
        ),
        WhenSpec("head.softmax", "plain", (Rename("crit.out_layers.0.{p}", "head.linear.{p}"),)),
    ),
)
