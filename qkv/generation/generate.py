"""From texts to generated texts: encode, generate by the engine, decode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from qkv.checkpoints import ModelBundle
from qkv.checkpoints.inputs import encode_inputs, require_tokenizer
from qkv.errors import InputError, quote
from qkv.generation.config import GenerationConfig, validate_search
from qkv.generation.decoding_model import check_dtype
from qkv.generation.engine import Engine
from qkv.generation.int8_report import report_int8
from qkv.generation.request import Hypothesis, Request, StopCheck
from qkv.nn import Ragged
from qkv.nn.attention import Attention
from qkv.nn.capture import collect_batches
from qkv.nn.shell import Model
from qkv.nn.stack import EncoderOutput
from qkv.tokenization.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # stands for bytes that are not a character yet
_CHUNK_SIZE = 64  # texts of a stream that are tokenized together
_MAX_WINDOW = 1 << 16  # requests of a list that are sorted by length together


@dataclass(frozen=True)
class GeneratedText:
    """One output of a model for a text."""

    text: str
    score: float  # sum of the tokens' log-probabilities
    finished: bool = True  # False: the maximum length came before EOS
    tokens: tuple[int, ...] = ()  # generated tokens, without EOS
    token_log_probs: tuple[float, ...] = ()  # of the tokens, and of EOS if it was generated
    alignment: tuple[int, ...] = ()  # the source token that each of these attends to most, if requested


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
        source: packed token ids, or images in the layout of their patches.
        config: how to search or sample.
        sample_ids: number of each source, by default its index; the same number and seed give the same sample.
        prefix_ids: tokens of `config.forced_prefix`.
        stop_check: finds `config.stop_strings` in the text of generated tokens.
    """
    numbers = range(len(source)) if sample_ids is None else sample_ids
    is_image = source.values.dim() > 1
    sources = source.values.unbind(0) if is_image else source.sequences()
    requests = [Request(x, config, number, prefix_ids, stop_check) for x, number in zip(sources, numbers, strict=True)]
    engine = Engine(model, max_tokens=config.batch_tokens)
    return [request.outputs or [] for request in engine.run(requests, windows=(_MAX_WINDOW,))]


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
    generator = TextGenerator(bundle, config)
    ids = encode_for_generation(bundle, texts, locations, config)
    requests = [generator.request(row, first_index + i) for i, row in enumerate(ids)]
    with collect_batches(bundle.model) as begin_batch:
        has_captures = any(isinstance(module, Attention) and module.hook for module in bundle.model.modules())
        engine = Engine(
            bundle.model,
            max_tokens=config.batch_tokens,
            begin_batch=(lambda numbers: begin_batch(n - first_index for n in numbers)) if has_captures else None,
        )
        finished = list(engine.run(requests, windows=(_MAX_WINDOW,)))
    if config.dtype == "int8" and not has_captures:
        finished = list(report_int8(bundle.model, finished))
    return [generator.texts(request) for request in finished]


def generate_stream(
    bundle: ModelBundle, texts: Iterable[tuple[str, str] | InputError], config: GenerationConfig
) -> Iterator[list[GeneratedText] | InputError]:
    """Generate texts for a stream of texts with their locations, in its order; a bad text gives its error.

    Texts are read while others are being generated. What is in memory does not grow with the stream.
    """
    generator = TextGenerator(bundle, config)
    engine = Engine(bundle.model, max_tokens=config.batch_tokens)
    requests: Iterable[Request] = engine.run(generator.requests(texts), keep_errors=True)
    if config.dtype == "int8":
        requests = report_int8(bundle.model, requests)
    for request in requests:
        yield generator.texts(request) if request.error is None else request.error


def stream_text(bundle: ModelBundle, text: str, location: str, config: GenerationConfig) -> Iterator[str]:
    """Yield the pieces of a generated text as they are made; a beam search gives its text at its end."""
    generator = TextGenerator(bundle, config)
    if config.n_best > 1:
        raise InputError(f"n_best={config.n_best}: a stream has one output; leave it out")
    ids = encode_for_generation(bundle, [text], [location], config)[0]
    engine = Engine(bundle.model)
    request = engine.submit(generator.request(ids, 0, streams=config.num_beams == 1))
    return _pieces(engine, generator, request)


