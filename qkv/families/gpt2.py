"""GPT-2: GPT with its norms before the sublayers and one behind the last, larger, on more text.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.families import bert, gpt
from qkv.text.template import Template
from qkv.weights.format import ACTIVATIONS, Architecture, Config, Format, Setting
from qkv.weights.rules import Rename

PAPER = "Radford et al. 2019"


@dataclass(frozen=True, kw_only=True)
class Shape(gpt.Shape):
    """What a recipe may say of a GPT-2: what it may say of a GPT, and how scores are scaled."""

    hidden: int | None = None  # None: four times the width
    length: int = 1024
    score: Literal["scaled_dot", "dot"] = "scaled_dot"
    scale_by_depth: bool = False  # the n-th layer's scores are divided by n
    head_dropout: float = 0.1  # of the head that labels tokens


SIZES = {
    "small": Shape(),
    "medium": Shape(width=1024, heads=16, layers=24),
    "large": Shape(width=1280, heads=20, layers=36),
    "xl": Shape(width=1600, heads=25, layers=48),
}


def body(shape: Shape, target: int) -> s.Model:
    """GPT's with the norms moved; at the start every layer adds little to the residual stream (section 2.3)."""
    model = gpt.body(shape, target)
    block = model.decoder.block
    block = s.replace(
        block,
        attention=s.replace(block.attention, score=shape.score),
        feedforward=s.replace(block.feedforward, hidden=shape.hidden or 4 * shape.width),
        norm_first=True,
    )
    stack = s.replace(
        model.decoder, block=block, final_norm=True, scale_by_depth=shape.scale_by_depth, scaled_start=True
    )
    return s.replace(model, family="gpt2", decoder=stack)


def heads(shape: Shape, target: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    return gpt.heads(shape, target, labels) | {
        "token": s.label_head("token", shape.width, labels, dropout=shape.head_dropout),
        "span": s.label_head("span", shape.width, labels),
    }


def spec(
    shape: Shape,
    *,
    target: int = 50257,
    start: int = 50256,
    end: int = 50256,
    pad: int | None = None,
    head: str = "lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """A decoder for a vocabulary of `target` tokens under one of its heads; `lm_and_choice` is two, `body` none."""
    model = s.replace(body(shape, target), start=start, end=end, pad=pad)
    return gpt.under(model, heads(shape, target, labels), head)


def read(config: Config) -> Config:
    """Without `classifier_dropout` theirs takes the `hidden_dropout` that a config may hold."""
    if config.get("classifier_dropout") is None:
        config = config | {"classifier_dropout": config.get("hidden_dropout")}
    return gpt.read(config)


END = "<|endoftext|>"
TEMPLATE = Template(
    kind="byte_bpe",
    tokens={"start": END, "end": END, "unk": END},  # bytes leave nothing unknown; their files have to name something
    last=("end",),
    classes=("GPT2Tokenizer",),
)

HUGGING_FACE = Format(
    model_type="gpt2",
    prefix="transformer.",
    architectures={
        "GPT2LMHeadModel": Architecture("lm"),
        "GPT2DoubleHeadsModel": Architecture("lm_and_choice"),
        "GPT2ForSequenceClassification": Architecture("sequence"),
        "GPT2ForTokenClassification": Architecture("token"),
        "GPT2ForQuestionAnswering": Architecture("span"),
        "GPT2Model": Architecture("body", bare=True),
    },
    settings=(
        *gpt.SETTINGS,
        Setting("n_inner", "hidden", "decoder.block.feedforward.hidden"),
        Setting("activation_function", "activation", "decoder.block.feedforward.activation", ACTIVATIONS),
        Setting("scale_attn_weights", "score", "decoder.block.attention.score", {True: "scaled_dot", False: "dot"}),
        Setting("scale_attn_by_inverse_layer_idx", "scale_by_depth", "decoder.scale_by_depth"),
        Setting("classifier_dropout", "head_dropout", "head.dropout", only=("token",)),
    ),
    fixed=gpt.SUMMARY | {"add_cross_attention": False},
    body=(
        Rename("transformer.wte.weight", "target.tokens.weight"),
        Rename("transformer.wpe.weight", "target.position.weight"),
        *gpt.layers(),
        Rename("transformer.ln_f.{p}", "decoder.norm.{p}"),
    ),
    heads=gpt.HEADS | {"token": (bert.CLASSIFIER,), "span": bert.HUGGING_FACE.heads["span"]},
    read=read,
    write=gpt.write,
)
