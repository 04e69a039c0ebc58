"""Small examples of every task, tokenizers and tiny models for them, and logits that predict the labels exactly."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.checkpoints import ModelBundle
from qkv.data.examples import Answer, ImageExample, MultipleChoiceExample, QAExample, Span, TaggedExample, TextExample
from qkv.data.formats.conll import join_words
from qkv.families import bart, bert, gpt2, roberta, t5, vit
from qkv.nn import build
from qkv.objectives.classification import head_logits
from qkv.tasks import get_task
from qkv.tasks.base import apply_head_overrides
from qkv.tasks.features import Features
from qkv.tasks.head_outputs import input_processor, iter_outputs
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer

TEXT = """the king of spain sees a house in london and likes tea with unhappiness . who where what is it ?
bees dogs hate rainy mornings ; queen anne lives there since nineteen hundred years"""
WORDS = TEXT.split()
FAMILIES = {"bert": bert, "roberta": roberta, "gpt2": gpt2, "t5": t5, "bart": bart}
SIZES = {"bert": 120, "roberta": 330, "gpt2": 330, "t5": 200, "bart": 330}
LENGTH = 48


@cache
def tokeniser(family: str = "bert") -> Tokenizer:
    template = FAMILIES[family].TOKENIZER_TEMPLATE
    lines = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
    return train_tokenizer(template.kind, lines, vocab_size=SIZES[family], template=template)


SMALL = {"d_model": 32, "heads": 2, "layers": 1, "d_ff": 64, "d_kv": 16, "dropout": 0.0}  # by the end of a field's name


def model(task: Any, labels: Sequence[str], length: int = LENGTH, family: str = "bert") -> ModelBundle:
    """Return a tiny model with the head of a task."""
    torch.manual_seed(2)
    if task.name == "image_classification":
        return looking(task, labels)
    made_by, tokens = FAMILIES[family], tokeniser(family)
    names = [one.name for one in fields(made_by.Config)]
    small = {name: size for name in names for end, size in SMALL.items() if f"_{name}".endswith(f"_{end}")}
    shape = made_by.Config(**small | {name: length for name in names if name == "max_length"})
    wanted = inspect.signature(made_by.make_spec).parameters
    sizes = {name: tokens.vocab_size for name in ("source_vocab_size", "target_vocab_size") if name in wanted}
    made = build(made_by.make_spec(shape, head=task.head_kind, labels=tuple(labels), **sizes))
    apply_head_overrides(task, made)
    return ModelBundle(made.eval(), tokens, tokens)


def looking(task: Any, labels: Sequence[str]) -> ModelBundle:
    """Return a tiny vision model with the head of a task."""
    shape = vit.Config(d_model=32, heads=2, layers=1, d_ff=64, image_size=8, patch_size=4, num_channels=1)
    made = build(vit.make_spec(shape, head=task.head_kind, labels=tuple(labels)))
    apply_head_overrides(task, made)
    return ModelBundle(made.eval(), image_processor=task.make_image_processor(made.spec.source_embedding, None))


def learn(task: Any, bundle: ModelBundle, examples: Sequence[Any], steps: int, rate: float = 3e-3) -> None:
    """Train on all examples in one batch, repeatedly."""
    head = bundle.model.spec.head
    asked = task.featurize(
        examples, input_processor(task, bundle), head.labels, bundle.model.spec.source_embedding.max_length
    )
    batch = task.collate(asked, bundle.model.spec.has_token_types)
    optimiser = torch.optim.AdamW(bundle.model.parameters(), rate)
    bundle.model.train()
    for _ in range(steps):
        total, targets = task.loss(head_logits(bundle.model, batch), batch)
        optimiser.zero_grad()
        (total / targets).backward()
        optimiser.step()
    bundle.model.eval()


def perfect(task: Any, one: Features, outputs: int) -> Tensor:
    """Return logits that predict the labels of an example."""
    if task.name == "regression":
        return torch.tensor([one.labels])
    if task.name == "multi_label":
        return torch.tensor([one.labels]) * 20 - 10
    if task.head_kind == "span":
        logits = torch.zeros(one.length, 2)
        for side, place in enumerate(one.labels):
            logits[int(place), side] = 9.0
        return logits
    if task.head_kind == "choice":
        return torch.nn.functional.one_hot(torch.tensor(int(one.labels[0])), len(one.input_ids))[:, None] * 9.0
    return torch.nn.functional.one_hot(torch.tensor([int(x) for x in one.labels]), outputs) * 9.0


def told(task: Any, examples: Sequence[Any], labels: Sequence[str], longest: int, tokens: Tokenizer) -> list[Any]:
    """Return the predictions from perfect logits."""
    parts: list[list[tuple[Features, Tensor]]] = [[] for _ in examples]
    for one in task.featurize(examples, tokens, labels, longest):
        parts[one.example_index].append((one, perfect(task, one, len(labels))))
    return [task.postprocess(found, example, labels) for found, example in zip(parts, examples, strict=True)]


# ---- examples -------------------------------------------------------------------------------------------------------


def words_of(number: int, count: int) -> list[str]:
    return [WORDS[(11 * number + 3 * i) % len(WORDS)] for i in range(count)]


def sentence(number: int, count: int = 6) -> str:
    return " ".join(words_of(number, count))


def tags_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return tags: a queen or king and the next word are a person, places are places."""
    tags: list[str] = []
    for word in words:
        if word in ("king", "queen"):
            tags.append("B-PER")
        elif tags and tags[-1] == "B-PER":
            tags.append("I-PER")
        else:
            tags.append("B-LOC" if word in ("london", "spain") else "O")
    return tuple(tags)


