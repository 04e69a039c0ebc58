"""Log-probabilities of given texts: packed batches of similar length, and no more logits at once than a chunk needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.checkpoints.inputs import require_tokenizer
from qkv.data.batching import evaluation_batches
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig
from qkv.generation.generate import encode_for_generation, encode_sources
from qkv.generation.log_probs import encode_without_eos, next_log_probs
from qkv.generation.prompting import common_prefix_length
from qkv.nn import Model, Ragged
from qkv.nn.two_stream import has_two_streams
from qkv.tokenization.tokenizer import Tokenizer

TextOrPair = str | tuple[str, str]


@dataclass(frozen=True)
class TextLogProbs:
    """The log-probabilities of one text."""

    tokens: tuple[int, ...]
    """The tokens that have a log-probability: EOS included for an encoder-decoder, and not those of a prompt."""
    token_log_probs: tuple[float, ...]
    """Natural logarithm of the probability of each token after all before it."""
    truncated: bool = False
    """Whether the text exceeded the model, so that only a part of it was read."""

    @property
    def log_prob(self) -> float:
        """The log-probability of the text: the sum over its tokens."""
        return math.fsum(self.token_log_probs)

    @property
    def perplexity(self) -> float:
        """The perplexity per token; NaN for a text of one token, which nothing precedes."""
        if not self.tokens:
            return math.nan
        return math.exp(min(-self.log_prob / len(self.tokens), 709.0))  # exp(710) overflows


@dataclass(frozen=True)
class _Window:
    """Consecutive tokens of a text that fit into the model, or a source with its target."""

    text: int  # index of the text
    ids: list[int]  # what a decoder reads, or the target that begins with BOS
    labels: list[int]  # the last tokens of the window, which are scored
    source: list[int] | None = None
    truncated: bool = False  # tokens of the text are in no window


@torch.inference_mode()
def text_log_probs(
    bundle: ModelBundle,
    texts: Sequence[TextOrPair],
    config: GenerationConfig,
    locations: Sequence[str],
    *,
    stride: int | None = None,
    add_bos: bool = False,
) -> list[TextLogProbs]:
    """Return the log-probabilities of texts, in input order. The model must be in eval mode.

    Args:
        bundle: a language model, or an encoder-decoder.
        texts: texts, or pairs of a prompt and its continuation, for a language model; pairs of source and target for an
            encoder-decoder. Only continuations and targets are scored.
        config: tokens per batch, numeric type, and what happens to texts that are too long or have unknown tokens.
        locations: names of the texts in error messages.
        stride: score texts that exceed the model in windows that begin this many tokens after each other.
        add_bos: put BOS before a text of a language model, so that its first token is scored too.
    """
    model = bundle.model
    if not model.is_generative:
        raise InputError(f"this {model.spec.family} {_why_not_scored(model.spec)}")
    if model.is_encoder_decoder and (stride is not None or add_bos):
        option = "--bos" if stride is None else "--stride"
        raise InputError(f"{option} is for language models, and this {model.spec.family} scores targets; leave it out")
    if model.is_encoder_decoder:
        windows = _encode_pairs(bundle, texts, config, locations)
    else:
        windows = list(_encode_texts(bundle, texts, config, locations, stride, add_bos))
    lengths = np.array([len(window.ids) + len(window.source or ()) for window in windows], dtype=np.int64)
    parts: list[list[float]] = [[] for _ in windows]
    dtype = torch.bfloat16 if config.dtype == "bf16" else None
    with torch.autocast(model.device.type, dtype, enabled=dtype is not None):
        for rows in evaluation_batches(lengths, config.batch_tokens):
            for i, part in zip(rows, _score_batch(model, [windows[i] for i in rows]), strict=True):
                parts[i] = part
    return _join(windows, parts, len(texts))


def _why_not_scored(model_spec: spec.Model) -> str:
    """Return why a model without a decoder scores no text, and what to do."""
    remedy = "so it gives a text no log-probability; use a model that generates"
    if model_spec.head is None or model_spec.head.kind != "lm":
        return f"has no language model head, {remedy}"
    if isinstance(model_spec.encoder, spec.BagOfWords):
        return "has one vector per word, and gives a text no log-probability; qkv similar finds similar words"
    if isinstance(model_spec.encoder, spec.BiLM):
        return "predicts each word twice, from either side; qkv eval measures its perplexity on a file"
    return f"is a {'permutation' if has_two_streams(model_spec) else 'masked'} language model, {remedy}"


def _score_batch(model: Model, windows: Sequence[_Window]) -> list[list[float]]:
    """Return the log-probabilities of the labels of each window."""
    sources = [window.source for window in windows if window.source is not None]
    target, counts = _pack([window.ids for window in windows], model.device), [len(w.labels) for w in windows]
    ends = np.cumsum(target.layout.lengths_list)
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)])
    labels = torch.tensor([label for window in windows for label in window.labels], device=model.device)
    inputs = [_pack(sources, model.device), target] if sources else [target]
    log_probs = next_log_probs(model, inputs, torch.from_numpy(positions).to(model.device), labels)
    return [part.tolist() for part in torch.split(log_probs.float().cpu(), counts)]


def _pack(rows: Sequence[list[int]], device: torch.device) -> Ragged:
    return Ragged.pack([torch.tensor(row) for row in rows]).to(device)


def _join(windows: Sequence[_Window], parts: Sequence[Sequence[float]], num_texts: int) -> list[TextLogProbs]:
    """Return one result per text, whose windows are in order."""
    tokens: list[list[int]] = [[] for _ in range(num_texts)]
    log_probs: list[list[float]] = [[] for _ in range(num_texts)]
    for window, part in zip(windows, parts, strict=True):
        tokens[window.text] += window.labels
        log_probs[window.text] += part
    truncated = {window.text for window in windows if window.truncated}
    rows = enumerate(zip(tokens, log_probs, strict=True))
    return [TextLogProbs(tuple(row), tuple(values), i in truncated) for i, (row, values) in rows]


# ---- encoder-decoders -----------------------------------------------------------------------------------------------


def _encode_pairs(
    bundle: ModelBundle, pairs: Sequence[TextOrPair], config: GenerationConfig, locations: Sequence[str]
) -> list[_Window]:
    s, tokenizer = bundle.model.spec, bundle.target_tokenizer
    single = next((i for i, pair in enumerate(pairs) if isinstance(pair, str)), None)
    if single is not None:
        reason = f"this {s.family} scores a target after its source"
        raise InputError(f"{locations[single]}: {reason}; give both, separated by a tab")
    sources = encode_for_generation(bundle, [pair[0] for pair in pairs], locations, config)
    assert tokenizer is not None  # the loader sets both tokenizers or none
    targets = _encode_targets(bundle, tokenizer, [pair[1] for pair in pairs], config, locations)
    return [
        _Window(i, [s.bos_id, *target], [*target, s.eos_id], source, _is_truncated(bundle, pair, source, target))
        for i, (pair, source, target) in enumerate(zip(pairs, sources, targets, strict=True))
    ]


def _is_truncated(bundle: ModelBundle, pair: TextOrPair, source: list[int], target: list[int]) -> bool:
    """Return whether tokens of a pair are missing; only sides of the maximum length are encoded again."""
    embedding = bundle.model.spec.target_embedding
    assert embedding is not None
    for side, text, tokenizer, length in (
        (source, pair[0], bundle.source_tokenizer, bundle.model.max_input_length),
        (target, pair[1], bundle.target_tokenizer, embedding.max_length - 1),
    ):
        assert tokenizer is not None  # it has encoded the text
        ids = tokenizer.encode(text) if len(side) >= length else []
        # the tokens of the text without those of a template, which are at most a few at either end
        if not any(side[first : first + len(ids)] == ids for first in range(len(side) - len(ids) + 1)):
            return True
    return False


def _encode_targets(
    bundle: ModelBundle,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    config: GenerationConfig,
    locations: Sequence[str],
) -> list[list[int]]:
    s = bundle.model.spec
    assert s.target_embedding is not None
    max_length = s.target_embedding.max_length - 1
    if tokenizer.is_native:
        return encode_sources(tokenizer, texts, locations, max_length, config)
    rows = encode_without_eos(tokenizer, texts, s.eos_id)
    for i, (row, location) in enumerate(zip(rows, locations, strict=True)):
        if len(row) > max_length and config.on_too_long == "refuse":
            reason = f"a target of {len(row)} tokens, and the model writes at most {max_length}"
            raise InputError(f"{location}: {reason}; shorten it, or choose --on-too-long truncate")
        rows[i] = row[:max_length]
    return rows


# ---- language models ------------------------------------------------------------------------------------------------


def _encode_texts(
    bundle: ModelBundle,
    texts: Sequence[TextOrPair],
    config: GenerationConfig,
    locations: Sequence[str],
    stride: int | None,
    add_bos: bool,
) -> Iterator[_Window]:
    model, tokenizer = bundle.model, require_tokenizer(bundle)
    max_length = model.max_input_length
    if stride is not None and not 1 <= stride < max_length:
        raise InputError(f"--stride must be at least 1 and below {max_length}, the length of the model, not {stride}")
    if add_bos and model.spec.bos_id < 0:
        raise InputError(f"this {model.spec.family} has no BOS token; leave out --bos")
    prompts = {i: text[0] for i, text in enumerate(texts) if not isinstance(text, str) and text[0]}
    rows = _encode(tokenizer, [text if isinstance(text, str) else "".join(text) for text in texts], locations, config)
    prompt_rows = _encode(tokenizer, list(prompts.values()), [locations[i] for i in prompts], config)
    num_before = dict(zip(prompts, prompt_rows, strict=True))
    start = [model.spec.bos_id] if add_bos else []
    for i, (row, location) in enumerate(zip(rows, locations, strict=True)):
        # a tokenizer may merge characters of prompt and continuation: the prompt is the tokens that both have
        num_prompt = common_prefix_length(num_before.get(i, []), row)
        if num_prompt == len(row):
            raise InputError(f"{location}: the continuation has no token of its own; give some text after the tab")
        ids, first = [*start, *row], max(len(start) + num_prompt, 1)
        if len(ids) > max_length and stride is None and config.on_too_long == "refuse":
            reason = f"{len(ids)} tokens, and the model takes at most {max_length}"
            raise InputError(
                f"{location}: {reason}; score it in windows with --stride, or choose --on-too-long truncate"
            )
        truncated = stride is None and len(ids) > max_length
        if truncated:
            removed = min(len(ids) - max_length, first - 1)  # from the prompt; the rest from the end of the text
            ids, first = ids[removed:][:max_length], first - removed
        for window in _windows(i, ids, first, max_length, stride or max_length):
            yield replace(window, truncated=truncated)


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str], locations: Sequence[str], config: GenerationConfig
) -> list[list[int]]:
    """Return the ids of texts in the checkpoint's template, of any length."""
    if tokenizer.is_native:
        max_length = max(map(len, texts), default=1) * 4 + 1  # no token is shorter than a byte
        return encode_sources(tokenizer, texts, locations, max_length, config)
    encodings = tokenizer.encode_plus_batch(texts, parse_special_tokens=config.parse_special_tokens)
    for encoding, location in zip(encodings, locations, strict=True):
        if not encoding.ids:
            raise InputError(f"{location}: is empty; give some text")
    return [encoding.ids for encoding in encodings]


def _windows(text: int, ids: list[int], first: int, max_length: int, stride: int) -> Iterator[_Window]:
    """Yield windows of a text; each token from `first` on is a label of one of them, with as many before it as fit."""
    begin, scored_end = 0, first
    while scored_end < len(ids):
        end = min(begin + max_length, len(ids))
        if end > scored_end:  # a window of prompt tokens only is not needed
            labels = ids[scored_end:end]
            yield _Window(text, ids[begin : end - 1], labels)
            scored_end = end
        begin += stride
