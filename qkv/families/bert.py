"""BERT: a bidirectional encoder pretrained on masked words and next sentences.

Devlin et al. 2019, https://arxiv.org/abs/1810.04805. `base` and `large` are the paper's; `mini` is that of Turc et al.
2019, https://arxiv.org/abs/1908.08962.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.text.template import Template
from qkv.weights.format import ACTIVATIONS, Architecture, Format, Setting
from qkv.weights.rules import Copy, Drop, Rename, Rule, Tie

PAPER = "Devlin et al. 2019"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a recipe may say of a BERT."""

    width: int = 768
    heads: int = 12
    layers: int = 12
    hidden: int = 3072
    activation: s.Activation = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    length: int = 512
    segments: int = 2
    epsilon: float = 1e-12
    tied: bool = True
    head_dropout: float | None = None  # of those heads that have one; None: as `dropout`
    spread: float = 0.02


SIZES = {
    "mini": Shape(width=256, heads=4, layers=4, hidden=1024),
    "base": Shape(),
    "large": Shape(width=1024, heads=16, layers=24, hidden=4096),
}


def encoder(shape: Shape) -> s.Stack:
    block = s.Block(
        attention=s.Attention(width=shape.width, heads=shape.heads, dropout=shape.attention_dropout),
        feedforward=s.FeedForward(width=shape.width, hidden=shape.hidden, activation=shape.activation),
        norm=s.Norm(epsilon=shape.epsilon),
        dropout=shape.dropout,
    )
    return s.Stack(block=block, depth=shape.layers)