def tagged(number: int, count: int = 7, chunks: bool = True) -> TaggedExample:
    words = tuple(words_of(number, count))
    text, starts = join_words(words)
    tags = tags_of(words) if chunks else tuple(["SHORT", "LONG"][len(word) > 4] for word in words)
    return TaggedExample(text, words, starts, tags, f"tags:{number}")


def question(number: int, count: int = 12, answerable: bool = True) -> QAExample:
    words = words_of(number, count)
    context, word = " ".join(words), max(words[number % 8 :], key=len)  # SQuAD's rules leave nothing of an article
    answer = Answer(word, f" {context} ".index(f" {word} "))
    answers = (answer,) if answerable else ()
    return QAExample(str(number), f"where is {word if answerable else 'it'} ?", context, answers, "q", answerable)


def choice(number: int) -> MultipleChoiceExample:
    options = tuple(sentence(number + i, 2) for i in range(2 + number % 3))
    return MultipleChoiceExample(
        sentence(number, 4), options, number % len(options), "c", "and" if number % 2 else None
    )


def labelled(number: int, label: Any, pair: bool = True) -> TextExample:
    return TextExample(sentence(number), f"l:{number}", sentence(number + 9, 3) if pair else None, label)


def pictured(number: int) -> ImageExample:
    drawn = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
    return ImageExample(drawn, f"p:{number}", "xyz"[number % 3])


@dataclass(frozen=True)
class Case:
    """A task with settings on some examples."""

    task: str
    examples: list[Any]
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 60

    def make(self) -> Any:
        return get_task(self.task, **self.settings)


SPANS = [Span(0, len(words_of(i, 6)[0])) for i in range(8)]
SEVERAL: list[tuple[str, ...]] = [(), ("a",), ("b",), ("a", "b"), ("c",), ("a", "c"), (), ("a", "b", "c")]


def logits_of(task: Any, bundle: ModelBundle, examples: Sequence[Any], max_tokens: int = 16384) -> list[Any]:
    """The features of each example with their logits."""
    outputs = dict(iter_outputs(task, bundle, examples, max_tokens))
    return [outputs[index] for index in range(len(examples))]


CASES = {
    "text_classification": Case("text_classification", [labelled(i, "xyz"[i % 3]) for i in range(8)]),
    "text_classification marked": Case(
        "text_classification",
        [TextExample(sentence(i), f"l:{i}", None, "xy"[i % 2], (SPANS[i],)) for i in range(8)],
        {"mark_spans": True, "positive_label": "x"},
    ),
    "regression": Case("regression", [labelled(i, 0.6 * i) for i in range(8)], steps=150),
    "multi_label": Case("multi_label", [labelled(i, SEVERAL[i]) for i in range(8)], {"threshold": 0.4}, steps=100),
    "token_classification": Case("token_classification", [tagged(i) for i in range(8)]),
    "token_classification all": Case("token_classification", [tagged(i) for i in range(8)], {"subword_pooling": "all"}),
    "token_classification mean": Case(
        "token_classification", [tagged(i) for i in range(8)], {"subword_pooling": "mean"}
    ),
    "token_classification parts of speech": Case("token_classification", [tagged(i, chunks=False) for i in range(8)]),
    "token_classification windows": Case(
        "token_classification", [tagged(i, 38) for i in range(8)], {"window_stride": 5, "subword_pooling": "mean"}
    ),
    "question_answering": Case("question_answering", [question(i) for i in range(8)], steps=120),
    "question_answering or none": Case(
        "question_answering", [question(i, answerable=i % 4 != 3) for i in range(8)], steps=120
    ),
    "question_answering windows": Case(
        "question_answering", [question(i, 38) for i in range(8)], {"doc_stride": 10}, steps=120
    ),
    "multiple_choice": Case("multiple_choice", [choice(i) for i in range(8)], steps=100),
    "image_classification": Case(
        "image_classification", [pictured(i) for i in range(8)], {"horizontal_flip": True, "mean": 0.4}
    ),
}
