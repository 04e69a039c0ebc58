"""Tasks, a file each: how its examples become what a model takes, its loss, how answers are read off, its metrics."""

from qkv.tasks.task import TASKS, Task, find

__all__ = ["TASKS", "Task", "find"]
