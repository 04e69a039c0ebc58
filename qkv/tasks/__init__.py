"""Tasks, one file each: parsing of inputs, features, loss, predictions, metrics. `Predictor` runs them on a model."""

from qkv.tasks.base import TASKS, Task, get_task

__all__ = ["TASKS", "Task", "get_task"]