def _pieces(engine: Engine, generator: TextGenerator, request: Request) -> Iterator[str]:
    sent = ""
    try:
        while not request.is_done:
            engine.step()
            text = generator.texts(request)[0].text if request.is_done else generator.stable_text(request)
            if len(text) > len(sent) and text.startswith(sent):
                yield text[len(sent) :]
                sent = text
        if request.config.dtype == "int8":
            list(report_int8(engine.model, [request]))
    finally:
        engine.close()


def encode_texts(
    bundle: ModelBundle, texts: Sequence[str], locations: Sequence[str], config: GenerationConfig
) -> list[EncoderOutput]:
    """Encode the sources of an encoder-decoder once, to decode them several times with `decode_texts`."""
    TextGenerator(bundle, config)
    sources = [torch.tensor(ids) for ids in encode_for_generation(bundle, texts, locations, config)]
    return Engine(bundle.model, max_tokens=config.batch_tokens).encode(sources, config)


def decode_texts(
    bundle: ModelBundle, sources: Sequence[EncoderOutput], config: GenerationConfig
) -> list[list[GeneratedText]]:
    """Generate `config.n_best` texts per encoded source, as `generate_texts` does for texts."""
    generator = TextGenerator(bundle, config)
    requests = [generator.request(source, number) for number, source in enumerate(sources)]
    engine = Engine(bundle.model, max_tokens=config.batch_tokens)
    return [generator.texts(request) for request in engine.run(requests, windows=(_MAX_WINDOW,))]


class TextGenerator:
    """The way from texts to requests, and from their outputs to texts."""

    def __init__(self, bundle: ModelBundle, config: GenerationConfig) -> None:
        """Refuse a model that generates no text, and settings that it cannot follow."""
        validate_search(config)
        check_dtype(bundle.model, config.dtype)
        model, tokenizer = bundle.model, bundle.target_tokenizer
        if not model.is_generative:
            raise InputError(
                f"this {model.spec.family} generates no text; it needs a decoder with a language model head"
            )
        assert model.spec.head is not None
        if config.num_beams > model.spec.head.num_outputs:
            raise InputError(
                f"num_beams={config.num_beams}: the vocabulary has {model.spec.head.num_outputs} tokens; use fewer"
            )
        require_tokenizer(bundle)
        assert tokenizer is not None  # the loader sets both tokenizers or none
        self.bundle, self.config, self.tokenizer = bundle, config, tokenizer
        self._stop_check = _make_stop_check(tokenizer, config.stop_strings)
        self._prefix_ids = _encode_prefix(tokenizer, config.forced_prefix)

    def request(self, source: Sequence[int] | EncoderOutput, number: int, *, streams: bool = False) -> Request:
        """Return the request of a source."""
        ids = source if isinstance(source, EncoderOutput) else torch.tensor(source)
        return Request(ids, self.config, number, self._prefix_ids, self._stop_check, streams)

    def requests(self, texts: Iterable[tuple[str, str] | InputError]) -> Iterator[Request]:
        """Yield the requests of texts with their locations; those of bad texts have an error."""
        remaining, number = iter(texts), 0
        while chunk := list(islice(remaining, _CHUNK_SIZE)):
            for ids in self._encode(chunk):
                request = self.request([] if isinstance(ids, InputError) else ids, number)
                request.error = ids if isinstance(ids, InputError) else None
                number += 1
                yield request

    def stable_text(self, request: Request) -> str:
        """Return the text so far, without an end that further tokens may change."""
        output = Hypothesis(request.tokens, 0.0)
        text = _to_text(self.tokenizer, self._prompt(request), output, self.config.stop_strings).text
        text = text.rstrip().rstrip(_INCOMPLETE)  # spaces before a comma may vanish, and a character may be incomplete
        if self.tokenizer.backend.rewrites_words:
            text = text[: max(text.rfind(" "), 0)]
        overlaps = [n for stop in self.config.stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return text[: len(text) - max(overlaps, default=0)]

    def texts(self, request: Request) -> list[GeneratedText]:
        """Return the texts of a finished request."""
        prompt, stop_strings = self._prompt(request), self.config.stop_strings
        return [_to_text(self.tokenizer, prompt, output, stop_strings) for output in request.outputs or []]

    def _prompt(self, request: Request) -> list[int]:
        """Return the tokens of a prompt, which is decoded with its continuation: they may share characters."""
        is_prompt = self.bundle.model.continues_input and isinstance(request.source, Tensor)
        ids: list[int] = request.source.tolist() if is_prompt else []  # type: ignore[union-attr]
        return ids

    def _encode(self, chunk: Sequence[tuple[str, str] | InputError]) -> list[list[int] | InputError]:
        """Encode texts together, or one by one if there is a bad one among them."""
        bad = next((item for item in chunk if isinstance(item, InputError)), None)
        try:
            if bad is not None:
                raise bad
            texts, locations = zip(*chunk, strict=True)
            return [*encode_for_generation(self.bundle, texts, locations, self.config)]
        except InputError as error:
            if len(chunk) == 1:
                return [error]
            return [ids for item in chunk for ids in self._encode([item])]


def _to_text(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], hypothesis: Hypothesis, stop_strings: Sequence[str]
) -> GeneratedText:
    """Decode an output and cut it before the first stop string after the prompt."""
    text = tokenizer.decode([*prompt_ids, *hypothesis.tokens])
    if stop_strings:
        start = len(tokenizer.decode(list(prompt_ids))) if prompt_ids else 0
        ends = [end for stop in stop_strings if (end := text.find(stop, start)) >= 0]
        text = text[: min(ends, default=len(text))]
    tokens = tuple(hypothesis.tokens)
    per_token = hypothesis.token_log_probs, hypothesis.alignment
    return GeneratedText(text, hypothesis.score, hypothesis.finished, tokens, *per_token)


