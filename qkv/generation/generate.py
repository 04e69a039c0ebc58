"""From texts to generated texts: encode, generate in batches of similar length, decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qkv.checkpoints import ModelBundle
from qkv.checkpoints.inputs import encode_inputs, require_tokenizer
from qkv.data.batching import evaluation_batches
from qkv.errors import InputError, quote
from qkv.generation.beam_search import BeamLoop
from qkv.generation.config import GenerationConfig, validate_search
from qkv.generation.cuda_graphs import run_with_graphs, supports_graphs
from qkv.generation.decoding_model import decoding_model
from qkv.generation.sampling import TokenLoop
from qkv.generation.search import Hypothesis, Search, StopCheck, run
from qkv.nn import Ragged
from qkv.nn.capture import collect_batches
from qkv.nn.shell import Model
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class GeneratedText:
    """One output of a model for a text."""

    text: str
    score: float  # sum of the tokens' log-probabilities
    finished: bool = True  # False: the maximum length came before EOS
    tokens: tuple[int, ...] = ()  # generated tokens, without EOS
    token_log_probs: tuple[float, ...] = ()  # of the tokens, and of EOS if it was generated


@torch.inference_mode()
def generate(
    model: Model,
    source: Ragged,
    config: GenerationConfig,
    sample_ids: Sequence[int] | None = None,
    *,
    prefix_ids: Sequence[int] = (),
    stop_check: StopCheck | None = None,
) -> list[list[Hypothesis]]:
    """Generate `config.n_best` outputs per source, best first. The model must be in eval mode.

    Args:
        model: an encoder-decoder, whose source is encoded, or a decoder, whose source is the prompt to continue.
        source: packed token ids.
        config: how to search or sample.
        sample_ids: number of each source, by default its index; the same number and seed give the same sample.
        prefix_ids: tokens of `config.forced_prefix`.
        stop_check: finds `config.stop_strings` in the text of generated tokens.
    """
    validate_search(config)
    rows_per_source = config.n_best if config.do_sample else config.num_beams
    search = Search(model, source, config, rows_per_source, prefix_ids, stop_check)
    if supports_graphs(search):
        decoding = decoding_model(model, torch.float32 if config.dtype == "float32" else torch.bfloat16)
        search.model = decoding.model
        return run_with_graphs(decoding, search, sample_ids)
    loop = BeamLoop(search) if config.num_beams > 1 else TokenLoop(search)
    loop.load(search, sample_ids)
    return run(search, loop)


@torch.inference_mode()
def generate_texts(
    bundle: ModelBundle,
    texts: Sequence[str],
    config: GenerationConfig,
    locations: Sequence[str],
    first_index: int = 0,
) -> list[list[GeneratedText]]:
    """Generate `config.n_best` texts per text, best first; a continuation includes its prompt.

    `locations` name the texts in error messages; `first_index` is the number of the first one, which seeds sampling.
    """
    validate_search(config)
    model, target_tokenizer = bundle.model, bundle.target_tokenizer
    if not model.is_generative:
        raise InputError(f"this {model.spec.family} generates no text; it needs a decoder with a language model head")
    ids = encode_for_generation(bundle, texts, locations, config)
    assert target_tokenizer is not None  # the loader sets both tokenizers or none
    stop_check = _make_stop_check(target_tokenizer, config.stop_strings)
    prefix_ids = _encode_prefix(target_tokenizer, config.forced_prefix)
    outputs: list[list[GeneratedText]] = [[] for _ in texts]
    max_tokens = max(1, config.batch_tokens // max(config.num_beams, config.n_best))
    with collect_batches(model) as begin_batch:
        for rows in evaluation_batches(np.array([len(x) for x in ids], dtype=np.int64), max_tokens):
            source = Ragged.pack([torch.tensor(ids[i]) for i in rows]).to(model.device)
            sample_ids = (rows + first_index).tolist()
            begin_batch(rows)
            batch = generate(model, source, config, sample_ids, prefix_ids=prefix_ids, stop_check=stop_check)
            for i, hypotheses in zip(rows, batch, strict=True):
                prompt_ids = ids[i] if model.continues_input else []  # decoded together: they may share characters
                outputs[i] = [
                    _to_text(target_tokenizer, prompt_ids, hypothesis, config.stop_strings) for hypothesis in hypotheses
                ]
    return outputs


def _to_text(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], hypothesis: Hypothesis, stop_strings: Sequence[str]
) -> GeneratedText:
    """Decode an output and cut it before the first stop string after the prompt."""
    text = tokenizer.decode([*prompt_ids, *hypothesis.tokens])
    if stop_strings:
        start = len(tokenizer.decode(list(prompt_ids))) if prompt_ids else 0
        ends = [end for stop in stop_strings if (end := text.find(stop, start)) >= 0]
        text = text[: min(ends, default=len(text))]
    return GeneratedText(
        text, hypothesis.score, hypothesis.finished, tuple(hypothesis.tokens), hypothesis.token_log_probs
    )


def _make_stop_check(tokenizer: Tokenizer, stop_strings: Sequence[str]) -> StopCheck | None:
    if not stop_strings:
        return None
    return lambda sequences: [
        any(stop in text for stop in stop_strings) for text in (tokenizer.decode(tokens) for tokens in sequences)
    ]


def _encode_prefix(tokenizer: Tokenizer, prefix: str) -> list[int]:
    """Return the ids of a forced prefix, without the special tokens of a template."""
    return tokenizer.encode_batch([prefix])[0] if prefix else []


def encode_for_generation(
    bundle: ModelBundle, texts: Sequence[str], locations: Sequence[str], config: GenerationConfig
) -> list[list[int]]:
    """Return the source ids of each text: in the checkpoint's template, or, for a model trained here, ended by EOS."""
    model, tokenizer = bundle.model, require_tokenizer(bundle)
    if not tokenizer.is_native:
        encodings = encode_inputs(
            bundle, texts, locations, on_too_long=config.on_too_long, parse_special_tokens=config.parse_special_tokens
        )
        prompt_length = _max_prompt_length(model, config)
        return [encoding.ids[:prompt_length] for encoding in encodings]
    suffix = [] if model.continues_input else [model.spec.eos_id]  # a prompt is continued, so it has no EOS
    max_length = min(model.max_input_length - len(suffix), _max_prompt_length(model, config))
    return [[*ids, *suffix] for ids in encode_sources(tokenizer, texts, locations, max_length, config)]


