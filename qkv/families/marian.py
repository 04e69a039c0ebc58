"""Marian: the Transformer of the OPUS-MT translation models (University of Helsinki).

Junczys-Dowmunt et al. 2018, https://arxiv.org/abs/1804.00344. It differs from BART in sinusoidal positions (all sines
before all cosines), no norm after the embedding, and optionally separate tables for source and target. A target begins
with the padding token, which is never generated. `opus` is the size of the OPUS-MT models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.errors import InputError, quote
from qkv.families import bart
from qkv.families.hf.format import Architecture, ConfigKey, HFConfig, HFFormat, WhenSpec
from qkv.families.hf.rules import Drop, Rename
from qkv.tokenization.template import Template

PAPER = "Junczys-Dowmunt et al. 2018"


@dataclass(frozen=True, kw_only=True)
class Config(bart.Config):
    """Keys of the recipe's `model` section for Marian: those of BART, and its own."""

    position: Literal["sinusoid_concat", "sinusoid", "learned", "none"] = "sinusoid_concat"  # type: ignore[assignment]  # one value more than BART
    """Position scheme: sinusoids (all sines first, or interleaved), a learned table, or none."""
    embedding_norm: bool = False
    """Normalize the embeddings."""
    tie_embeddings: bool = True
    """Use the target's embedding table as output matrix."""


PRESETS = {
    "opus": Config(
        d_model=512,
        heads=8,
        layers=6,
        d_ff=2048,
        decoder_heads=8,
        decoder_layers=6,
        decoder_d_ff=2048,
        activation="silu",
        scale_embedding=True,
        max_length=512,
    ),
}


def make_spec(
    config: Config,
    *,
    source_vocab_size: int = 58101,
    target_vocab_size: int = 58101,
    bos_id: int | None = None,
    eos_id: int = 0,
    head: str = "seq2seq_lm",
    labels: tuple[str, ...] = (),
) -> s.Model:
    """Return an encoder-decoder; `bos_id` is the padding token, by default the last of the vocabulary."""
    pad_id = target_vocab_size - 1 if bos_id is None else bos_id
    bart_spec = bart.make_spec(
        config,
        source_vocab_size=source_vocab_size,
        target_vocab_size=target_vocab_size,
        bos_id=pad_id,
        eos_id=eos_id,
        pad_id=pad_id,
        labels=labels,
    )
    assert bart_spec.head is not None
    heads = {"seq2seq_lm": s.replace(bart_spec.head, tie_embeddings=config.tie_embeddings)}
    return s.replace(bart_spec, family="marian", head=s.select_head(heads, head), suppress_tokens=(pad_id,))


def _from_hf_config(hf_config: HFConfig) -> HFConfig:
    pad_id = hf_config.get("pad_token_id", 58100)
    for key, supported in (("decoder_start_token_id", pad_id), ("bad_words_ids", [[pad_id]])):
        if hf_config.get(key) not in (None, supported):
            raise InputError(
                f"config.json: {key} is {quote(hf_config[key])}; qkv supports only the padding token, {quote(pad_id)}"
            )
    target_vocab_size = hf_config.get("decoder_vocab_size") or hf_config.get("vocab_size")
    return _check_embedding_sharing(hf_config | {"decoder_vocab_size": target_vocab_size})


def _to_hf_config(hf_config: HFConfig) -> HFConfig:
    pad_id = hf_config["pad_token_id"]
    # as in Marian itself, the probability of the padding token is distributed over the other tokens
    suppress_fields = {"bad_words_ids": [[pad_id]], "renormalize_logits": True}
    hf_config = bart.set_forced_eos(_check_embedding_sharing(hf_config))
    return hf_config | {"decoder_start_token_id": pad_id} | suppress_fields


def _check_embedding_sharing(hf_config: HFConfig) -> HFConfig:
    if hf_config.get("share_encoder_decoder_embeddings", True) and hf_config.get("tie_word_embeddings") is False:
        raise InputError("marian: with one embedding table for source and target, the output must be tied to it")
    return hf_config


TOKENIZER_TEMPLATE = Template(
    kind="sentencepiece_pair",
    special_tokens={"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    after_vocab=("pad",),
    single="$A </s>",
    pair="$A $B </s>",
    hf_classes=("MarianTokenizer",),
)

HF_FORMAT = HFFormat(
    model_type="marian",
    prefix="model.",
    architectures={
        "MarianMTModel": Architecture("seq2seq_lm"),
        "MarianModel": Architecture("backbone", no_prefix=True),
    },
    config_keys=(
        *(config_key for config_key in bart.HF_CONFIG_KEYS if config_key.hf_key != "decoder_start_token_id"),
        ConfigKey("decoder_vocab_size", "target_vocab_size", "target_embedding.vocab_size"),
        ConfigKey("pad_token_id", "bos_id", "bos_id"),
        ConfigKey("share_encoder_decoder_embeddings", "share_embeddings", "share_embeddings"),
        ConfigKey("tie_word_embeddings", "tie_embeddings", "head.tie_embeddings", heads=("seq2seq_lm",)),
    ),
    supported_values={**bart.HF_SUPPORTED_VALUES, "normalize_embedding": False, "static_position_embeddings": True},
    from_hf_config=_from_hf_config,
    to_hf_config=_to_hf_config,
    backbone_rules=(Drop("model.{side}.embed_positions.weight"), *bart.LAYER_RULES),  # the sinusoids are recomputed
    head_rules={"seq2seq_lm": bart.LM_HEAD_RULES},
    conditional_rules=(
        WhenSpec("share_embeddings", True, bart.SHARED_EMBEDDING_RULES),
        WhenSpec(
            "share_embeddings",
            False,
            (
                Rename("model.encoder.embed_tokens.weight", "source_embedding.tokens.weight"),
                Rename("model.decoder.embed_tokens.weight", "target_embedding.tokens.weight"),
            ),
        ),
    ),
)
