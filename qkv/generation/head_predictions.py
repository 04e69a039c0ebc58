"""What a model says about a text without writing one: fill a mask, classify, tag, answer, choose, follow.

The heads are those of the notes' table of tasks; which one a model has, its spec says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig, PredictedSpan, Prediction, validate
from qkv.checkpoints.inputs import (
    EncodedBatch,
    TextOrPair,
    compute_hidden_states,
    encode_inputs,
    iter_batches,
    max_input_length,
    require_tokenizer,
)
from qkv.nn import Encoder
from qkv.nn.subword_pooling import pool_subwords
from qkv.tokenization.backend import Encoding

PredictInput = str | tuple[str, ...]
NEXT_SENTENCE_LABELS = ("follows", "does not follow")
_MAX_ANSWER_TOKENS = 30  # tokens that an answer may have


def predict_with_head(bundle: ModelBundle, inputs: Sequence[PredictInput], config: GenerationConfig, input_names: Sequence[str]) -> list[list[Prediction]]:
    """The `config.n_best` things that a model's head says about each input, likeliest first."""
    validate(config)
    head = bundle.model.spec.head
    if head is None or head.kind == "pooler":
        raise InputError(f"this {bundle.model.spec.family} has no head to predict with; qkv embed gives its vectors")
    if isinstance(bundle.model.spec.source_embedding, spec.PatchEmbedding):
        return _classify_images(bundle, [_require_single_text(value, input_name) for value, input_name in zip(inputs, input_names, strict=True)], config)
    return _PREDICTORS[head.kind](bundle, inputs, config, input_names)


def _fill_mask(bundle: ModelBundle, inputs: Sequence[PredictInput], config: GenerationConfig, input_names: Sequence[str]) -> list[list[Prediction]]:
    """The likeliest words where the text has masks; of several masks each is filled for itself."""
    tokenizer = require_tokenizer(bundle)
    if tokenizer.mask_id is None:
        raise InputError("this model's tokeniser has no mask token, so there is nothing to fill")
    encodings = encode_inputs(bundle, [_require_single_text(g, p) for g, p in zip(inputs, input_names, strict=True)], input_names, on_too_long=config.on_too_long, parse_special_tokens=True)
    mask_token = tokenizer.ids_to_display([tokenizer.mask_id])[0]
    for encoding, input_name in zip(encodings, input_names, strict=True):
        if tokenizer.mask_id not in encoding.ids:
            raise InputError(f"{input_name}: has no {mask_token}; write it where a word is to be filled in")

    def fill(batch: EncodedBatch, hidden: Tensor) -> list[list[Prediction]]:
        mask_positions = (batch.source.values == tokenizer.mask_id).nonzero().flatten()
        log_probs = _log_softmax(bundle, hidden[mask_positions])
        scores, tokens = log_probs.topk(min(config.n_best, log_probs.shape[-1]))  # [masks, best]
        out, num_done = [], 0
        for row in batch.input_indices:
            positions = [i for i, token in enumerate(encodings[row].ids) if token == tokenizer.mask_id]
            mask_slice = slice(num_done, num_done + len(positions))
            num_done += len(positions)
            predictions = []
            for rank in range(scores.shape[1]):
                ids = list(encodings[row].ids)
                for position, token in zip(positions, tokens[mask_slice, rank].tolist(), strict=True):
                    ids[position] = token
                predictions.append(Prediction(tokenizer.decode(ids), float(scores[mask_slice, rank].sum())))
            out.append(predictions)
        return out

    return _run_batches(bundle, encodings, config, fill)


def _classify_texts(bundle: ModelBundle, inputs: Sequence[PredictInput], config: GenerationConfig, input_names: Sequence[str]) -> list[list[Prediction]]:
    encodings = encode_inputs(bundle, [_require_text_or_pair(g, p) for g, p in zip(inputs, input_names, strict=True)], input_names, on_too_long=config.on_too_long, parse_special_tokens=config.parse_special_tokens)
    return _run_batches(bundle, encodings, config, lambda batch, hidden: _label_predictions(bundle, _pooled_logits(bundle, batch, hidden), config))


def _next_sentence(bundle: ModelBundle, inputs: Sequence[PredictInput], config: GenerationConfig, input_names: Sequence[str]) -> list[list[Prediction]]:
    for value, input_name in zip(inputs, input_names, strict=True):
        _require_texts(value, input_name, "two sentences")
    return _classify_texts(bundle, inputs, config, input_names)


