"""GPT: a decoder pretrained as a language model, then fine-tuned with a head that reads the last token.

Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training".
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.families.hf.format import Architecture, ConfigKey, HFConfig, HFFormat
from qkv.families.hf.rules import Drop, Rename, Rule, Split, Transpose
from qkv.tokenization.template import Template

PAPER = "Radford et al. 2018"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for GPT."""

    d_model: int = 768
    """Width of the hidden states."""
    heads: int = 12
    """Number of attention heads per layer."""
    layers: int = 12
    """Number of layers."""
    activation: s.Activation = "gelu_tanh"
    """Activation of the feed-forward layers."""
    dropout: float = 0.1
    """Dropout on the output of every sublayer."""
    attention_dropout: float = 0.1
    """Dropout on the attention weights."""
    embed_dropout: float = 0.1
    """Dropout on the embeddings."""
    summary_dropout: float = 0.1
    """Dropout in the multiple-choice head."""
    max_length: int = 512
    """Longest sequence in tokens, prompt and continuation together."""
    norm_eps: float = 1e-5
    """Epsilon of the layer norms."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output matrix of the language model head."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; 0.02 suits widths of 768 and more."""


PRESETS = {"base": Config()}


def backbone_spec(config: Config, vocab_size: int) -> s.Model:
    """Return the model without a head."""
    block = s.Block(
        self_attention=s.Attention(query_dim=config.d_model, heads=config.heads, dropout=config.attention_dropout),
        feedforward=s.FeedForward(d_model=config.d_model, d_ff=4 * config.d_model, activation=config.activation),
        norm=s.Norm(eps=config.norm_eps),
        dropout=config.dropout,
    )
    return s.Model(
        family="gpt",
        target_embedding=s.Embedding(
            vocab_size=vocab_size,
            d_model=config.d_model,
            max_length=config.max_length,
            position="learned",
            dropout=config.embed_dropout,
        ),
        decoder=s.TransformerStack(block=block, num_layers=config.layers, causal=True),
        init_std=config.init_std,
    )


def make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Return each head by its name; heads for whole sequences read the last token, which attends to all others."""
    d_model = config.d_model
    return {
        "lm": s.Head(kind="lm", d_model=d_model, num_outputs=vocab_size, tie_embeddings=config.tie_embeddings),
        "sequence": s.classification_head("sequence", d_model, labels, pool="last", bias=False),
        "choice": s.classification_head("choice", d_model, labels, pool="last", dropout=config.summary_dropout),
    }


def with_head(model: s.Model, available_heads: dict[str, s.Head], head: str) -> s.Model:
    """Return a backbone with one of the heads; `double_heads` has two (LM and choice), `backbone` has none."""
    if head == "double_heads":
        return s.replace(model, head=available_heads["lm"], aux_head=available_heads["choice"])
    return s.replace(model, head=s.select_head(available_heads, head))


def make_spec(
    config: Config,
    *,
    target_vocab_size: int = 40478,
    bos_id: int = -1,  # the paper's vocabulary has neither BOS nor EOS
    eos_id: int = -1,
    pad_id: int | None = None,
    head: str = "lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return a decoder with one of its heads; see `with_head`."""
    model = s.replace(backbone_spec(config, target_vocab_size), bos_id=bos_id, eos_id=eos_id, pad_id=pad_id)
    return with_head(model, make_heads(config, target_vocab_size, labels), head)


TOKENIZER_TEMPLATE = Template(
    kind="word_bpe", special_tokens={"unk": "<unk>"}, lowercase=True, hf_classes=("OpenAIGPTTokenizer",)
)

