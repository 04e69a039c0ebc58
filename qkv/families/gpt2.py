"""GPT-2: GPT with pre-norm blocks and a final norm, larger, on more text.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.families import bert, gpt
from qkv.families.hf.format import ACTIVATIONS, Architecture, ConfigKey, HFConfig, HFFormat
from qkv.families.hf.rules import Rename
from qkv.tokenization.template import Template

PAPER = "Radford et al. 2019"
END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 50256


@dataclass(frozen=True, kw_only=True)
class Config(gpt.Config):
    """Keys of the recipe's `model` section for GPT-2: those of GPT, and the scaling of attention scores."""

    d_ff: int | None = None
    """Width of the feed-forward layers; null for four times d_model."""
    max_length: int = 1024
    """Longest sequence in tokens, prompt and continuation together."""
    score_fn: Literal["scaled_dot", "dot"] = "scaled_dot"
    """Attention score: `scaled_dot` divides by the square root of the head size, `dot` does not."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide the attention scores of layer n by n."""
    classifier_dropout: float = 0.1
    """Dropout in the head for token classification."""


PRESETS = {
    "small": Config(),
    "medium": Config(d_model=1024, heads=16, layers=24),
    "large": Config(d_model=1280, heads=20, layers=36),
    "xl": Config(d_model=1600, heads=25, layers=48),
}


def backbone_spec(config: Config, vocab_size: int) -> s.Model:
    """Return GPT's backbone with pre-norm blocks and scaled initialization of residual layers (section 2.3)."""
    model = gpt.backbone_spec(config, vocab_size)
    assert isinstance(model.decoder, s.TransformerStack)
    block = model.decoder.block
    block = s.replace(
        block,
        self_attention=s.replace(block.self_attention, score_fn=config.score_fn),
        feedforward=s.replace(block.feedforward, d_ff=config.d_ff or 4 * config.d_model),
        norm_first=True,
    )
    stack = s.replace(
        model.decoder,
        block=block,
        final_norm=True,
        scale_attn_by_inverse_layer_idx=config.scale_attn_by_inverse_layer_idx,
        scaled_residual_init=True,
    )
    return s.replace(model, family="gpt2", decoder=stack)


def make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Return GPT's heads and those for tokens and spans."""
    return gpt.make_heads(config, vocab_size, labels) | {
        "token": s.classification_head("token", config.d_model, labels, dropout=config.classifier_dropout),
        "span": s.classification_head("span", config.d_model, labels),
    }


def make_spec(
    config: Config,
    *,
    target_vocab_size: int = 50257,
    bos_id: int | None = None,
    eos_id: int | None = None,
    pad_id: int | None = None,
    head: str = "lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """Return a decoder with one of its heads; `double_heads` has two (LM and choice), `backbone` has none.

    `bos_id` and `eos_id` are by default <|endoftext|>, and -1 for a vocabulary that is too small to hold it.
    """
    default_id = END_OF_TEXT_ID if target_vocab_size > END_OF_TEXT_ID else -1
    model = s.replace(
        backbone_spec(config, target_vocab_size),
        bos_id=default_id if bos_id is None else bos_id,
        eos_id=default_id if eos_id is None else eos_id,
        pad_id=pad_id,
    )
    return gpt.with_head(model, make_heads(config, target_vocab_size, labels), head)


def from_hf_config(hf_config: HFConfig) -> HFConfig:
    """Fill in `classifier_dropout` as transformers does, from `hidden_dropout`, and drop the ids that it made up.

    transformers writes <|endoftext|> of the original vocabulary into the config of any smaller one.
    """
    if hf_config.get("classifier_dropout") is None:
        hf_config = hf_config | {"classifier_dropout": hf_config.get("hidden_dropout")}
    vocab_size = hf_config.get("vocab_size")
    if isinstance(vocab_size, int) and vocab_size <= END_OF_TEXT_ID:
        hf_config = hf_config | {key: -1 for key in gpt.OPTIONAL_TOKEN_KEYS if hf_config.get(key) == END_OF_TEXT_ID}
    return gpt.from_hf_config(hf_config)


TOKENIZER_TEMPLATE = Template(
    kind="byte_bpe",
    # byte-level BPE has no unknown tokens, but Hugging Face files must name one
    special_tokens={"bos": END_OF_TEXT, "eos": END_OF_TEXT, "unk": END_OF_TEXT},
    after_vocab=("eos",),
    hf_classes=("GPT2Tokenizer",),
)

HF_FORMAT = HFFormat(
    model_type="gpt2",
    prefix="transformer.",
    architectures={
        "GPT2LMHeadModel": Architecture("lm"),
        "GPT2DoubleHeadsModel": Architecture("double_heads"),
        "GPT2ForSequenceClassification": Architecture("sequence"),
        "GPT2ForTokenClassification": Architecture("token"),
        "GPT2ForQuestionAnswering": Architecture("span"),
        "GPT2Model": Architecture("backbone", no_prefix=True),
    },
    config_keys=(
        *gpt.HF_CONFIG_KEYS,
        ConfigKey("n_inner", "d_ff", "decoder.block.feedforward.d_ff"),
        ConfigKey("activation_function", "activation", "decoder.block.feedforward.activation", ACTIVATIONS),
        ConfigKey(
            "scale_attn_weights",
            "score_fn",
            "decoder.block.self_attention.score_fn",
            {True: "scaled_dot", False: "dot"},
        ),
        ConfigKey(
            "scale_attn_by_inverse_layer_idx",
            "scale_attn_by_inverse_layer_idx",
            "decoder.scale_attn_by_inverse_layer_idx",
        ),
        ConfigKey("classifier_dropout", "classifier_dropout", "head.dropout", heads=("token",)),
    ),
    supported_values=gpt.SUMMARY_VALUES | {"add_cross_attention": False},
    backbone_rules=(
        Rename("transformer.wte.weight", "target_embedding.tokens.weight"),
        Rename("transformer.wpe.weight", "target_embedding.position.weight"),
        *gpt.layer_rules(),
        Rename("transformer.ln_f.{p}", "decoder.norm.{p}"),
    ),
    head_rules=gpt.HEAD_RULES | {"token": (bert.CLASSIFIER_RULE,), "span": bert.HF_FORMAT.head_rules["span"]},
    from_hf_config=from_hf_config,
    to_hf_config=gpt.to_hf_config,
)
