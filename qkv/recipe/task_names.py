"""Names, aliases and descriptions of the tasks, without importing them or torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkv.errors import InputError, did_you_mean, quote
from qkv.registry import Registry
from qkv.renamed import renamed_value_message

TASKS: Registry[Callable[..., Any]] = Registry(
    "task",
    {
        "text_classification": "qkv.tasks.text_classification:TextClassification",
        "regression": "qkv.tasks.regression:Regression",
        "multi_label": "qkv.tasks.multi_label:MultiLabel",
        "token_classification": "qkv.tasks.token_classification:TokenClassification",
        "question_answering": "qkv.tasks.question_answering:QuestionAnswering",
        "multiple_choice": "qkv.tasks.multiple_choice:MultipleChoice",
        "image_classification": "qkv.tasks.image_classification:ImageClassification",
        "fill_mask": "qkv.tasks.fill_mask:FillMask",
        "next_sentence": "qkv.tasks.next_sentence:NextSentence",
        "generation": "qkv.tasks.generation:Generation",
        "embedding": "qkv.tasks.embedding:Embedding",
    },
)
DESCRIPTIONS = {
    "text_classification": "one label per text or pair of texts",
    "regression": "one number per text or pair of texts",
    "multi_label": "any number of labels per text",
    "token_classification": "one tag per word",
    "question_answering": "the span of a text that answers a question",
    "multiple_choice": "one of several choices",
    "image_classification": "one label per image",
    "fill_mask": "the most probable tokens at a text's masks",
    "next_sentence": "whether a sentence follows another",
    "generation": "a generated text: a translation, a summary, a continuation",
    "embedding": "one vector per text",
}
ALIASES = {"classify": "text_classification", "tag": "token_classification"}
# tasks of pretrained models that a recipe's `task:` does not train: pretraining and seq2seq recipes do
PREDICTION_ONLY = ("fill_mask", "next_sentence", "generation", "embedding")


def trainable_task_names() -> list[str]:
    """Return the names of the tasks that a recipe can train, registered ones included."""
    return [name for name in TASKS.names() if name not in PREDICTION_ONLY]


def resolve_task_name(name: str) -> str:
    """Return the task's name for a name or an alias of a trainable task."""
    name = ALIASES.get(name, name)
    message = renamed_value_message("task", name)
    if message:
        raise InputError(message)
    if name in PREDICTION_ONLY:
        raise InputError(f"task: '{name}' has no training data of its own; it is the task of a pretrained model")
    if name not in TASKS:
        raise InputError(f"task: there is no {quote(name)}; {did_you_mean(name, [*trainable_task_names(), *ALIASES])}")
    return name
