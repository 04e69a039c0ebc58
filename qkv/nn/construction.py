"""Build models from their specs, and change what a model was built with: heads, features, LoRA."""

from __future__ import annotations

import torch

from qkv import spec
from qkv.errors import InputError, check_type
from qkv.nn.bilm_encoder import BiLMEncoder
from qkv.nn.init import SkipInitOnMeta, init_weights
from qkv.nn.layer_mix import make_scalar_mix, num_concat_layers
from qkv.nn.lora import add_lora, merge_lora
from qkv.nn.model import Decoder, Encoder, EncoderDecoder, Model
from qkv.nn.shell import build_heads
from qkv.nn.two_stream import TwoStreamEncoder, has_two_streams
from qkv.spec.check import check_memory, check_model


def build(s: spec.Model) -> Encoder | Decoder | EncoderDecoder:
    """Build the module that a spec describes, newly initialized.

    bert = qkv.families.get_family("bert")
    model = qkv.build(bert.make_spec(bert.PRESETS["mini"], source_vocab_size=1000, head="masked_lm"))
    """
    check_type(s, spec.Model, "spec", "a qkv.spec.Model, such as make_spec of a family returns")
    check_model(s)
    if torch.get_default_device().type != "meta":
        check_memory(s)
    model: Encoder | Decoder | EncoderDecoder
    if s.decoder is None:
        shell = TwoStreamEncoder if has_two_streams(s) else BiLMEncoder if isinstance(s.encoder, spec.BiLM) else Encoder
        model = shell(s)
    else:
        model = Decoder(s) if s.encoder is None else EncoderDecoder(s)
    if s.lora is not None:
        add_lora(model, s.lora)
    init_weights(s, model.modules())
    return model


def build_on_meta(s: spec.Model) -> Encoder | Decoder | EncoderDecoder:
    """Build a model on the meta device: it has shapes but no memory, and nothing is drawn at random."""
    with torch.device("meta"), SkipInitOnMeta():
        return build(s)


def set_features_and_lora(model: Model, feature_layers: spec.FeatureLayers, lora: spec.LoraConfig | None) -> None:
    """Change the layers that the head reads, merge LoRA weights that the model has, and add new ones.

    A head whose input width changes is newly initialized.
    """
    if model.spec.lora is not None:
        merge_lora(model)
    if lora is not None:
        add_lora(model, lora)
    model.spec = spec.replace(model.spec, feature_layers=feature_layers, lora=lora)
    model.scalar_mix = make_scalar_mix(model.spec)
    head, num_layers = model.spec.head, num_concat_layers(model.spec)
    if head is not None and head.num_concat_layers != num_layers:
        if isinstance(head.pool, spec.Attention):
            raise InputError("attention pooling reads one layer; set feature_layers to last, or pooling to mean")
        replace_head(model, spec.replace(head, num_concat_layers=num_layers))


def replace_head(model: Model, head: spec.Head) -> None:
    """Put a newly initialized head on a model; its auxiliary head stays."""
    model.spec = spec.replace(model.spec, head=head)
    model.head = build_heads(model.spec)[0]
    assert model.head is not None
    init_weights(model.spec, model.head.train(model.training).modules())
