"""RoBERTa: BERT trained longer, on more text, without next-sentence prediction; its positions start after pad_id.

Liu et al. 2019, https://arxiv.org/abs/1907.11692.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.errors import InputError, quote
from qkv.families import bert
from qkv.families.hf.format import Architecture, ConfigKey, HFConfig, HFFormat
from qkv.families.hf.rules import ExportDuplicate, Rename, Tie
from qkv.tokenization.template import Template

PAPER = "Liu et al. 2019"


@dataclass(frozen=True, kw_only=True)
class Config(bert.Config):
    """Keys of the recipe's `model` section for RoBERTa: those of BERT and the position offset."""

    max_length: int = 510
    """Longest input in tokens; the position table has `position_offset` more rows."""
    position_offset: int = 2
    """Unused rows at the start of the position table: one per id up to and including the padding token's."""


PRESETS = {
    "base": Config(max_length=512, num_segments=1, norm_eps=1e-5),
    "large": Config(d_model=1024, heads=16, layers=24, d_ff=4096, max_length=512, num_segments=1, norm_eps=1e-5),
}


def make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Return BERT's heads without next_sentence; the masked LM head always uses GELU."""
    available_heads = bert.make_heads(config, vocab_size, labels)
    del available_heads["next_sentence"]
    return available_heads | {
        "masked_lm": s.replace(available_heads["masked_lm"], dense_activation="gelu"),
        "sequence": s.replace(available_heads["sequence"], dropout_before_dense=True),
        "choice": s.replace(available_heads["choice"], dropout=config.dropout),
    }


def make_spec(
    config: Config, *, source_vocab_size: int = 50265, head: str = "masked_lm", labels: tuple[str, ...] = ("no", "yes")
) -> s.Model:
    """Return BERT with shifted positions and one of RoBERTa's heads; `backbone` has none."""
    model = bert.make_spec(config, source_vocab_size=source_vocab_size, head="backbone")
    assert isinstance(model.source_embedding, s.Embedding)
    return s.replace(
        model,
        family="roberta",
        source_embedding=s.replace(model.source_embedding, position_offset=config.position_offset),
        head=s.select_head(make_heads(config, source_vocab_size, labels), head),
    )


def from_hf_config(hf_config: HFConfig) -> HFConfig:
    """Split the rows of Hugging Face's position table into offset (pad_token_id + 1) and maximum length."""
    pad_id, num_rows = hf_config.get("pad_token_id", 1), hf_config.get("max_position_embeddings", 512)
    for key, value in (("pad_token_id", pad_id), ("max_position_embeddings", num_rows)):
        if type(value) is not int:
            raise InputError(f"config.json: {key} cannot be {quote(value)}; RoBERTa's positions are counted from it")
    return hf_config | {"pad_token_id": pad_id + 1, "max_position_embeddings": num_rows - pad_id - 1}


def to_hf_config(hf_config: HFConfig) -> HFConfig:
    """Invert `from_hf_config`."""
    position_offset = hf_config["pad_token_id"]
    return hf_config | {
        "pad_token_id": position_offset - 1,
        "max_position_embeddings": hf_config["max_position_embeddings"] + position_offset,
    }


BOS, EOS = "<s>", "</s>"
TOKENIZER_TEMPLATE = Template(
    kind="byte_bpe",
    special_tokens={"cls": BOS, "bos": BOS, "pad": "<pad>", "sep": EOS, "eos": EOS, "unk": "<unk>", "mask": "<mask>"},
    after_vocab=("mask",),
    single="<s> $A </s>",
    pair="<s> $A </s> </s> $B </s>",
    mask_lstrip=True,
    hf_classes=("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer"),
)

POOLER_RULE = Rename("roberta.pooler.dense.{p}", "head.dense.{p}")
MLM_TRANSFORM_RULES = (
    Rename("lm_head.dense.{p}", "head.dense.{p}"),
    Rename("lm_head.layer_norm.{p}", "head.norm.{p}"),
    Rename("lm_head.decoder.weight", "head.linear.weight"),
)

HF_FORMAT = HFFormat(
    model_type="roberta",
    prefix="roberta.",
    architectures={
        "RobertaForMaskedLM": Architecture("masked_lm"),
        "RobertaForSequenceClassification": Architecture("sequence"),
        "RobertaForTokenClassification": Architecture("token"),
        "RobertaForQuestionAnswering": Architecture("span"),
        "RobertaForMultipleChoice": Architecture("choice"),
        "RobertaModel": Architecture("pooler", no_prefix=True),
    },
    config_keys=(
        *(config_key for config_key in bert.HF_CONFIG_KEYS if config_key.hf_key != "classifier_dropout"),
        ConfigKey("classifier_dropout", "classifier_dropout", "head.dropout", heads=("sequence", "token")),
        ConfigKey("pad_token_id", "position_offset", "source_embedding.position_offset"),
    ),
    supported_values=bert.HF_FORMAT.supported_values,
    backbone_rules=bert.backbone_rules("roberta."),
    head_rules={
        "masked_lm": (
            *MLM_TRANSFORM_RULES,
            Rename("lm_head.bias", "head.linear.bias"),
            Tie("lm_head.decoder.bias", "lm_head.bias"),
        ),
        "sequence": (
            Rename("classifier.dense.{p}", "head.dense.{p}"),
            Rename("classifier.out_proj.{p}", "head.linear.{p}"),
        ),
        "choice": (POOLER_RULE, bert.CLASSIFIER_RULE),
        "token": (bert.CLASSIFIER_RULE,),
        "span": bert.HF_FORMAT.head_rules["span"],
        "pooler": (POOLER_RULE,),
    },
    untied_head_rules={
        "masked_lm": (
            *MLM_TRANSFORM_RULES,
            Rename("lm_head.decoder.bias", "head.linear.bias"),
            ExportDuplicate("lm_head.bias", "lm_head.decoder.bias"),
        )
    },
    from_hf_config=from_hf_config,
    to_hf_config=to_hf_config,
)
