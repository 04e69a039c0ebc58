"""GPT: a decoder pretrained to go on with a text, then fine-tuned under a head that reads its last token.

Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training".
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.text.template import Template
from qkv.weights.format import Architecture, Config, Format, Setting
from qkv.weights.rules import Drop, Rename, Rule, Split, Transpose

PAPER = "Radford et al. 2018"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a recipe may say of a GPT."""

    width: int = 768
    heads: int = 12
    layers: int = 12
    activation: s.Activation = "gelu_tanh"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    embed_dropout: float = 0.1
    choice_dropout: float = 0.1  # of the head that scores a choice
    length: int = 512
    epsilon: float = 1e-5
    tied: bool = True
    spread: float = 0.02


SIZES = {"base": Shape()}


def body(shape: Shape, target: int) -> s.Model:
    """Everything below a head."""
    block = s.Block(
        attention=s.Attention(width=shape.width, heads=shape.heads, dropout=shape.attention_dropout),
        feedforward=s.FeedForward(width=shape.width, hidden=4 * shape.width, activation=shape.activation),
        norm=s.Norm(epsilon=shape.epsilon),
        dropout=shape.dropout,
    )
    return s.Model(
        family="gpt",
        target=s.Embed(
            vocabulary=target,
            width=shape.width,
            length=shape.length,
            position="learned",
            dropout=shape.embed_dropout,
        ),
        decoder=s.Stack(block=block, depth=shape.layers, causal=True),
        spread=shape.spread,
    )


def heads(shape: Shape, target: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Each head by its name; what judges a sequence reads its last token, the only one that has seen all others."""
    width = shape.width
    return {
        "lm": s.Head(kind="lm", width=width, outputs=target, tied=shape.tied),
        "sequence": s.label_head("sequence", width, labels, pool="last", bias=False),
        "choice": s.label_head("choice", width, labels, pool="last", dropout=shape.choice_dropout),
    }


def under(model: s.Model, made: dict[str, s.Head], head: str) -> s.Model:
    """A body under one of the heads; `lm_and_choice` is two, as in fine-tuning, and `body` none."""
    if head == "lm_and_choice":
        return s.replace(model, head=made["lm"], beside=made["choice"])
    return s.replace(model, head=s.chosen(made, head))


def spec(
    shape: Shape,
    *,
    target: int = 40478,
    start: int = -1,  # the paper's vocabulary has no token that begins or ends a text
    end: int = -1,
    pad: int | None = None,
    head: str = "lm",
    labels: tuple[str, ...] = ("no", "yes"),
) -> s.Model:
    """A decoder for a vocabulary of `target` tokens under one of its heads."""
    model = s.replace(body(shape, target), start=start, end=end, pad=pad)
    return under(model, heads(shape, target, labels), head)


TEMPLATE = Template(kind="word_bpe", tokens={"unk": "<unk>"}, lowercase=True, classes=("OpenAIGPTTokenizer",))

SETTINGS = (
    Setting("vocab_size", "target", "target.vocabulary"),
    Setting("n_positions", "length", "target.length"),
    Setting("n_embd", "width", "target.width"),
    Setting("n_layer", "layers", "decoder.depth"),
    Setting("n_head", "heads", "decoder.block.attention.heads"),
    Setting("resid_pdrop", "dropout", "decoder.block.dropout"),
    Setting("attn_pdrop", "attention_dropout", "decoder.block.attention.dropout"),
    Setting("embd_pdrop", "embed_dropout", "target.dropout"),
    Setting("summary_first_dropout", "choice_dropout", "beside.dropout", only=("lm_and_choice",)),
    Setting("layer_norm_epsilon", "epsilon", "decoder.block.norm.epsilon"),
    Setting("tie_word_embeddings", "tied", "head.tied", only=("lm", "lm_and_choice")),
    Setting("initializer_range", "spread", "spread"),
    Setting("bos_token_id", "start", "start"),
    Setting("eos_token_id", "end", "end"),
    Setting("pad_token_id", "pad", "pad"),
)
# how the head that scores a choice sums a sequence up
SUMMARY = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_activation": None,
    "summary_proj_to_labels": True,
}
_MARKS = ("bos_token_id", "eos_token_id")


def read(config: Config) -> Config:
    """A token that they say there is none of is our -1."""
    return config | {key: -1 for key in _MARKS if key in config and config[key] is None}


def write(config: Config) -> Config:
    return config | {key: None for key in _MARKS if config[key] == -1}


def layers(theirs: str = "transformer.h.{i}", ours: str = "decoder.blocks.{i}") -> tuple[Rule, ...]:
    """The rules of a stack of their layers, which GPT-2 names alike; their matrices are [in, out]."""
    return (
        Split(f"{theirs}.attn.c_attn.{{p}}", tuple(f"{ours}.attention.{x}.{{p}}" for x in "qkv"), transposed=True),
        Transpose(f"{theirs}.attn.c_proj.{{p}}", f"{ours}.attention.o.{{p}}"),
        Transpose(f"{theirs}.mlp.c_fc.{{p}}", f"{ours}.feedforward.up.{{p}}"),
        Transpose(f"{theirs}.mlp.c_proj.{{p}}", f"{ours}.feedforward.down.{{p}}"),
        Rename(f"{theirs}.ln_1.{{p}}", f"{ours}.around_attention.norm.{{p}}"),
        Rename(f"{theirs}.ln_2.{{p}}", f"{ours}.around_feedforward.norm.{{p}}"),
        Drop(f"{theirs}.attn.bias"),  # the causal mask, in old files
        Drop(f"{theirs}.attn.masked_bias"),
    )


LM = Rename("lm_head.weight", "head.linear.weight")
HEADS = {
    "lm": (LM,),
    "lm_and_choice": (LM, Rename("multiple_choice_head.summary.{p}", "beside.linear.{p}")),
    "sequence": (Rename("score.weight", "head.linear.weight"),),
}

HUGGING_FACE = Format(
    model_type="openai-gpt",
    prefix="transformer.",
    architectures={
        "OpenAIGPTLMHeadModel": Architecture("lm"),
        "OpenAIGPTDoubleHeadsModel": Architecture("lm_and_choice"),
        "OpenAIGPTForSequenceClassification": Architecture("sequence"),
        "OpenAIGPTModel": Architecture("body", bare=True),
    },
    settings=(
        *SETTINGS,
        Setting(
            "afn",
            "activation",
            "decoder.block.feedforward.activation",
            {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
        ),
    ),
    fixed=SUMMARY,
    body=(
        Rename("transformer.tokens_embed.weight", "target.tokens.weight"),
        Rename("transformer.positions_embed.weight", "target.position.weight"),
        Drop("transformer.position_ids"),
        *layers(),
    ),
    heads=HEADS,
    read=read,
    write=write,
)
