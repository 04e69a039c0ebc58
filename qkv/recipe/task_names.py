"""The names of the tasks, what each is for, and the short names that stand for some of them. Imports no torch."""

from __future__ import annotations

from qkv.errors import InputError, did_you_mean
from qkv.renamed import renamed_value_message

TASKS = {
    "text_classification": "one of several labels for a text or two",
    "regression": "a number for a text or two",
    "multi_label": "any number of labels for a text",
    "token_classification": "a tag for each word",
    "question_answering": "the stretch of a text that answers a question",
    "multiple_choice": "one of several options",
    "image_classification": "one of several labels for a picture",
}
ALIASES = {"classify": "text_classification", "tag": "token_classification"}


def resolve_task_name(name: str) -> str:
    """A task's own name, of that or of its alias."""
    name = ALIASES.get(name, name)
    message = renamed_value_message("task", name)
    if message:
        raise InputError(message)
    if name not in TASKS:
        raise InputError(f"task: there is no '{name}'; {did_you_mean(name, TASKS)}")
    return name
