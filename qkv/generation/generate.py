"""From texts to generated texts: encode, generate in batches of similar length, decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qkv.checkpoints import ModelBundle
from qkv.checkpoints.inputs import encode_inputs, require_tokenizer
from qkv.data.batching import evaluation_batches
from qkv.errors import InputError
from qkv.generation.beam_search import beam_search
from qkv.generation.config import GenerationConfig, validate_search
from qkv.generation.sampling import Hypothesis, greedy, sample
from qkv.nn import Ragged
from qkv.nn.shell import Model
from qkv.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class GeneratedText:
    """One output of a model for a text."""

    text: str
    score: float  # sum of the tokens' log-probabilities
    finished: bool = True  # False: the maximum length came before EOS


@torch.inference_mode()
def generate(
    model: Model, source: Ragged, config: GenerationConfig, sample_ids: Sequence[int] | None = None
) -> list[list[Hypothesis]]:
    """Generate `config.n_best` outputs per source, best first. The model must be in eval mode.

    Args:
        model: an encoder-decoder, whose source is encoded, or a decoder, whose source is the prompt to continue.
        source: packed token ids.
        config: how to search or sample.
        sample_ids: number of each source, by default its index; the same number and seed give the same sample.
    """
    validate_search(config)
    max_lengths = model.max_new_tokens(source.layout.lengths_list, config.max_new_tokens)
    if config.do_sample:
        samples = sample(
            model,
            source,
            max_lengths=max_lengths,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
            num_samples=config.n_best,
            sample_ids=sample_ids,
        )
        return [sorted(rows, key=lambda hypothesis: -hypothesis.score) for rows in samples]
    if config.num_beams > 1:
        hypotheses = beam_search(
            model,
            source,
            num_beams=config.num_beams,
            max_lengths=max_lengths,
            length_penalty=config.length_penalty,
            rank_unfinished=model.continues_input
            if config.unfinished_beams is None
            else config.unfinished_beams == "ranked",
        )
        return [rows[: config.n_best] for rows in hypotheses]
    return greedy(model, source, max_lengths=max_lengths)


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
    outputs: list[list[GeneratedText]] = [[] for _ in texts]
    max_tokens = max(1, config.batch_tokens // max(config.num_beams, config.n_best))
    for rows in evaluation_batches(np.array([len(x) for x in ids], dtype=np.int64), max_tokens):
        source = Ragged.pack([torch.tensor(ids[i]) for i in rows]).to(model.device)
        for i, hypotheses in zip(rows, generate(model, source, config, (rows + first_index).tolist()), strict=True):
            prompt_ids = ids[i] if model.continues_input else []  # decoded together: they may share characters
            outputs[i] = [
                GeneratedText(
                    target_tokenizer.decode([*prompt_ids, *hypothesis.tokens]), hypothesis.score, hypothesis.finished
                )
                for hypothesis in hypotheses
            ]
    return outputs


def encode_for_generation(
    bundle: ModelBundle, texts: Sequence[str], locations: Sequence[str], config: GenerationConfig
) -> list[list[int]]:
    """Return the source ids of each text: in the checkpoint's template, or, for a model trained here, ended by EOS."""
    model, tokenizer = bundle.model, require_tokenizer(bundle)
    if not tokenizer.is_native:
        encodings = encode_inputs(
            bundle, texts, locations, on_too_long=config.on_too_long, parse_special_tokens=config.parse_special_tokens
        )
        return [encoding.ids for encoding in encodings]
    suffix = [] if model.continues_input else [model.spec.eos_id]  # a prompt is continued, so it has no EOS
    max_length = model.max_input_length - len(suffix)
    return [[*ids, *suffix] for ids in encode_sources(tokenizer, texts, locations, max_length, config)]


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
            reason = f"'{tokenizer.first_unknown(text)}' in '{text}' was never seen in training"
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
