"""`qkv.fit`: train what a recipe describes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoints.model_folder import is_finished
from qkv.errors import InputError, check_flag, check_path
from qkv.nn.device import find_device
from qkv.recipe.schema import Recipe
from qkv.train.callbacks import Callback, check_callbacks
from qkv.train.distributed.processes import destroy_process_group, init_distributed, on_main_rank
from qkv.train.fit_arguments import make_plan
from qkv.train.run import Run
from qkv.train.run_folder import clean_finished, compare_recipe, lock_run_folder
from qkv.train.run_log import LOG, Record, append_record
from qkv.train.trainer import Trainer
from qkv.train.workload import workload_class


def fit(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    output: str | Path | None = None,
    *,
    task: str | None = None,
    init_from: str | Path | None = None,
    data: Any = None,
    columns: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    device: str | torch.device | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
) -> Run:
    """Train a model from a recipe, or fine-tune one on a task, and return the run, which is iterated over.

        for record in qkv.fit("recipes/g2p-demo.yaml", "runs/g2p"):  # trains
            print(record)
        qkv.fit(task="classify", init_from="models/bert-small", data=frame, output="runs/spam", progress=True)

    The run trains while it is iterated over; `run()`, or `progress=True`, trains to the end and shows the progress. A
    run with a checkpoint is resumed, and a finished one yields no records unless the recipe has more steps or another
    patience. SIGINT and SIGTERM write a checkpoint at the next step and raise a `KeyboardInterrupt`. Under torchrun all
    processes train one model.

    Args:
        recipe: a recipe of `qkv.read_recipe`, a mapping with the keys of a recipe, or the path of a YAML file. One with
            `task` and without `train` gets the settings that `qkv train --task` chooses for the data and the model.
        output: the run folder, which becomes a model folder; by default runs/ and the name of the recipe.
        task: a task, such as "classify", instead of a recipe.
        init_from: with `task`, the pretrained model.
        data: training data instead of the recipe's files: a pandas DataFrame, a Hugging Face dataset, a list of dicts,
            a dict of lists, or a dict of several of these by split ("train", "valid"); or a file.
        columns: the column of each field of `data`, such as {"text": "review", "label": "stars"}.
        overrides: changes of the recipe, such as {"train.epochs": 3} or ["train.epochs=3"].
        device: such as "cpu" or "cuda"; None: the GPU if there is one.
        callbacks: called in addition to those that the recipe names.
        progress: train at once and show the progress, in a terminal or a notebook.
    """
    check_flag(progress, "progress")
    check_callbacks(callbacks)
    device_name = None if device is None else str(find_device(device))
    plan = make_plan(recipe, task=task, init_from=init_from, data=data, columns=columns, overrides=overrides)
    folder = Path("runs") / plan.recipe.name if output is None else check_path(output, "output", "the run's folder")
    run = Run(plan.recipe, folder, _train(plan.recipe, folder, device_name, callbacks, plan.examples))
    return run.run() if progress else run


def _train(
    recipe: Recipe, folder: Path, device: str | None, callbacks: Sequence[Callback], data: Any
) -> Iterator[Record]:
    """Yield the records of a run; `data` are the splits of the recipe's data if they were already read."""
    lock_fd = None
    dist_info = init_distributed(device)
    try:
        change = compare_recipe(folder, recipe)
        if is_finished(folder) and not change.changes_length:
            on_main_rank(dist_info, partial(clean_finished, folder, recipe))
            return
        with _report_out_of_memory():
            workload = workload_class(recipe).build(recipe, folder, data)
            trainer = Trainer(recipe, folder, workload, dist_info, callbacks, change)
            if is_finished(folder) and trainer.is_done:  # such as another patience after the last step
                return
            lock_fd = on_main_rank(dist_info, partial(lock_run_folder, folder))
            trainer.prepare_folder()
            yield from _logged_records(trainer)
    finally:
        destroy_process_group(dist_info)
        if dist_info.is_main and lock_fd is not None:
            os.close(lock_fd)


def _logged_records(trainer: Trainer) -> Iterator[Record]:
    """Train, and yield each record after it was written to the log; a signal stops after the current step."""
    with trainer.train_step.stop_request:
        for record in trainer.train():
            if trainer.dist_info.is_main:
                append_record(trainer.folder / LOG, record)
            yield record


@contextmanager
def _report_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error into one line; the last checkpoint is complete."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError, on a CPU without a class of its own
        if isinstance(error, RuntimeError) and not any(phrase in str(error) for phrase in _OUT_OF_MEMORY_PHRASES):
            raise
        remedy = "raise train.gradient_accumulation_steps (the gradient stays the same)"
        remedy = f"{remedy}, set train.activation_checkpointing, or lower data.max_length"
        raise InputError(f"out of memory; {remedy}, and run it again to resume from the last checkpoint") from None


_OUT_OF_MEMORY_PHRASES = ("can't allocate memory", "out of memory")
