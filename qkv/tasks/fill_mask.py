"""Fill-mask: the most probable tokens at the masks of a text, by a masked language model (Devlin et al. 2019, 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from qkv.checkpoints.inputs import OnTooLong, truncate
from qkv.data.examples import TextExample
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig
from qkv.objectives.classification import Inputs
from qkv.tasks.base import HeadTask, check_not_empty
from qkv.tasks.features import FeatureOutputs, Features, pack_features
from qkv.tasks.predictions import Alternative, TaskPrediction
from qkv.tokenization.tokenizer import Tokenizer


class MaskedText(NamedTuple):
    """An encoded text with masks, and the tokenizer that decodes it."""

    ids: list[int]
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class FillMask(HeadTask[TextExample]):
    """The tokens at a text's masks, each predicted independently. A prediction is the filled text."""

    on_too_long: OnTooLong = "refuse"
    """Refuse or truncate a text that exceeds the model's maximum length."""

    name = "fill_mask"
    head_kind = "lm"
    example_type = TextExample

    def with_generation(self, config: GenerationConfig | None, prefix: str) -> Self:  # noqa: ARG002
        return self if config is None else replace(self, on_too_long=config.on_too_long)

    def parse_line(self, line: str, location: str) -> TextExample:
        return self.parse_texts([line], location)

    def parse_texts(self, texts: Sequence[str], location: str) -> TextExample:
        if len(texts) != 1:
            raise InputError(f"{location}: this model takes one text, not {len(texts)}")
        check_not_empty(texts, location)
        return TextExample(texts[0], location)

    def featurize(
        self,
        examples: Sequence[TextExample],
        tokenizer: Tokenizer,
        labels: Sequence[str],  # noqa: ARG002
        max_length: int,
    ) -> list[Features]:
        if tokenizer.mask_id is None:
            reason = "this model's tokenizer has no mask token, so there is nothing to fill"
            raise InputError(f"{reason}; qkv embed gives its vectors")
        mask_token, features = tokenizer.ids_to_display([tokenizer.mask_id])[0], []
        encodings = tokenizer.encode_plus_batch([example.text for example in examples], parse_special_tokens=True)
        for index, (encoding, example) in enumerate(zip(encodings, examples, strict=True)):
            truncated = len(encoding.ids) > max_length
            if truncated and self.on_too_long == "refuse":
                reason = f"{len(encoding.ids)} tokens, and the model takes at most {max_length}"
                raise InputError(f"{example.location}: {reason}; shorten it, or choose --on-too-long truncate")
            fitted = truncate(encoding, max_length)
            positions = tuple(position for position, token in enumerate(fitted.ids) if token == tokenizer.mask_id)
            if not positions:
                raise InputError(f"{example.location}: has no {mask_token}; write it at the word to fill in")
            masked_text = MaskedText(list(fitted.ids), tokenizer)
            features.append(
                Features.from_encodings(
                    index, [fitted], (), label_positions=positions, metadata=masked_text, truncated=truncated
                )
            )
        return features

    def collate(self, features: Sequence[Features], use_token_types: bool) -> Inputs:
        source, token_type_ids, positions = pack_features(features, use_token_types)
        return Inputs(source, token_type_ids, positions, torch.zeros(0, dtype=torch.long))

    def postprocess(self, outputs: FeatureOutputs, example: TextExample, labels: Sequence[str]) -> str:  # noqa: ARG002
        ((feature, logits),) = outputs
        return _fill(feature, logits.argmax(-1))

    def describe(
        self,
        prediction: str,
        outputs: FeatureOutputs,
        example: TextExample,  # noqa: ARG002
        labels: Sequence[str],  # noqa: ARG002
        n_best: int,
    ) -> TaskPrediction:
        ((feature, logits),) = outputs
        log_probs, tokens = torch.log_softmax(logits, -1).topk(min(n_best, logits.shape[-1]))  # [masks, n_best]
        scores = log_probs.sum(0).exp().tolist()  # [n_best] masks are independent
        alternatives = tuple(Alternative(_fill(feature, tokens[:, i]), score) for i, score in enumerate(scores))
        fields: dict[str, Any] = {"text": prediction, "probability": scores[0]}
        if n_best > 1:
            fields["alternatives"] = [{"text": text, "probability": score} for text, score in alternatives]
        return TaskPrediction(prediction, prediction, scores[0], alternatives, fields, scores[0])


def _fill(feature: Features, tokens: Tensor) -> str:
    """Return the text with tokens [masks] at its masks."""
    assert feature.label_positions is not None
    ids = list(feature.metadata.ids)
    for position, token in zip(feature.label_positions, tokens.tolist(), strict=True):
        ids[position] = token
    text: str = feature.metadata.tokenizer.decode(ids)
    return text
