"""Generation: the text that a decoder writes for a source or a prompt, such as a translation or a continuation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from qkv.checkpoints import ModelBundle
from qkv.data.examples import TextExample
from qkv.data.pair import Pair, SourceWithReferences
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig, describe_settings
from qkv.generation.ensemble import Ensemble
from qkv.generation.generate import (
    GeneratedText,
    decode_texts,
    encode_texts,
    generate_stream,
    generate_texts,
    stream_text,
)
from qkv.nn.stack import EncoderOutput
from qkv.recipe.schema import Seq2SeqRecipe
from qkv.tasks.base import PredictionTask, check_not_empty, option_name
from qkv.tasks.predictions import Alternative, TaskPrediction

_FILTERS = ("top_k", "top_p", "min_p", "typical_p")
BEAM_SETTINGS = ("length_penalty", "early_stopping", "unfinished_beams")  # what ranks beams or ends their search
_SAMPLING, _SEARCH = ("temperature", *_FILTERS, "seed"), ("num_beams", *BEAM_SETTINGS)
_WITHOUT_OPTION = ("min_p", "typical_p", "early_stopping", "unfinished_beams", "ensemble")


@dataclass(frozen=True)
class EncodedTexts:
    """Texts that the encoder of a model has read; they can be decoded any number of times."""

    sources: tuple[EncoderOutput, ...]
    dtype: str | None  # numeric type of the model that encoded them

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, kw_only=True)
class Generation(PredictionTask[TextExample]):
    """The text that a model generates for a text. A prediction is the most probable output."""

    config: GenerationConfig = field(default_factory=GenerationConfig)
    """Greedy, beam search or sampling, with their settings."""

    prefix: str = ""
    """Text before each source, as in training ("translate English to German: "), unless the source starts with it."""

    name = "generation"
    example_type = TextExample

    @classmethod
    def from_recipe(cls, recipe: Seq2SeqRecipe) -> Self:
        """Make the task of a seq2seq run: its prefix, and the settings that it is tested with."""
        config = GenerationConfig(
            num_beams=recipe.test.num_beams,
            length_penalty=recipe.test.length_penalty,
            on_too_long="truncate" if recipe.data.on_too_long == "truncate" else "refuse",
            on_unknown=recipe.data.on_unknown,
            max_new_tokens=recipe.data.max_target_length,
        )
        return cls(config=config, prefix=recipe.data.prefix)

    def with_generation(self, config: GenerationConfig | None, prefix: str) -> Self:
        return replace(self, config=config or self.config, prefix=prefix or self.prefix)

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        unknown = sorted(set(settings).difference(known.name for known in fields(GenerationConfig)))
        if unknown:
            raise InputError(
                f"--{unknown[0].replace('_', '-')}: the task 'generation' has no such setting; leave it out"
            )
        neutral: dict[str, Any] = {}  # settings of a checkpoint that exclude those of the user
        if settings.get("do_sample") and "num_beams" not in settings:
            neutral = {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0}
        elif self.config.do_sample and settings.get("num_beams", 1) > 1:
            neutral = {"do_sample": False, "temperature": 1.0, **dict.fromkeys(_FILTERS)}
        return replace(self, config=replace(self.config, **(neutral | dict(settings))))

    def check_used(self, settings: Sequence[str], bundle: ModelBundle) -> None:
        config = self.config
        is_native = bundle.source_tokenizer is not None and bundle.source_tokenizer.is_native
        reasons = {name: "has an effect on sampling only; add --sample" for name in _SAMPLING if not config.do_sample}
        if config.do_sample:
            reasons |= dict.fromkeys(_SEARCH, "is for beam search, and --sample samples; leave out one of them")
        elif config.num_beams == 1 and config.n_best == 1:
            reasons |= dict.fromkeys(BEAM_SETTINGS, "is for beam search; add --num-beams")
        if not isinstance(bundle.model, Ensemble):
            reasons["ensemble"] = "is for several models that generate together; leave it out"
        if is_native:
            reasons["parse_special_tokens"] = "the tokenizer of this model has no special tokens in texts; leave it out"
        else:
            reasons["on_unknown"] = "the tokenizer of this model has a token for everything; leave it out"
        for name in settings:
            if name in reasons:
                option = f"--generation {name}" if name in _WITHOUT_OPTION else option_name(name)
                raise InputError(f"{option}: {reasons[name]}")

    def from_example(self, example: Any) -> TextExample:
        if isinstance(example, Pair | SourceWithReferences):
            return TextExample(example.source, example.location)
        return super().from_example(example)

    def parse_line(self, line: str, location: str) -> TextExample:
        return self.parse_texts([line], location)  # a tab is part of the text

    def parse_texts(self, texts: Sequence[str], location: str) -> TextExample:
        if len(texts) != 1:
            raise InputError(f"{location}: this model takes one text, not {len(texts)}")
        check_not_empty(texts, location)
        return TextExample(texts[0], location)

    def predict(
        self,
        bundle: ModelBundle,
        examples: Sequence[TextExample],
        *,
        n_best: int = 1,
        max_tokens: int = 8192,
        first_index: int = 0,
    ) -> list[TaskPrediction]:
        config = self._config(n_best, max_tokens)
        sources, locations = [self._source(example) for example in examples], [e.location for e in examples]
        outputs = generate_texts(bundle, sources, config, locations, first_index)
        return [_describe(generated, config.n_best) for generated in outputs]

    def predict_stream(
        self, bundle: ModelBundle, examples: Iterable[TextExample | InputError], *, n_best: int, max_tokens: int
    ) -> Iterator[TaskPrediction | InputError]:
        """Predict for a stream of examples, in its order; a bad example gives its error."""
        config = self._config(n_best, max_tokens)
        sources = (
            example if isinstance(example, InputError) else (self._source(example), example.location)
            for example in examples
        )
        for outputs in generate_stream(bundle, sources, config):
            yield outputs if isinstance(outputs, InputError) else _describe(outputs, config.n_best)

    def stream(self, bundle: ModelBundle, example: TextExample) -> Iterator[str]:
        """Yield the pieces of a generated text as they are made."""
        return stream_text(bundle, self._source(example), example.location, self.config)

    def encode(self, bundle: ModelBundle, examples: Sequence[TextExample]) -> EncodedTexts:
        """Encode the sources of examples once, to decode them several times."""
        sources, locations = [self._source(example) for example in examples], [e.location for e in examples]
        return EncodedTexts(tuple(encode_texts(bundle, sources, locations, self.config)), self.config.dtype)

    def decode(
        self, bundle: ModelBundle, encoded: EncodedTexts, *, n_best: int, max_tokens: int
    ) -> list[TaskPrediction]:
        """Predict for encoded sources."""
        config = self._config(n_best, max_tokens)
        if config.dtype != encoded.dtype:
            raise InputError(
                f"dtype={config.dtype}: the texts were encoded with dtype={encoded.dtype}; encode them with this config"
            )
        outputs = decode_texts(bundle, encoded.sources, config)
        return [_describe(generated, config.n_best) for generated in outputs]

    def describe_settings(self, base: Generation, origin: str, n_best: int) -> str:
        """Return the settings that differ from the defaults; those of `base` come from `origin`, others from users."""
        return describe_settings(self._config(n_best, self.config.batch_tokens), base.config, origin)

    def _source(self, example: TextExample) -> str:
        return example.text if example.text.startswith(self.prefix) else self.prefix + example.text

    def _config(self, n_best: int, max_tokens: int) -> GenerationConfig:
        config = replace(self.config, batch_tokens=max_tokens)
        if n_best == config.n_best:
            return config
        num_beams = n_best if config.num_beams == 1 and not config.do_sample else config.num_beams
        return replace(config, n_best=n_best, num_beams=num_beams)


def _describe(outputs: Sequence[GeneratedText], n_best: int) -> TaskPrediction:
    best = outputs[0] if outputs else GeneratedText("", 0.0, finished=False)
    json_fields = _to_json(best)
    if n_best > 1:
        json_fields["alternatives"] = [_to_json(output) for output in outputs]
    alternatives = tuple(Alternative(output.text, output.score) for output in outputs)
    return TaskPrediction(best.text, best.text, best.score, alternatives, json_fields)


def _to_json(output: GeneratedText) -> dict[str, Any]:
    json_fields: dict[str, Any] = {"text": output.text, "log_prob": output.score, "finished": output.finished}
    if output.alignment:
        json_fields["alignment"] = list(output.alignment[: len(output.tokens)])  # without EOS
    return json_fields