def _max_prompt_length(model: Model, config: GenerationConfig) -> int:
    """Return the length that a prompt is truncated to, so that the tokens to be generated have room after it."""
    if not model.continues_input or config.on_too_long == "refuse":
        return model.max_input_length
    return model.max_input_length - model.max_new_tokens([1], config.max_new_tokens)[0]


def encode_sources(
    tokenizer: Tokenizer, texts: Sequence[str], locations: Sequence[str], max_length: int, config: GenerationConfig
) -> list[list[int]]:
    """Return the ids of texts without a template.

    Empty texts are refused; texts that are too long or contain unknown tokens are refused, truncated or kept, as the
    config determines.
    """
    ids = tokenizer.encode_batch(texts)
    for i, (text, location) in enumerate(zip(texts, locations, strict=True)):
        if config.on_unknown == "refuse" and tokenizer.unk_id in ids[i]:
            reason = f"{quote(tokenizer.first_unknown(text))} in {quote(text)} was never seen in training"
            raise InputError(
                f"{location}: {reason}; remove it, or choose --on-unknown replace (data.on_unknown in a recipe)"
            )
        if not ids[i]:
            raise InputError(f"{location}: is empty; give some text")
        if len(ids[i]) > max_length and config.on_too_long == "refuse":
            reason = f"{len(ids[i])} tokens, and the model takes at most {max_length}"
            raise InputError(f"{location}: {reason}; shorten it, or choose --on-too-long truncate")
        ids[i] = ids[i][:max_length]
    return ids