def heads(shape: Shape, source: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Each head by its name; the paper's pooler is the dense layer of those that judge a sequence."""
    width, drop = shape.width, shape.dropout if shape.head_dropout is None else shape.head_dropout
    masked = s.Head(
        kind="lm",
        width=width,
        outputs=source,
        bias=True,
        tied=shape.tied,
        dense=shape.activation,
        norm=s.Norm(epsilon=shape.epsilon),
    )
    return {
        "masked_lm": masked,
        "sequence": s.label_head("sequence", width, labels, dense="tanh", dropout=drop),
        "choice": s.label_head("choice", width, labels, dense="tanh", dropout=drop),
        "next_sentence": s.label_head("next_sentence", width, labels, dense="tanh"),
        "pooler": s.label_head("pooler", width, labels, dense="tanh"),
        "token": s.label_head("token", width, labels, dropout=drop),
        "span": s.label_head("span", width, labels),
    }


def spec(
    shape: Shape, *, source: int = 30522, head: str = "masked_lm", labels: tuple[str, ...] = ("no", "yes")
) -> s.Model:
    """An encoder for a vocabulary of `source` tokens under one of its heads; `pretraining` is two, `body` none."""
    made = heads(shape, source, labels)
    pretraining = head == "pretraining"
    return s.Model(
        family="bert",
        source=s.Embed(
            vocabulary=source,
            width=shape.width,
            length=shape.length,
            position="learned",
            segments=shape.segments,
            norm=s.Norm(epsilon=shape.epsilon),
            dropout=shape.dropout,
        ),
        encoder=encoder(shape),
        head=made["masked_lm"] if pretraining else s.chosen(made, head),
        beside=made["next_sentence"] if pretraining else None,
        spread=shape.spread,
    )


TEMPLATE = Template(
    kind="wordpiece",
    tokens={"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    lowercase=True,
    classes=("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"),
)

SETTINGS = (
    Setting("vocab_size", "source", "source.vocabulary"),
    Setting("hidden_size", "width", "source.width"),
    Setting("num_hidden_layers", "layers", "encoder.depth"),
    Setting("num_attention_heads", "heads", "encoder.block.attention.heads"),
    Setting("intermediate_size", "hidden", "encoder.block.feedforward.hidden"),
    Setting("hidden_act", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    Setting("hidden_dropout_prob", "dropout", "encoder.block.dropout"),
    Setting("attention_probs_dropout_prob", "attention_dropout", "encoder.block.attention.dropout"),
    Setting("classifier_dropout", "head_dropout", "head.dropout", only=("sequence", "choice", "token")),
    Setting("max_position_embeddings", "length", "source.length"),
    Setting("type_vocab_size", "segments", "source.segments"),
    Setting("layer_norm_eps", "epsilon", "encoder.block.norm.epsilon"),
    Setting("tie_word_embeddings", "tied", "head.tied", only=("masked_lm", "pretraining")),
    Setting("initializer_range", "spread", "spread"),
)


def layers(prefix: str, ours: str) -> tuple[Rename, ...]:
    """The rules of a stack of their layers, which RoBERTa names alike."""
    names = {
        "attention.self.query": "attention.q",
        "attention.self.key": "attention.k",
        "attention.self.value": "attention.v",
        "attention.output.dense": "attention.o",
        "attention.output.LayerNorm": "around_attention.norm",
        "intermediate.dense": "feedforward.up",
        "output.dense": "feedforward.down",
        "output.LayerNorm": "around_feedforward.norm",
    }
    return tuple(Rename(f"{prefix}.{{i}}.{a}.{{p}}", f"{ours}.{{i}}.{b}.{{p}}") for a, b in names.items())


def body(prefix: str) -> tuple[Rule, ...]:
    """The rules of everything below a head."""
    return (
        Rename(f"{prefix}embeddings.word_embeddings.weight", "source.tokens.weight"),
        Rename(f"{prefix}embeddings.position_embeddings.weight", "source.position.weight"),
        Rename(f"{prefix}embeddings.token_type_embeddings.weight", "source.segments.weight"),
        Rename(f"{prefix}embeddings.LayerNorm.{{p}}", "source.norm.{p}"),
        Drop(f"{prefix}embeddings.position_ids"),
        Drop(f"{prefix}embeddings.token_type_ids"),
        *layers(f"{prefix}encoder.layer", "encoder.blocks"),
    )


POOLER = Rename("bert.pooler.dense.{p}", "head.dense.{p}")
CLASSIFIER = Rename("classifier.{p}", "head.linear.{p}")
TRANSFORM = (
    Rename("cls.predictions.transform.dense.{p}", "head.dense.{p}"),
    Rename("cls.predictions.transform.LayerNorm.{p}", "head.norm.{p}"),
    Rename("cls.predictions.decoder.weight", "head.linear.weight"),
)
TIED = (
    *TRANSFORM,
    Rename("cls.predictions.bias", "head.linear.bias"),
    Tie("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
UNTIED = (  # then theirs adds the inner bias alone
    *TRANSFORM,
    Rename("cls.predictions.decoder.bias", "head.linear.bias"),
    Copy("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
BESIDE = (
    Rename("bert.pooler.dense.{p}", "beside.dense.{p}"),
    Rename("cls.seq_relationship.{p}", "beside.linear.{p}"),
)

HUGGING_FACE = Format(
    model_type="bert",
    prefix="bert.",
    architectures={
        "BertForMaskedLM": Architecture("masked_lm"),
        "BertForPreTraining": Architecture("pretraining"),
        "BertForNextSentencePrediction": Architecture("next_sentence"),
        "BertForSequenceClassification": Architecture("sequence"),
        "BertForTokenClassification": Architecture("token"),
        "BertForQuestionAnswering": Architecture("span"),
        "BertForMultipleChoice": Architecture("choice"),
        "BertModel": Architecture("pooler", bare=True),
    },
    settings=SETTINGS,
    fixed={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    body=body("bert."),
    heads={
        "masked_lm": TIED,
        "pretraining": (*TIED, *BESIDE),
        "next_sentence": (POOLER, Rename("cls.seq_relationship.{p}", "head.linear.{p}")),
        "sequence": (POOLER, CLASSIFIER),
        "choice": (POOLER, CLASSIFIER),
        "token": (CLASSIFIER,),
        "span": (Rename("qa_outputs.{p}", "head.linear.{p}"),),
        "pooler": (POOLER,),
    },
    untied={"masked_lm": UNTIED, "pretraining": (*UNTIED, *BESIDE)},
)