HF_CONFIG_KEYS = (
    ConfigKey("vocab_size", "target_vocab_size", "target_embedding.vocab_size"),
    ConfigKey("n_positions", "max_length", "target_embedding.max_length"),
    ConfigKey("n_embd", "d_model", "target_embedding.d_model"),
    ConfigKey("n_layer", "layers", "decoder.num_layers"),
    ConfigKey("n_head", "heads", "decoder.block.self_attention.heads"),
    ConfigKey("resid_pdrop", "dropout", "decoder.block.dropout"),
    ConfigKey("attn_pdrop", "attention_dropout", "decoder.block.self_attention.dropout"),
    ConfigKey("embd_pdrop", "embed_dropout", "target_embedding.dropout"),
    ConfigKey("summary_first_dropout", "summary_dropout", "aux_head.dropout", heads=("double_heads",)),
    ConfigKey("layer_norm_epsilon", "norm_eps", "decoder.block.norm.eps"),
    ConfigKey("tie_word_embeddings", "tie_embeddings", "head.tie_embeddings", heads=("lm", "double_heads")),
    ConfigKey("initializer_range", "init_std", "init_std"),
    ConfigKey("bos_token_id", "bos_id", "bos_id"),
    ConfigKey("eos_token_id", "eos_id", "eos_id"),
    ConfigKey("pad_token_id", "pad_id", "pad_id"),
)
# how the multiple-choice head reads a sequence
SUMMARY_VALUES = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_activation": None,
    "summary_proj_to_labels": True,
}
OPTIONAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id")


def from_hf_config(hf_config: HFConfig) -> HFConfig:
    """Replace a missing BOS or EOS token (null) by our -1."""
    return hf_config | {key: -1 for key in OPTIONAL_TOKEN_KEYS if key in hf_config and hf_config[key] is None}


def to_hf_config(hf_config: HFConfig) -> HFConfig:
    """Invert `from_hf_config`."""
    return hf_config | {key: None for key in OPTIONAL_TOKEN_KEYS if hf_config[key] == -1}


def layer_rules(hf_prefix: str = "transformer.h.{i}", qkv_prefix: str = "decoder.blocks.{i}") -> tuple[Rule, ...]:
    """Return the weight rules of a stack of layers, whose matrices are [in, out]; GPT-2 has the same names."""
    return (
        Split(
            f"{hf_prefix}.attn.c_attn.{{p}}",
            tuple(f"{qkv_prefix}.self_attention.{x}.{{p}}" for x in "qkv"),
            transposed=True,
        ),
        Transpose(f"{hf_prefix}.attn.c_proj.{{p}}", f"{qkv_prefix}.self_attention.o.{{p}}"),
        Transpose(f"{hf_prefix}.mlp.c_fc.{{p}}", f"{qkv_prefix}.feedforward.up.{{p}}"),
        Transpose(f"{hf_prefix}.mlp.c_proj.{{p}}", f"{qkv_prefix}.feedforward.down.{{p}}"),
        Rename(f"{hf_prefix}.ln_1.{{p}}", f"{qkv_prefix}.self_attention_residual.norm.{{p}}"),
        Rename(f"{hf_prefix}.ln_2.{{p}}", f"{qkv_prefix}.feedforward_residual.norm.{{p}}"),
        Drop(f"{hf_prefix}.attn.bias"),  # the causal mask, in old files
        Drop(f"{hf_prefix}.attn.masked_bias"),
    )


LM_HEAD_RULE = Rename("lm_head.weight", "head.linear.weight")
HEAD_RULES = {
    "lm": (LM_HEAD_RULE,),
    "double_heads": (LM_HEAD_RULE, Rename("multiple_choice_head.summary.{p}", "aux_head.linear.{p}")),
    "sequence": (Rename("score.weight", "head.linear.weight"),),
}

HF_FORMAT = HFFormat(
    model_type="openai-gpt",
    prefix="transformer.",
    architectures={
        "OpenAIGPTLMHeadModel": Architecture("lm"),
        "OpenAIGPTDoubleHeadsModel": Architecture("double_heads"),
        "OpenAIGPTForSequenceClassification": Architecture("sequence"),
        "OpenAIGPTModel": Architecture("backbone", no_prefix=True),
    },
    config_keys=(
        *HF_CONFIG_KEYS,
        ConfigKey(
            "afn",
            "activation",
            "decoder.block.feedforward.activation",
            {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
        ),
    ),
    supported_values=SUMMARY_VALUES,
    backbone_rules=(
        Rename("transformer.tokens_embed.weight", "target_embedding.tokens.weight"),
        Rename("transformer.positions_embed.weight", "target_embedding.position.weight"),
        Drop("transformer.position_ids"),
        *layer_rules(),
    ),
    head_rules=HEAD_RULES,
    from_hf_config=from_hf_config,
    to_hf_config=to_hf_config,
)
