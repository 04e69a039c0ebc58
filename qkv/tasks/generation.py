"""Generation: the text that a decoder writes for a source or a prompt, such as a translation or a continuation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from qkv.checkpoints import ModelBundle
from qkv.data.examples import TextExample
from qkv.errors import InputError
from qkv.generation.config import GenerationConfig
from qkv.generation.generate import GeneratedText, generate_texts
from qkv.recipe.schema import Seq2SeqRecipe
from qkv.tasks.base import PredictionTask, check_not_empty
from qkv.tasks.predictions import Alternative, TaskPrediction


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
        return replace(self, config=replace(self.config, **settings))

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
        config = replace(self.config, batch_tokens=max_tokens)
        if n_best != config.n_best:
            num_beams = n_best if config.num_beams == 1 and not config.do_sample else config.num_beams
            config = replace(config, n_best=n_best, num_beams=num_beams)
        sources = [
            example.text if example.text.startswith(self.prefix) else self.prefix + example.text for example in examples
        ]
        outputs = generate_texts(bundle, sources, config, [example.location for example in examples], first_index)
        return [_describe(generated, config.n_best) for generated in outputs]


def _describe(outputs: Sequence[GeneratedText], n_best: int) -> TaskPrediction:
    best = outputs[0] if outputs else GeneratedText("", 0.0, finished=False)
    json_fields = _to_json(best)
    if n_best > 1:
        json_fields["alternatives"] = [_to_json(output) for output in outputs]
    alternatives = tuple(Alternative(output.text, output.score) for output in outputs)
    return TaskPrediction(best.text, best.text, best.score, alternatives, json_fields)


def _to_json(output: GeneratedText) -> dict[str, Any]:
    return {"text": output.text, "log_prob": output.score, "finished": output.finished}
