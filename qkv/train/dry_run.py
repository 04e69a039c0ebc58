"""What a run would do: its data is read and its first batch made, but nothing is trained or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkv.analysis.cost_table import format_quantity
from qkv.errors import InputError
from qkv.nn.construction import build_on_meta
from qkv.recipe.schema import Recipe
from qkv.train.perf.mfu import flops_per_token_of_batch
from qkv.train.run_folder import compare_recipe, holds_run
from qkv.train.schedule import RunLength, resolve_steps, warmup_note
from qkv.train.workload import AnyBatch, Workload, workload_class

_FLOAT_BYTES = 4
_COPIES = 4  # weights, gradients and the two moments of Adam


def dry_run(recipe: Recipe, folder: Path, data: Any = None) -> list[str]:
    """Return lines about a run: examples, labels, size of the model, steps and an estimate of its cost.

    Args:
        recipe: the recipe.
        folder: the run folder, which is not written to.
        data: the recipe's data if it was already read.
    """
    compare_recipe(folder, recipe)
    workload = workload_class(recipe).build(recipe, folder, data)
    workload.check()
    length = resolve_steps(workload.recipe, workload.steps_per_epoch)
    _, batch = next(iter(workload.batches_from(0, 0)))
    note = warmup_note(recipe.train, length)
    lines = [*workload.data_notes, *([] if note is None else [note])]
    lines += [_describe_model(workload), _describe_length(workload, length), _describe_cost(workload, length, batch)]
    if holds_run(folder):
        lines.append(f"{folder} holds a run, which would be continued")
    return lines


def _describe_model(workload: Workload) -> str:
    num_parameters = sum(parameter.numel() for parameter in build_on_meta(workload.spec).parameters())
    memory = format_quantity(num_parameters * _FLOAT_BYTES * _COPIES, "B")
    return f"model: {workload.spec.family} with {num_parameters:,} parameters; weights, gradients and moments: {memory}"


def _describe_length(workload: Workload, length: RunLength) -> str:
    try:
        per_epoch = f"{workload.steps_per_epoch():,} steps per epoch, "
    except InputError:  # the size of a stream is not known
        per_epoch = ""
    warmup = f"{length.warmup_steps:,} of them warm-up" if length.warmup_steps else "no warm-up"
    return f"{per_epoch}{length.max_steps:,} steps in all, {warmup}, validation every {length.valid_every:,} steps"


def _describe_cost(workload: Workload, length: RunLength, batch: AnyBatch) -> str:
    microbatch = batch.split(workload.recipe.train.gradient_accumulation_steps)[0]
    flops = flops_per_token_of_batch(workload.spec, workload.collate(microbatch, 0)) * batch.tokens * length.max_steps
    return f"first batch: {batch.tokens:,} tokens; the run: about {format_quantity(flops, 'FLOP')}"
