"""Text in, text out: tokenise, decode in batches of similar length, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from qkv.checkpoints import ModelBundle
from qkv.data.batching import evaluation_batches
from qkv.errors import InputError
from qkv.generation.beam_search import beam_search
from qkv.generation.config import GenerationConfig, Prediction, validate_search
from qkv.generation.head_predictions import PredictInput, predict_with_head
from qkv.checkpoints.inputs import describe_input, encode_inputs, max_input_length, require_tokenizer
from qkv.generation.sampling import GenerativeModel, Hypothesis, greedy, sample
from qkv.nn import Decoder, Encoder, EncoderDecoder, Ragged
from qkv.tokenization.tokenizer import Tokenizer

_DEFAULT_NEW_TOKENS = 64  # tokens that a prompt is continued by where no limit is given


def encode_sources(
    tokenizer: Tokenizer, texts: Sequence[str], input_names: Sequence[str], max_length: int, config: GenerationConfig
) -> list[list[int]]:
    """Ids of texts; one that the model cannot read is refused by its place, or mended as the user chose."""
    ids = tokenizer.encode_batch(texts)
    for i, (text, location) in enumerate(zip(texts, input_names, strict=True)):
        if config.on_unknown == "refuse" and tokenizer.unk_id in ids[i]:
            reason = f"'{tokenizer.first_unknown(text)}' in '{text}' was never seen in training"
            raise InputError(f"{location}: {reason}; remove it, or choose --on-unknown replace (data.on_unknown in a recipe)")
        if not ids[i]:
            raise InputError(f"{location}: is empty; give some text")
        if len(ids[i]) > max_length and config.on_too_long == "refuse":
            reason = f"{len(ids[i])} tokens, and the model takes at most {max_length}"
            raise InputError(f"{location}: {reason}; shorten it, or choose --on-too-long truncate")
        ids[i] = ids[i][:max_length]
    return ids


@torch.inference_mode()
def generate(
    model: GenerativeModel, source: Ragged, config: GenerationConfig, sample_ids: Sequence[int] | None = None
) -> list[list[Hypothesis]]:
    """`config.n_best` outputs for each source of ids, best first: sources to encode, or prompts to go on from.

    `sample_ids` tell sources apart where they are drawn for: the same number and seed give the same draws.
    """
    validate_search(config)
    max_lengths = _max_lengths(model, source, config)
    if config.do_sample:
        sampling_options = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        samples = sample(model, source, max_lengths=max_lengths, seed=config.seed, num_samples=config.n_best, sample_ids=sample_ids, **sampling_options)
        return [sorted(rows, key=lambda h: -h.score) for rows in samples]
    if config.num_beams > 1:
        rank_unfinished = isinstance(model, Decoder) if config.unfinished_beams is None else config.unfinished_beams == "ranked"
        hypotheses = beam_search(model, source, num_beams=config.num_beams, max_lengths=max_lengths, length_penalty=config.length_penalty, rank_unfinished=rank_unfinished)
        return [rows[: config.n_best] for rows in hypotheses]
    return greedy(model, source, max_lengths=max_lengths)


def _max_lengths(model: GenerativeModel, source: Ragged, config: GenerationConfig) -> list[int]:
    """How long each output may become, whoever its batch mates are."""
    assert model.spec.target_embedding is not None
    max_length, lengths = model.spec.target_embedding.max_length, source.layout.lengths_list
    if isinstance(model, EncoderDecoder):
        return [min(max_length, config.max_new_tokens or 2 * n + 16) for n in lengths]
    if max(lengths) >= max_length:
        raise InputError(f"a prompt of {max(lengths)} tokens leaves no room; this model takes {max_length} in all")
    return [min(max_length - n, config.max_new_tokens or _DEFAULT_NEW_TOKENS) for n in lengths]


def predict(
    bundle: ModelBundle,
    texts: Sequence[PredictInput],
    config: GenerationConfig | None = None,
    input_names: Sequence[str] | None = None,
    first_index: int = 0,
) -> list[list[Prediction]]:
    """The `config.n_best` outputs for each input, best first: what a model writes, or what its head says about a text.

    An input is a text, or several that belong together: a question and a text, a sentence and its choices. `input_names`
    name the inputs in messages. `first_index` is the first one's number, by which it is told apart where outputs are drawn.
    """
    config, model = config or GenerationConfig(), bundle.model
    if isinstance(texts, str):
        raise InputError("predict takes a list of texts; put the one text into a list")
    if not texts:
        return []
    resolved_names = input_names or [describe_input(text) for text in texts]
    generates = model.spec.head is not None and model.spec.head.kind == "lm" and not isinstance(model, Encoder)
    with eval_mode(model), torch.inference_mode():
        if not generates:
            return predict_with_head(bundle, texts, config, resolved_names)
        validate_search(config)
        if not all(isinstance(text, str) for text in texts):
            raise InputError("this model takes one text at a time")
        return _generate_texts(bundle, [str(text) for text in texts], config, resolved_names, first_index)


def _generate_texts(
    bundle: ModelBundle, texts: Sequence[str], config: GenerationConfig, input_names: Sequence[str], first_index: int
) -> list[list[Prediction]]:
    model, target_tokenizer = bundle.model, bundle.target_tokenizer
    assert not isinstance(model, Encoder)
    ids = encode_for_generation(bundle, texts, input_names, config)
    assert target_tokenizer is not None  # a model that came with one tokeniser came with both
    out: list[list[Prediction]] = [[] for _ in texts]
    max_tokens = max(1, config.batch_tokens // max(config.num_beams, config.n_best))
    for rows in evaluation_batches([len(x) for x in ids], max_tokens):
        source = Ragged.pack([torch.tensor(ids[i]) for i in rows]).to(model.device)
        for i, hypotheses in zip(rows, generate(model, source, config, (rows + first_index).tolist()), strict=True):
            prompt_ids = ids[i] if isinstance(model, Decoder) else []  # a continuation is read with what it continues
            out[i] = [Prediction(target_tokenizer.decode([*prompt_ids, *h.tokens]), h.score, h.finished) for h in hypotheses]
    return out


def encode_for_generation(bundle: ModelBundle, texts: Sequence[str], input_names: Sequence[str], config: GenerationConfig) -> list[list[int]]:
    """What the model reads of each text: in its checkpoint's template, or, trained here, closed by the end token."""
    model, tokenizer = bundle.model, require_tokenizer(bundle)
    if not tokenizer.is_native:
        return [encoding.ids for encoding in encode_inputs(bundle, texts, input_names, on_too_long=config.on_too_long, parse_special_tokens=config.parse_special_tokens)]
    suffix = [model.spec.eos_id] if isinstance(model, EncoderDecoder) else []  # a prompt is to be gone on from
    max_length = max_input_length(model.spec) - len(suffix)
    return [[*ids, *suffix] for ids in encode_sources(tokenizer, texts, input_names, max_length, config)]


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off, and back to what it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
