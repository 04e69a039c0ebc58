"""Training on streams: memory is carried, reset and saved, and the weights do not depend on how a run is divided."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_pretraining import run_all, weights, write_text

from qkv.checkpoints import load
from qkv.checkpoints.safetensors_io import load_tensors
from qkv.errors import InputError
from qkv.nn import Ragged
from qkv.recipe.parse import parse_recipe
from qkv.train.checkpoint import LAST_CHECKPOINT
from qkv.train.fit import fit
from qkv.train.nt_asgd import NonmonotonicAverage
from qkv.train.perf.mfu import flops_per_token, flops_per_token_of_batch
from qkv.train.text_evaluation import evaluate_text
from qkv.train.workloads.pretraining import PretrainingWorkload

AWD = {
    "model": {"family": "awd_lstm", "hidden_size": 24, "word_dropout": 0.2, "d_model": 12, "layers": 2},
    "data": {"random_bptt": True},
    "objective": {"clm": {"activation_penalty": 2.0, "temporal_penalty": 1.0}},
    "train": {"optimizer": "nt_asgd", "nonmonotone": 1, "learning_rate": 3.0, "schedule": "constant"},
}
TRANSFORMER_XL = {"family": "transformer_xl", "d_model": 16, "heads": 2, "layers": 1, "d_ff": 16}


def recipe_of(folder: Path, **changes: dict[str, Any]) -> Any:
    raw: dict[str, Any] = {
        "name": "streams",
        "objective": {"clm": {}},
        "model": {"family": "lstm_lm", "d_model": 16, "hidden_size": 16, "dropout": 0.1},
        "data": {"train": str(write_text(folder)), "format": "blank_line_separated", "hold_out": 0.2, "max_length": 8},
        "tokenizer": {"vocab_size": 300},
        "train": {"max_steps": 6, "batch_tokens": 64, "log_every": 2, "warmup_steps": 2, "save_every": 1},
        "validation": {"every_steps": 2, "num_samples": 1, "max_tokens": 300},
    }
    for section, values in changes.items():
        is_new_model = section == "model" and "family" in values
        raw[section] = values if is_new_model else raw[section] | values
    return parse_recipe(raw, "test")


@pytest.mark.parametrize("changes", [{}, AWD], ids=["lstm_lm", "awd_lstm"])
def test_a_stopped_run_resumes_to_the_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, **changes)
    run_all(recipe, tmp_path / "whole")
    stopped = fit(recipe, tmp_path / "cut", device="cpu")
    for _ in range(2):
        next(record for record in stopped if record.kind == "train")
    stopped.close()
    run_all(recipe, tmp_path / "cut")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_the_memory_of_every_stream_is_in_the_checkpoint(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, train={"keep_checkpoint": True})
    run_all(recipe, tmp_path / "run")
    tensors, _ = load_tensors(tmp_path / "run" / LAST_CHECKPOINT)
    memory = {name: tensor for name, tensor in tensors.items() if name.startswith("memory.")}
    assert {name: tuple(tensor.shape) for name, tensor in memory.items()} == {
        f"memory.layers.{layer}.{state}": (8, 16) for layer in (0, 1) for state in "hc"
    }
    assert all(bool(tensor.any(1).all()) for tensor in memory.values())


def test_a_memory_of_other_streams_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, train={"max_steps": 4, "keep_checkpoint": True})
    run_all(recipe, tmp_path / "run")
    other = recipe_of(tmp_path, train={"max_steps": 6, "keep_checkpoint": True}, data={"num_streams": 3})
    with pytest.raises(InputError):
        run_all(other, tmp_path / "run")


def test_accumulation_changes_no_gradient(tmp_path: Path) -> None:
    losses = []
    for count in (1, 3):
        model = {"family": "lstm_lm", "d_model": 16, "hidden_size": 16, "dropout": 0.0}
        recipe = recipe_of(tmp_path, model=model, train={"gradient_accumulation_steps": count})
        records = run_all(recipe, tmp_path / f"run{count}")
        losses.append([record.values["loss"] for record in records if record.kind == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_held_out_perplexity_is_that_of_whole_documents(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, validation={"num_streams": 1, "max_tokens": 10**6})
    run_all(recipe, tmp_path / "run")
    bundle = load(tmp_path / "run")
    workload = PretrainingWorkload.build(recipe, tmp_path / "run")
    total, count = 0.0, 0
    with torch.no_grad():
        for index in range(len(workload.valid_corpus)):
            ids = torch.tensor([bundle.source_tokenizer.bos_id, *workload.valid_corpus.document(index).tolist()])
            log_probs = bundle.model(Ragged.pack([ids[:-1]])).log_softmax(-1)
            total -= float(log_probs.gather(1, ids[1:, None]).sum())
            count += len(ids) - 1
    assert evaluate_text(bundle, recipe)["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_memory_makes_a_difference_and_can_be_left_out(tmp_path: Path) -> None:
    run_all(recipe_of(tmp_path), tmp_path / "carried")
    run_all(recipe_of(tmp_path, data={"carry_memory": False}), tmp_path / "chunks")
    assert weights(tmp_path / "carried") != weights(tmp_path / "chunks")


def test_a_model_without_memory_refuses_streams(tmp_path: Path) -> None:
    model = {"family": "gpt2", "d_model": 16, "heads": 2, "layers": 1, "max_length": 16}
    for data in ({"carry_memory": True}, {"num_streams": 2}, {"random_bptt": True}):
        with pytest.raises(InputError, match="has no memory"):
            run_all(recipe_of(tmp_path, model=model, data=data), tmp_path / "run")


def test_cost_counts_the_streams_and_the_memory_of_training(tmp_path: Path) -> None:
    transformer_xl = TRANSFORMER_XL | {"memory_length": 8}
    recipe = recipe_of(tmp_path, model=transformer_xl, data={"num_streams": 3})
    inputs = PretrainingWorkload.cost_inputs(recipe, tmp_path, None, None)
    assert (inputs.memory_length, inputs.batch_tokens(8)) == (8, 24)
    without_memory = recipe_of(tmp_path, model=transformer_xl, data={"carry_memory": False})
    inputs = PretrainingWorkload.cost_inputs(without_memory, tmp_path, None, None)
    assert (inputs.memory_length, inputs.batch_tokens(8)) == (0, 64)


@pytest.mark.parametrize("memory_length", [8, 64])
def test_the_flops_of_a_batch_count_the_memory(memory_length: int, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, model=TRANSFORMER_XL | {"memory_length": memory_length})
    workload = PretrainingWorkload.build(recipe, tmp_path / "run")
    _, batch = next(iter(workload.batches_from(0, 0)))
    length = recipe.data.max_length
    assert flops_per_token_of_batch(workload.spec, workload.collate(batch, 0)) == pytest.approx(
        flops_per_token(workload.spec, target_length=length, memory_length=memory_length), rel=0.1
    )


def test_averaging_begins_when_validation_stops_improving() -> None:
    model = torch.nn.Linear(2, 2)
    average = NonmonotonicAverage(model, patience=2)
    for metric in (3.0, 2.0, 2.5):
        average.observe(metric)
    assert not average.is_averaging
    average.observe(2.9)  # better than the first, and the last two do not count yet
    assert not average.is_averaging
    average.observe(2.6)  # worse than the second one
    assert average.is_averaging
    seen = []
    for step in range(3):
        with torch.no_grad():
            model.weight.fill_(float(step))
        average.update(model)
        seen.append(float(step))
    with average.applied_to(model):
        torch.testing.assert_close(model.weight, torch.full((2, 2), float(np.mean(seen))))
    again = NonmonotonicAverage(model, patience=2)
    again.load_state_dict(average.state_dict())
    assert again.state_dict().keys() == average.state_dict().keys()
    assert again.is_averaging
