"""Tasks, a file each: how its examples become what a model takes, its loss, how answers are read off, its metrics."""

from qkv.recipe.task_names import TASKS
from qkv.tasks.base import Task, get_task

__all__ = ["TASKS", "Task", "get_task"]