def _make_stop_check(tokenizer: Tokenizer, stop_strings: Sequence[str]) -> StopCheck | None:
    if not stop_strings:
        return None
    return lambda sequences: [
        any(stop in text for stop in stop_strings) for text in (tokenizer.decode(tokens) for tokens in sequences)
    ]


def _encode_prefix(tokenizer: Tokenizer, prefix: str) -> list[int]:
    """Return the ids of a forced prefix, without the special tokens of a template; refuse unknown tokens."""
    ids = tokenizer.encode_batch([prefix])[0] if prefix else []
    if tokenizer.unk_id in ids:
        unknown = quote(tokenizer.first_unknown(prefix))
        raise InputError(f"forced_prefix: {unknown} in {quote(prefix)} is not in the target vocabulary; leave it out")
    return ids


def encode_for_generation(
    bundle: ModelBundle, texts: Sequence[str], locations: Sequence[str], config: GenerationConfig
) -> list[list[int]]:
    """Return the source ids of each text: in the checkpoint's template, or, for a model trained here, ended by EOS."""
    model, tokenizer = bundle.model, require_tokenizer(bundle)
    if not tokenizer.is_native:
        encodings = encode_inputs(
            bundle,
            texts,
            locations,
            on_too_long=config.on_too_long,
            parse_special_tokens=config.parse_special_tokens,
            max_length=_max_prompt_length(model, config),
            keep="end" if model.continues_input else "beginning",
        )
        return [encoding.ids for encoding in encodings]
    suffix = [] if model.continues_input else [model.spec.eos_id]  # a prompt is continued, so it has no EOS
    max_length = min(model.max_input_length - len(suffix), _max_prompt_length(model, config))
    keep: Literal["beginning", "end"] = "end" if model.continues_input else "beginning"
    return [[*ids, *suffix] for ids in encode_sources(tokenizer, texts, locations, max_length, config, keep=keep)]


def _max_prompt_length(model: Model, config: GenerationConfig) -> int:
    """Return the length that a prompt is truncated to, so that the tokens to be generated have room after it."""
    if not model.continues_input or config.on_too_long == "refuse":
        return model.max_input_length
    return model.max_input_length - model.max_new_tokens([1], config.max_new_tokens)[0]


def encode_sources(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    locations: Sequence[str],
    max_length: int,
    config: GenerationConfig,
    *,
    keep: Literal["beginning", "end"] = "beginning",
) -> list[list[int]]:
    """Return the ids of texts without a template.

    Empty texts are refused; texts that are too long or contain unknown tokens are refused, truncated or kept, as the
    config determines. A truncated text keeps its beginning, or its end if it is a prompt.
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
        ids[i] = ids[i][-max_length:] if keep == "end" else ids[i][:max_length]
    return ids
