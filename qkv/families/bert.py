"""BERT: a bidirectional encoder pretrained with masked language modeling and next-sentence prediction.

Devlin et al. 2019, https://arxiv.org/abs/1810.04805. `base` and `large` are the paper's sizes; `mini` is that of Turc
et al. 2019, https://arxiv.org/abs/1908.08962.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv import spec as s
from qkv.families.hf.format import ACTIVATIONS, Architecture, ConfigKey, HFFormat
from qkv.families.hf.rules import Drop, ExportDuplicate, Rename, Rule, Tie
from qkv.tokenization.template import Template

PAPER = "Devlin et al. 2019"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of the recipe's `model` section for BERT."""

    d_model: int = 768
    """Width of the hidden states."""
    heads: int = 12
    """Number of attention heads per layer."""
    layers: int = 12
    """Number of layers."""
    d_ff: int = 3072
    """Width of the feed-forward layers."""
    activation: s.Activation = "gelu"
    """Activation of the feed-forward layers and of the masked language model head."""
    dropout: float = 0.1
    """Dropout on the embeddings and on the output of every sublayer."""
    attention_dropout: float = 0.1
    """Dropout on the attention weights."""
    max_length: int = 512
    """Longest input in tokens; size of the position table."""
    num_segments: int = 2
    """Number of segment embeddings (token types); 0 for none."""
    norm_eps: float = 1e-12
    """Epsilon of the layer norms."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output matrix of the masked language model head."""
    classifier_dropout: float | None = None
    """Dropout before the output layer of classification heads; null for the value of `dropout`."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; 0.02 suits widths of 768 and more."""


PRESETS = {
    "mini": Config(d_model=256, heads=4, layers=4, d_ff=1024),
    "base": Config(),
    "large": Config(d_model=1024, heads=16, layers=24, d_ff=4096),
}


def encoder_spec(config: Config) -> s.TransformerStack:
    """Return the encoder's stack."""
    block = s.Block(
        self_attention=s.Attention(query_dim=config.d_model, heads=config.heads, dropout=config.attention_dropout),
        feedforward=s.FeedForward(d_model=config.d_model, d_ff=config.d_ff, activation=config.activation),
        norm=s.Norm(eps=config.norm_eps),
        dropout=config.dropout,
    )
    return s.TransformerStack(block=block, num_layers=config.layers)


def make_heads(config: Config, vocab_size: int, labels: tuple[str, ...]) -> dict[str, s.Head]:
    """Return each head by its name; the paper's pooler is the dense layer of the heads that read whole sequences."""
    d_model = config.d_model
    classifier_dropout = config.dropout if config.classifier_dropout is None else config.classifier_dropout
    mlm_head = s.Head(
        kind="lm",
        d_model=d_model,
        num_outputs=vocab_size,
        bias=True,
        tie_embeddings=config.tie_embeddings,
        dense_activation=config.activation,
        norm=s.Norm(eps=config.norm_eps),
    )
    return {
        "masked_lm": mlm_head,
        "sequence": s.classification_head(
            "sequence", d_model, labels, dense_activation="tanh", dropout=classifier_dropout
        ),
        "choice": s.classification_head("choice", d_model, labels, dense_activation="tanh", dropout=classifier_dropout),
        "next_sentence": s.classification_head("next_sentence", d_model, labels, dense_activation="tanh"),
        "pooler": s.classification_head("pooler", d_model, labels, dense_activation="tanh"),
        "token": s.classification_head("token", d_model, labels, dropout=classifier_dropout),
        "span": s.classification_head("span", d_model, labels),
    }


def make_spec(
    config: Config, *, source_vocab_size: int = 30522, head: str = "masked_lm", labels: tuple[str, ...] = ("no", "yes")
) -> s.Model:
    """Return an encoder with one of its heads; `pretraining` has two (MLM and NSP), `backbone` has none."""
    available_heads = make_heads(config, source_vocab_size, labels)
    pretraining = head == "pretraining"
    return s.Model(
        family="bert",
        source_embedding=s.Embedding(
            vocab_size=source_vocab_size,
            d_model=config.d_model,
            max_length=config.max_length,
            position="learned",
            num_segments=config.num_segments,
            norm=s.Norm(eps=config.norm_eps),
            dropout=config.dropout,
        ),
        encoder=encoder_spec(config),
        head=available_heads["masked_lm"] if pretraining else s.select_head(available_heads, head),
        aux_head=available_heads["next_sentence"] if pretraining else None,
        init_std=config.init_std,
    )