def _classify_images(bundle: ModelBundle, files: Sequence[str], config: GenerationConfig) -> list[list[Prediction]]:
    """Labels of pictures."""
    if bundle.image_processor is None:
        raise InputError("this model came without a preprocessor_config.json, so it cannot read pictures")
    out, model = [], bundle.model
    assert isinstance(model, Encoder)
    batch_size = max(1, config.batch_tokens // max_input_length(model.spec))
    for start in range(0, len(files), batch_size):
        images = bundle.image_processor.preprocess_batch([Path(f) for f in files[start : start + batch_size]]).to(model.device)
        out += _label_predictions(bundle, model(images), config)
    return out


def _classify_tokens(bundle: ModelBundle, inputs: Sequence[PredictInput], config: GenerationConfig, input_names: Sequence[str]) -> list[list[Prediction]]:
    """Every word with its label; a word's vector is that of its first piece, or the mean of its pieces'."""
    assert bundle.model.spec.head is not None
    subword_pooling = config.subword_pooling or bundle.model.spec.head.subword_pooling
    texts = [_require_single_text(value, input_name) for value, input_name in zip(inputs, input_names, strict=True)]
    encodings = encode_inputs(bundle, texts, input_names, on_too_long=config.on_too_long, parse_special_tokens=config.parse_special_tokens)

    def tag(batch: EncodedBatch, hidden: Tensor) -> list[list[Prediction]]:
        selected = [encodings[i] for i in batch.input_indices]
        word_states = pool_subwords(batch.source.with_values(hidden), [encoding.word_ids for encoding in selected], subword_pooling)
        scores, labels = _log_softmax(bundle, word_states.values).max(-1)
        offset, out = 0, []
        for row, encoding, num_words in zip(batch.input_indices, selected, word_states.layout.lengths_list, strict=True):
            predicted = zip(labels[offset : offset + num_words].tolist(), scores[offset : offset + num_words].tolist(), strict=True)
            offset += num_words
            spans = [
                PredictedSpan(texts[row][start:end], _label_name(bundle, label), score, start, end)
                for (start, end), (label, score) in zip(_word_spans(encoding), predicted, strict=True)
            ]
            tagged_text = " ".join(f"{span.text}/{span.label}" for span in spans)
            out.append([Prediction(tagged_text, sum(span.score for span in spans), spans=tuple(spans))])
        return out

    return _run_batches(bundle, encodings, config, tag)


def _extract_answers(bundle: ModelBundle, inputs: Sequence[PredictInput], config: GenerationConfig, input_names: Sequence[str]) -> list[list[Prediction]]:
    """The likeliest stretches of the second text that answer the first (Devlin et al. 2019, 4.2)."""
    pairs = [_require_texts(value, input_name, "a question and a text") for value, input_name in zip(inputs, input_names, strict=True)]
    encodings = encode_inputs(bundle, [(pair[0], pair[1]) for pair in pairs], input_names, on_too_long=config.on_too_long, parse_special_tokens=config.parse_special_tokens)

    def answer(batch: EncodedBatch, hidden: Tensor) -> list[list[Prediction]]:
        out = []
        for row, span_logits in zip(batch.input_indices, batch.source.with_values(_head_logits(bundle, hidden)).sequences(), strict=True):
            is_context = torch.tensor([sequence_id == 1 for sequence_id in encodings[row].sequence_ids], device=span_logits.device)
            start_log_probs, end_log_probs = torch.log_softmax(span_logits.float().masked_fill(~is_context[:, None], float("-inf")), 0).unbind(-1)
            joint_scores = (start_log_probs[:, None] + end_log_probs[None]).triu().tril(_MAX_ANSWER_TOKENS - 1)  # [n, n]
            is_allowed = torch.ones_like(joint_scores).triu().tril(_MAX_ANSWER_TOKENS - 1).bool()
            scores, flat_index = joint_scores.masked_fill(~is_allowed, float("-inf")).flatten().topk(min(config.n_best, joint_scores.numel()))
            ranked = zip(scores.tolist(), flat_index.tolist(), strict=True)
            spans = [
                (s, encodings[row].offsets[i // len(span_logits)][0], encodings[row].offsets[i % len(span_logits)][1]) for s, i in ranked
            ]
            out.append([_answer_prediction(pairs[row][1], *span) for span in spans if span[0] > float("-inf")])
        return out

    return _run_batches(bundle, encodings, config, answer)


def _answer_prediction(text: str, score: float, start: int, end: int) -> Prediction:
    return Prediction(text[start:end], score, spans=(PredictedSpan(text[start:end], "answer", score, start, end),))


def _multiple_choice(bundle: ModelBundle, inputs: Sequence[PredictInput], config: GenerationConfig, input_names: Sequence[str]) -> list[list[Prediction]]:
    """The choices by how well each goes on from the first text."""
    text_lists = [_require_texts(value, input_name, "a text and its choices") for value, input_name in zip(inputs, input_names, strict=True)]
    pairs = [((context, choice), input_name) for (context, *rest), input_name in zip(text_lists, input_names, strict=True) for choice in rest]
    encodings = encode_inputs(bundle, [pair for pair, _ in pairs], [input_name for _, input_name in pairs], on_too_long=config.on_too_long, parse_special_tokens=config.parse_special_tokens)
    scored = _run_batches(
        bundle,
        encodings,
        config,
        lambda batch, hidden: [[Prediction("", s)] for s in _pooled_logits(bundle, batch, hidden).flatten().tolist()],
    )
    out, offset = [], 0
    for _, *choices in text_lists:
        choice_logits = torch.tensor([predictions[0].score for predictions in scored[offset : offset + len(choices)]])
        offset += len(choices)
        scores, order = torch.log_softmax(choice_logits, 0).sort(descending=True)
        ranked = zip(order.tolist()[: config.n_best], scores.tolist(), strict=False)
        out.append([Prediction(choices[i], score) for i, score in ranked])
    return out


_PREDICTORS: dict[str, Callable[[ModelBundle, Sequence[PredictInput], GenerationConfig, Sequence[str]], list[list[Prediction]]]] = {
    "lm": _fill_mask,
    "sequence": _classify_texts,
    "next_sentence": _next_sentence,
    "token": _classify_tokens,
    "span": _extract_answers,
    "choice": _multiple_choice,
}


# ---- what they share ------------------------------------------------------------------------------------------------


def _run_batches(
    bundle: ModelBundle,
    encodings: Sequence[Encoding],
    config: GenerationConfig,
    postprocess: Callable[[EncodedBatch, Tensor], list[list[Prediction]]],
) -> list[list[Prediction]]:
    """Hidden states batch by batch, read off by `postprocess`, in the order of the inputs."""
    out: list[list[Prediction]] = [[] for _ in encodings]
    for batch in iter_batches(bundle, encodings, config.batch_tokens):
        batch_predictions = postprocess(batch, compute_hidden_states(bundle, batch).hidden.values)
        for row, predictions in zip(batch.input_indices, batch_predictions, strict=True):
            out[row] = predictions
    return out


def _head_logits(bundle: ModelBundle, features: Tensor) -> Tensor:
    assert bundle.model.head is not None
    logits: Tensor = bundle.model.head(features)
    return logits


def _log_softmax(bundle: ModelBundle, features: Tensor) -> Tensor:
    return torch.log_softmax(_head_logits(bundle, features).float(), -1)


def _pooled_logits(bundle: ModelBundle, batch: EncodedBatch, hidden: Tensor) -> Tensor:
    assert bundle.model.head is not None
    logits: Tensor = bundle.model.head(batch.source.with_values(hidden))
    return logits  # [B, outputs]


def _label_predictions(bundle: ModelBundle, logits: Tensor, config: GenerationConfig) -> list[list[Prediction]]:
    assert bundle.model.spec.head is not None
    if bundle.model.spec.head.multi_label:
        return [_labels_above(bundle, row, config.threshold) for row in torch.nn.functional.logsigmoid(logits.float())]
    if logits.shape[-1] == 1:  # a regression: the number itself
        return [[Prediction(f"{value:.4f}", value)] for value in logits.flatten().tolist()]
    scores, labels = torch.log_softmax(logits.float(), -1).sort(descending=True)
    rows = zip(scores.tolist(), labels.tolist(), strict=True)
    return [[Prediction(_label_name(bundle, i), s) for s, i in list(zip(*row, strict=True))[: config.n_best]] for row in rows]


def _labels_above(bundle: ModelBundle, scores: Tensor, threshold: float) -> list[Prediction]:
    """All labels that are likely enough, each for itself; perhaps none."""
    ranked = zip(*(column.tolist() for column in scores.sort(descending=True)), strict=True)
    return [Prediction(_label_name(bundle, label), score) for score, label in ranked if math.exp(score) >= threshold]


def _label_name(bundle: ModelBundle, label: int) -> str:
    head = bundle.model.spec.head
    assert head is not None
    names = NEXT_SENTENCE_LABELS if head.kind == "next_sentence" else head.labels
    return names[label] if names else str(label)


def _word_spans(encoding: Encoding) -> list[tuple[int, int]]:
    """The characters of each word, from its first piece to its last."""
    spans: dict[int, tuple[int, int]] = {}
    for word, (start, end) in zip(encoding.word_ids, encoding.offsets, strict=True):
        if word is not None:
            spans[word] = (spans.get(word, (start, end))[0], end)
    return list(spans.values())


def _require_single_text(value: PredictInput, input_name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{input_name}: this model takes one text, not {len(value)}")
    return value


def _require_text_or_pair(value: PredictInput, input_name: str) -> TextOrPair:
    if isinstance(value, str):
        return value
    if len(value) != 2:
        raise InputError(f"{input_name}: this model takes one text or two, not {len(value)}")
    return value[0], value[1]


def _require_texts(value: PredictInput, input_name: str, expected: str) -> tuple[str, ...]:
    if isinstance(value, str) or len(value) < 2:
        raise InputError(f"{input_name}: this model takes {expected}, with a tab between them")
    return value
