"""RoBERTa: BERT trained longer, on more text, on masked words alone; its positions begin behind the padding's row.

Liu et al. 2019, https://arxiv.org/abs/1907.11692.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.errors import InputError
from qkv.families import bert
from qkv.text.template import Template
from qkv.weights.format import Architecture, Config, Format, Setting
from qkv.weights.rules import Copy, Rename, Tie

PAPER = "Liu et al. 2019"


@dataclass(frozen=True, kw_only=True)
class Shape(bert.Shape):
    """What a recipe may say of a RoBERTa: what it may say of a BERT, and where positions begin."""

    length: int = 510
    offset: int = 2  # rows of the position table that no token uses: one for each id up to the padding's


SIZES = {
    "base": Shape(length=512, segments=1, epsilon=1e-5),
    "large": Shape(width=1024, heads=16, layers=24, hidden=4096, length=512, segments=1, epsilon=1e-5),
}


def heads(shape: Shape, source: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """BERT's without the next sentence's; the language model's is a GELU whatever the blocks' activation is."""
    made = bert.heads(shape, source, labels)
    del made["next_sentence"]
    return made | {
        "masked_lm": s.replace(made["masked_lm"], dense="gelu"),
        "sequence": s.replace(made["sequence"], dropout_first=True),
        "choice": s.replace(made["choice"], dropout=shape.dropout),
    }


def spec(
    shape: Shape, *, source: int = 50265, head: str = "masked_lm", labels: tuple[str, ...] = ("no", "yes")
) -> s.Model:
    """BERT with its positions moved, under one of the heads; `body` is none."""
    model = bert.spec(shape, source=source, head="body")
    return s.replace(
        model,
        family="roberta",
        source=s.replace(model.source, offset=shape.offset),
        head=s.chosen(heads(shape, source, labels), head),
    )


def read(config: Config) -> Config:
    """Their table's rows are our offset and length together; the offset follows from the padding's id."""
    pad, rows = config.get("pad_token_id", 1), config.get("max_position_embeddings", 512)
    for key, value in (("pad_token_id", pad), ("max_position_embeddings", rows)):
        if type(value) is not int:
            raise InputError(f"config.json: {key} cannot be {value!r}; RoBERTa's positions are counted from it")
    return config | {"pad_token_id": pad + 1, "max_position_embeddings": rows - pad - 1}


def write(config: Config) -> Config:
    offset = config["pad_token_id"]
    return config | {"pad_token_id": offset - 1, "max_position_embeddings": config["max_position_embeddings"] + offset}


START, END = "<s>", "</s>"
TEMPLATE = Template(
    kind="byte_bpe",
    tokens={"cls": START, "start": START, "pad": "<pad>", "sep": END, "end": END, "unk": "<unk>", "mask": "<mask>"},
    last=("mask",),
    single="<s> $A </s>",
    pair="<s> $A </s> </s> $B </s>",
    spaced_mask=True,
    classes=("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer"),
)

POOLER = Rename("roberta.pooler.dense.{p}", "head.dense.{p}")
TRANSFORM = (
    Rename("lm_head.dense.{p}", "head.dense.{p}"),
    Rename("lm_head.layer_norm.{p}", "head.norm.{p}"),
    Rename("lm_head.decoder.weight", "head.linear.weight"),
)

HUGGING_FACE = Format(
    model_type="roberta",
    prefix="roberta.",
    architectures={
        "RobertaForMaskedLM": Architecture("masked_lm"),
        "RobertaForSequenceClassification": Architecture("sequence"),
        "RobertaForTokenClassification": Architecture("token"),
        "RobertaForQuestionAnswering": Architecture("span"),
        "RobertaForMultipleChoice": Architecture("choice"),
        "RobertaModel": Architecture("pooler", bare=True),
    },
    settings=(
        *(setting for setting in bert.SETTINGS if setting.key != "classifier_dropout"),
        Setting("classifier_dropout", "head_dropout", "head.dropout", only=("sequence", "token")),
        Setting("pad_token_id", "offset", "source.offset"),
    ),
    fixed=bert.HUGGING_FACE.fixed,
    body=bert.body("roberta."),
    heads={
        "masked_lm": (
            *TRANSFORM,
            Rename("lm_head.bias", "head.linear.bias"),
            Tie("lm_head.decoder.bias", "lm_head.bias"),
        ),
        "sequence": (
            Rename("classifier.dense.{p}", "head.dense.{p}"),
            Rename("classifier.out_proj.{p}", "head.linear.{p}"),
        ),
        "choice": (POOLER, bert.CLASSIFIER),
        "token": (bert.CLASSIFIER,),
        "span": bert.HUGGING_FACE.heads["span"],
        "pooler": (POOLER,),
    },
    untied={
        "masked_lm": (
            *TRANSFORM,
            Rename("lm_head.decoder.bias", "head.linear.bias"),
            Copy("lm_head.bias", "lm_head.decoder.bias"),
        )
    },
    read=read,
    write=write,
)