TOKENIZER_TEMPLATE = Template(
    kind="wordpiece",
    special_tokens={"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    lowercase=True,
    hf_classes=("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"),
)

HF_CONFIG_KEYS = (
    ConfigKey("vocab_size", "source_vocab_size", "source_embedding.vocab_size"),
    ConfigKey("hidden_size", "d_model", "source_embedding.d_model"),
    ConfigKey("num_hidden_layers", "layers", "encoder.num_layers"),
    ConfigKey("num_attention_heads", "heads", "encoder.block.self_attention.heads"),
    ConfigKey("intermediate_size", "d_ff", "encoder.block.feedforward.d_ff"),
    ConfigKey("hidden_act", "activation", "encoder.block.feedforward.activation", ACTIVATIONS),
    ConfigKey("hidden_dropout_prob", "dropout", "encoder.block.dropout"),
    ConfigKey("attention_probs_dropout_prob", "attention_dropout", "encoder.block.self_attention.dropout"),
    ConfigKey("classifier_dropout", "classifier_dropout", "head.dropout", heads=("sequence", "choice", "token")),
    ConfigKey("max_position_embeddings", "max_length", "source_embedding.max_length"),
    ConfigKey("type_vocab_size", "num_segments", "source_embedding.num_segments"),
    ConfigKey("layer_norm_eps", "norm_eps", "encoder.block.norm.eps"),
    ConfigKey("tie_word_embeddings", "tie_embeddings", "head.tie_embeddings", heads=("masked_lm", "pretraining")),
    ConfigKey("initializer_range", "init_std", "init_std"),
)


def layer_rules(hf_prefix: str, qkv_prefix: str) -> tuple[Rename, ...]:
    """Return the weight rules of a stack of layers; RoBERTa has the same names."""
    names = {
        "attention.self.query": "self_attention.q",
        "attention.self.key": "self_attention.k",
        "attention.self.value": "self_attention.v",
        "attention.output.dense": "self_attention.o",
        "attention.output.LayerNorm": "self_attention_residual.norm",
        "intermediate.dense": "feedforward.up",
        "output.dense": "feedforward.down",
        "output.LayerNorm": "feedforward_residual.norm",
    }
    return tuple(
        Rename(f"{hf_prefix}.{{i}}.{hf_name}.{{p}}", f"{qkv_prefix}.{{i}}.{qkv_name}.{{p}}")
        for hf_name, qkv_name in names.items()
    )


def backbone_rules(hf_prefix: str) -> tuple[Rule, ...]:
    """Return the weight rules of embeddings and encoder."""
    return (
        Rename(f"{hf_prefix}embeddings.word_embeddings.weight", "source_embedding.tokens.weight"),
        Rename(f"{hf_prefix}embeddings.position_embeddings.weight", "source_embedding.position.weight"),
        Rename(f"{hf_prefix}embeddings.token_type_embeddings.weight", "source_embedding.segments.weight"),
        Rename(f"{hf_prefix}embeddings.LayerNorm.{{p}}", "source_embedding.norm.{p}"),
        Drop(f"{hf_prefix}embeddings.position_ids"),
        Drop(f"{hf_prefix}embeddings.token_type_ids"),
        *layer_rules(f"{hf_prefix}encoder.layer", "encoder.blocks"),
    )


POOLER_RULE = Rename("bert.pooler.dense.{p}", "head.dense.{p}")
CLASSIFIER_RULE = Rename("classifier.{p}", "head.linear.{p}")
MLM_TRANSFORM_RULES = (
    Rename("cls.predictions.transform.dense.{p}", "head.dense.{p}"),
    Rename("cls.predictions.transform.LayerNorm.{p}", "head.norm.{p}"),
    Rename("cls.predictions.decoder.weight", "head.linear.weight"),
)
TIED_MLM_RULES = (
    *MLM_TRANSFORM_RULES,
    Rename("cls.predictions.bias", "head.linear.bias"),
    Tie("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
UNTIED_MLM_RULES = (  # Hugging Face then uses the decoder's bias and ignores the outer one
    *MLM_TRANSFORM_RULES,
    Rename("cls.predictions.decoder.bias", "head.linear.bias"),
    ExportDuplicate("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
NSP_RULES = (
    Rename("bert.pooler.dense.{p}", "aux_head.dense.{p}"),
    Rename("cls.seq_relationship.{p}", "aux_head.linear.{p}"),
)

HF_FORMAT = HFFormat(
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
        "BertModel": Architecture("pooler", no_prefix=True),
    },
    config_keys=HF_CONFIG_KEYS,
    supported_values={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    backbone_rules=backbone_rules("bert."),
    head_rules={
        "masked_lm": TIED_MLM_RULES,
        "pretraining": (*TIED_MLM_RULES, *NSP_RULES),
        "next_sentence": (POOLER_RULE, Rename("cls.seq_relationship.{p}", "head.linear.{p}")),
        "sequence": (POOLER_RULE, CLASSIFIER_RULE),
        "choice": (POOLER_RULE, CLASSIFIER_RULE),
        "token": (CLASSIFIER_RULE,),
        "span": (Rename("qa_outputs.{p}", "head.linear.{p}"),),
        "pooler": (POOLER_RULE,),
    },
    untied_head_rules={"masked_lm": UNTIED_MLM_RULES, "pretraining": (*UNTIED_MLM_RULES, *NSP_RULES)},
)
