"""Marian: the Transformer of the translation models that the University of Helsinki gives away.

Junczys-Dowmunt et al. 2018, https://arxiv.org/abs/1804.00344. It replaces these of BART's fields: sinusoids, all sines
before all cosines, no norm behind the embedding, source and target with tables of their own where they share none. A
target begins with the padding token, which is never written. `opus` is the size of the models that are given away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv import spec as s
from qkv.errors import InputError
from qkv.families import bart
from qkv.text.template import Template
from qkv.weights.format import Architecture, Config, Format, Only, Setting
from qkv.weights.rules import Drop, Rename

PAPER = "Junczys-Dowmunt et al. 2018"


@dataclass(frozen=True, kw_only=True)
class Shape(bart.Shape):
    """What a recipe may say of a Marian, beside what it may say of a BART."""

    position: Literal["halves", "sinusoid", "learned", "none"] = "halves"
    embedding_norm: bool = False
    tied: bool = True  # the output's weight is the target's table


SIZES = {
    "opus": Shape(
        width=512,
        heads=8,
        layers=6,
        hidden=2048,
        decoder_heads=8,
        decoder_layers=6,
        decoder_hidden=2048,
        activation="silu",
        scale=True,
        length=512,
    ),
}


def spec(
    shape: Shape,
    *,
    source: int = 58101,
    target: int = 58101,
    start: int | None = None,
    end: int = 0,
    head: str = "generation",
    labels: tuple[str, ...] = (),
) -> s.Model:
    """An encoder-decoder for vocabularies of the given sizes; `start` is the padding token, if not said the last."""
    pad = target - 1 if start is None else start
    like = bart.spec(shape, source=source, target=target, start=pad, end=end, pad=pad, labels=labels)
    heads = {"generation": s.replace(like.head, tied=shape.tied)}
    return s.replace(like, family="marian", head=s.chosen(heads, head), never=(pad,))


def _read(config: Config) -> Config:
    pad = config.get("pad_token_id", 58100)
    for key, only in (("decoder_start_token_id", pad), ("bad_words_ids", [[pad]])):
        if config.get(key) not in (None, only):
            raise InputError(f"config.json: {key} is {config[key]!r}; of marian qkv has the padding token {pad} only")
    return _checked(config | {"decoder_vocab_size": config.get("decoder_vocab_size") or config.get("vocab_size")})


def _write(config: Config) -> Config:
    pad = config["pad_token_id"]
    never = {"bad_words_ids": [[pad]], "renormalize_logits": True}  # its share goes to the others, as in Marian itself
    return bart.ending(_checked(config)) | {"decoder_start_token_id": pad} | never


def _checked(config: Config) -> Config:
    if config.get("share_encoder_decoder_embeddings", True) and config.get("tie_word_embeddings") is False:
        raise InputError("marian: one table for source and target needs an output that is tied to it")
    return config


TEMPLATE = Template(
    kind="marian",
    tokens={"end": "</s>", "unk": "<unk>", "pad": "<pad>"},
    last=("pad",),
    single="$A </s>",
    pair="$A $B </s>",
    classes=("MarianTokenizer",),
)

HUGGING_FACE = Format(
    model_type="marian",
    prefix="model.",
    architectures={
        "MarianMTModel": Architecture("generation"),
        "MarianModel": Architecture("body", bare=True),
    },
    settings=(
        *(setting for setting in bart.SETTINGS if setting.key != "decoder_start_token_id"),
        Setting("decoder_vocab_size", "target", "target.vocabulary"),
        Setting("pad_token_id", "start", "start"),
        Setting("share_encoder_decoder_embeddings", "shared", "shared"),
        Setting("tie_word_embeddings", "tied", "head.tied", only=("generation",)),
    ),
    fixed={**bart.FIXED, "normalize_embedding": False, "static_position_embeddings": True},
    read=_read,
    write=_write,
    body=(Drop("model.{side}.embed_positions.weight"), *bart.LAYERS),  # sinusoids, which are made again
    heads={"generation": bart.GENERATION},
    only=(
        Only("shared", True, bart.ONE_TABLE),
        Only(
            "shared",
            False,
            (
                Rename("model.encoder.embed_tokens.weight", "source.tokens.weight"),
                Rename("model.decoder.embed_tokens.weight", "target.tokens.weight"),
            ),
        ),
    ),
)
