"""A model with its tokenizers or image processor, and its raw outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.checkpoints.arguments import as_list, as_texts
from qkv.checkpoints.embed import LayerSelection, Pooling, embed
from qkv.checkpoints.inputs import TextOrPair, describe_input, encode_inputs, iter_batches, require_tokenizer
from qkv.checkpoints.state import AnyModel
from qkv.data.image_processor import ImageProcessor
from qkv.errors import InputError, check_flag, check_names
from qkv.nn import EncoderDecoder, Ragged
from qkv.nn.bilm import BiLM
from qkv.nn.bilm_encoder import BiLMEncoder
from qkv.nn.capture import capture_attention, collect_batches
from qkv.nn.frontend import RawInput
from qkv.nn.stack import Stack
from qkv.tokenization.backend import Encoding
from qkv.tokenization.tokenizer import Tokenizer

_BATCH_TOKENS, _BATCH_IMAGES = 8192, 64


@dataclass(frozen=True)
class BundleOutput:
    """Outputs of a model: each list has one entry per input, in input order. Tensors are float32 on the CPU."""

    tokens: list[list[str]]
    """The tokens of each input, special tokens of the template included; for an image, names of its patches."""
    logits: list[Tensor] | None = None
    """The head's logits: [outputs] if it reads whole sequences, [tokens, outputs] if it reads every token.

    For a sequence-to-sequence model: [target tokens + 1, vocabulary], the last row being the prediction after the whole
    target. None if the model has no head, or needs targets that were not given.
    """
    hidden_states: list[Tensor] | None = None
    """The hidden states of the embedding and all layers [layers + 1, tokens, d_model], the last after the final norm.

    Of an encoder-decoder, those of the encoder. A recurrent encoder has only its last layer. None unless requested.
    """
    attentions: list[dict[str, Tensor]] | None = None
    """Attention weights [heads, queries, keys] by layer name (`encoder.0.self_attention`). None unless requested."""


@dataclass(frozen=True, repr=False)
class ModelBundle:
    """A model with its tokenizers or image processor, as `qkv.load` returns it, in eval mode."""

    model: AnyModel
    """The torch module; `model.spec` describes it."""
    source_tokenizer: Tokenizer | None = None
    """The tokenizer of the input texts; None for a model of images, or if the folder has none."""
    target_tokenizer: Tokenizer | None = None
    """The tokenizer of the generated texts, often the same object as `source_tokenizer`."""
    image_processor: ImageProcessor | None = None
    """The preprocessing of images, for a model that reads them."""
    missing_keys: tuple[str, ...] = ()
    """Parameters that the checkpoint did not hold: newly initialized, to be trained."""
    unexpected_keys: tuple[str, ...] = ()
    """Tensors of the checkpoint that this model does not use, such as another head's."""
    generation_settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of `qkv.GenerationConfig` that a checkpoint comes with (generation_config.json)."""
    folder: Path | None = None
    """The folder that the model was loaded from, with the head it was saved with; a run's recipe is there."""

    @torch.no_grad()
    def __call__(
        self,
        inputs: Sequence[Any],
        *,
        targets: Sequence[str] | None = None,
        logits: bool = True,
        attentions: bool | str | Sequence[str] = False,
        hidden_states: bool = False,
    ) -> BundleOutput:
        """Run the model on inputs and return its outputs per input, in input order.

            bundle = qkv.load("models/bert-small")
            output = bundle(["The cat sat on the mat.", "A dog."], hidden_states=True)
            output.tokens[0], output.logits[0].shape, output.hidden_states[0].shape

        Args:
            inputs: texts or (text, text_pair) tuples, encoded in the model's template; for a model of images, their
                paths, Pillow images or arrays. One text is a list of one.
            targets: the texts that the decoder of a sequence-to-sequence model reads (teacher forcing).
            logits: return the head's logits; those of a language model have one number per token and vocabulary entry.
            attentions: return the attention weights of all layers, or of those with these names or glob patterns.
            hidden_states: return the hidden states of all layers.
        """
        self._check_eval_mode()
        check_flag(logits, "logits")
        check_flag(hidden_states, "hidden_states")
        layers = None if isinstance(attentions, bool) else check_names(attentions, "attentions", "names of layers")
        wants_maps = attentions is True or bool(layers)
        items = as_list(inputs, "inputs") if self.image_processor is not None else as_texts(inputs, "inputs")
        target_ids = self._encode_targets(targets, len(items))
        has_logits = logits and self.model.head is not None and (not self._reads_targets or target_ids is not None)
        results: list[_Result] = [_Result() for _ in items]
        for batch in self._batches(items) if items else ():
            rows = [results[i] for i in batch.indices]
            for result, tokens in zip(rows, batch.tokens, strict=True):
                result.tokens = tokens
            if hidden_states:  # first: the maps of an enclosing capture are those of the pass below
                for result, states in zip(rows, self._layer_states(batch), strict=True):
                    result.hidden_states = states.float().cpu()
            with capture_attention(self.model, layers) if wants_maps else nullcontext() as maps:
                for result, row_logits in zip(rows, self._logits(batch, target_ids, has_logits), strict=has_logits):
                    result.logits = row_logits.float().cpu()
                for name, weights in ((name, layer) for name, layer in (maps or {}).items() if layer):
                    for result, sequence_weights in zip(rows, weights, strict=True):
                        result.attentions[name] = sequence_weights
        return BundleOutput(
            tokens=[result.tokens for result in results],
            logits=[result.logits for result in results] if has_logits else None,
            hidden_states=[result.hidden_states for result in results] if hidden_states else None,
            attentions=[result.attentions for result in results] if wants_maps else None,
        )

    def __repr__(self) -> str:
        spec, head = self.model.spec, self.model.spec.head
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        location = "" if self.folder is None else f", from {self.folder}"
        head_name = "no head" if head is None else f"head {head.kind}"
        return f"ModelBundle({spec.family}, {parameters:,} parameters, {head_name}, on {self.model.device}{location})"

    def _check_eval_mode(self) -> None:
        if self.model.training:
            raise InputError("the model is in training mode; call bundle.model.eval() before predicting")

    def embed(
        self,
        texts: Sequence[TextOrPair],
        *,
        pool: Pooling = "mean",
        layers: LayerSelection | int = "last",
        normalize: bool = False,
    ) -> list[Tensor]:
        """Return one vector per text, or one per token or word; `qkv.embed` has further options."""
        return embed(self, texts, pool=pool, layers=layers, normalize=normalize)

    def tokenize(self, texts: Sequence[TextOrPair]) -> list[list[str]]:
        """Return the tokens of each text in the model's template, as the vocabulary spells them."""
        return [self._token_names(encoding.ids) for encoding in self._encode(as_texts(texts))]

    @property
    def _reads_targets(self) -> bool:
        """Whether the head reads a decoder whose input is a target text: a sequence-to-sequence model."""
        return self.model.is_encoder_decoder and self.model.is_generative

    def _encode(self, texts: Sequence[TextOrPair]) -> list[Encoding]:
        encodings = encode_inputs(self, texts, [describe_input(text) for text in texts])
        # a sequence-to-sequence model trained here reads sources that end with EOS
        if require_tokenizer(self).is_native and self._reads_targets:
            return [_append_token(encoding, self.model.spec.eos_id) for encoding in encodings]
        return encodings

    def _encode_targets(self, targets: Sequence[str] | None, num_inputs: int) -> list[list[int]] | None:
        if targets is None:
            return None
        if not self._reads_targets or self.target_tokenizer is None:
            raise InputError("targets: only a sequence-to-sequence model reads targets; leave them out")
        texts = check_names(targets, "targets")
        if len(texts) != num_inputs:
            raise InputError(f"targets: there are {len(texts)} for {num_inputs} inputs; give one per input")
        return self.target_tokenizer.encode_batch(texts)

    def _batches(self, inputs: Sequence[Any]) -> Iterator[_Batch]:
        if self.image_processor is not None:
            patches = ["[CLS]", *(f"patch {i}" for i in range(self.model.max_input_length - 1))]
            with collect_batches(self.model) as begin_batch:
                for start in range(0, len(inputs), _BATCH_IMAGES):
                    images = self.image_processor.preprocess_batch(inputs[start : start + _BATCH_IMAGES])
                    indices = list(range(start, start + len(images)))
                    begin_batch(indices)
                    yield _Batch(indices, images.to(self.model.device), None, [patches] * len(images))
            return
        encodings = self._encode(inputs)
        for batch in iter_batches(self, encodings, _BATCH_TOKENS):
            tokens = [self._token_names(encodings[i].ids) for i in batch.input_indices]
            yield _Batch(batch.input_indices, batch.source, batch.token_type_ids, tokens)

    def _logits(self, batch: _Batch, target_ids: list[list[int]] | None, has_logits: bool) -> list[Tensor]:
        """Run the model on a batch and return the logits of each input; none unless `has_logits`."""
        model = self.model
        if isinstance(model, EncoderDecoder) and self._reads_targets:
            encoder_output = model.encode(batch.source)
            if target_ids is None:
                return []
            decoder_inputs = [torch.tensor([model.spec.bos_id, *target_ids[i]]) for i in batch.indices]
            packed = Ragged.pack(decoder_inputs).to(model.device)
            hidden = packed.with_values(model.decode(encoder_output, packed))
        else:
            hidden = model.hidden_states(batch.source, batch.token_type_ids).hidden
        if model.head is None or not has_logits:
            return []
        if isinstance(model, BiLMEncoder) and model.is_language_model:
            return hidden.to_tokens().with_values(model.logits(batch.source)).sequences()
        hidden = hidden.to_tokens() if model.head.spec.is_token_level else hidden
        logits: Tensor = model.head(hidden)
        return hidden.with_values(logits).sequences() if model.head.spec.is_token_level else list(logits)

    def _layer_states(self, batch: _Batch) -> list[Tensor]:
        """Return the hidden states [layers + 1, n, d_model] of each input; of a recurrent encoder, the last layer."""
        stack, embedded = self.model.input_stack, self.model.embed_inputs(batch.source, batch.token_type_ids)
        if isinstance(stack, Stack | BiLM):
            states = list(stack.all_hidden_states(embedded))
        else:
            states = [stack(embedded).hidden.values]
        by_token = embedded.with_values(torch.stack(states, 1)).to_tokens()  # [T, layers + 1, d_model]
        by_input = by_token.sequences()  # [n, layers + 1, d_model] each
        return [layers.transpose(0, 1) for layers in by_input]

    def _token_names(self, ids: Sequence[int]) -> list[str]:
        tokenizer = require_tokenizer(self)
        return [tokenizer.backend.id_to_token(token_id) or str(token_id) for token_id in ids]


@dataclass
class _Result:
    """The outputs for one input, while batches are computed."""

    tokens: list[str] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    hidden_states: Tensor = field(default_factory=lambda: torch.empty(0))
    attentions: dict[str, Tensor] = field(default_factory=dict)


class _Batch(NamedTuple):
    """Several inputs as the model reads them."""

    indices: list[int]  # positions in the caller's list
    source: RawInput
    token_type_ids: Tensor | None
    tokens: list[list[str]]


def _append_token(encoding: Encoding, token_id: int) -> Encoding:
    return replace(
        encoding,
        ids=[*encoding.ids, token_id],
        token_type_ids=[*encoding.token_type_ids, 0],
        offsets=[*encoding.offsets, (0, 0)],
        word_ids=[*encoding.word_ids, None],
        sequence_ids=[*encoding.sequence_ids, None],
    )
