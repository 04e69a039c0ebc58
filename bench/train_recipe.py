"""Training speed of a recipe on a GPU: eager, with CUDA graphs, and compiled with CUDA graphs.

    python bench/train_recipe.py multi30k-en-de
    python bench/train_recipe.py g2p-transformer squadshifts --rows eager,graphs --steps 200
    python bench/train_recipe.py multi30k-en-de --rows graphs --profile 20 train.num_workers=2

A row trains the recipe from its first step with its own batches, and is timed after --warmup steps, in which kernels
are compiled and graphs are captured. Tokens are those of the data, without padding and without BOS and EOS. The loss is
the mean over the timed steps: the same weights, batches and seeds for all rows, but padded batches draw other dropout.
"of the peak" is model FLOPs utilization. "host" is the time in which the host prepares and launches a step; the device
computes at the same time. --validate also times a validation.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run from a checkout

from qkv.recipe.packaged import find_recipe
from qkv.recipe.parse import read_recipe
from qkv.train.distributed.processes import init_distributed
from qkv.train.run_log import LossMeter
from qkv.train.trainer import Trainer
from qkv.train.workload import workload_class

ROWS = {
    "eager": ["train.cuda_graphs=false"],
    "graphs": [],
    "compiled": ["train.compile=true", "train.cuda_graphs=false"],
    "compiled graphs": ["train.compile=true"],
}


@dataclass
class Speed:
    tokens_per_second: float
    step_seconds: float
    host_seconds: float
    loss: float
    utilization: float | None
    num_graphs: int


def time_steps(trainer: Trainer, warmup: int, steps: int, profile_steps: int) -> Speed:
    """Train `warmup` steps and time the next `steps`."""
    trainer.model.train()
    batches, dist_info = trainer.batches(), trainer.dist_info
    step, batch = 0, None
    step_times: list[float] = []  # of the host

    def train(count: int, meter: LossMeter) -> None:
        nonlocal step, batch
        for _ in range(count):
            start = time.perf_counter()
            step, batch = step + 1, next(batches)
            trainer.train_step(step, batch, trainer.learning_rate_at(step), meter)
            step_times.append(time.perf_counter() - start)

    train(warmup, LossMeter(trainer.workload.loss_names, trainer.device))
    synchronize(trainer.device)
    meter, start = LossMeter(trainer.workload.loss_names, trainer.device), time.perf_counter()
    train(steps, meter)
    host_seconds = time.perf_counter() - start
    with meter.paused():
        means, seconds = meter.flush(dist_info)
    rate = means["tokens_per_second"]
    if profile_steps:
        slowest = sorted(range(step), key=lambda i: -step_times[i])[:12]
        print("slowest steps: " + ", ".join(f"{i + 1}: {step_times[i]:.3f} s" for i in sorted(slowest)), flush=True)
        profile(lambda: train(profile_steps, meter), profile_steps)
    assert batch is not None
    num_graphs = len(trainer.train_step.backward.graphs)
    loss, utilization = means[trainer.workload.loss_names[0]], trainer._utilization(rate, batch)
    return Speed(rate, seconds / steps, host_seconds / steps, loss, utilization, num_graphs)


def profile(call: Any, steps: int) -> None:
    """Print the kernels that take the most time, and the time of all."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events = [e for e in recorded.key_averages() if e.device_type.name == "CUDA"]
    total, count = sum(e.self_device_time_total for e in events), sum(e.count for e in events)
    print(f"\nkernels: {total / 1e3 / steps:.2f} ms and {count / steps:,.0f} kernels per step")
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:25]:
        milliseconds = event.self_device_time_total / 1e3 / steps
        print(f"  {milliseconds:7.3f} ms  {event.count / steps:6.1f} x  {event.key[:110]}")
    host = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)[:12]
    print("host: " + ", ".join(f"{e.key[:40]} {e.self_cpu_time_total / 1e3 / steps:.2f} ms" for e in host), flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="names or files of recipes, and KEY=VALUE settings for all of them")
    parser.add_argument("--rows", default="eager,graphs,compiled graphs", help="comma-separated list")
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", type=int, default=0, help="steps to profile after the timed ones")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--device", default=None)
    return parser.parse_intermixed_args()


def main() -> None:
    options = read_options()
    settings = [argument for argument in options.recipes if "=" in argument]
    dist_info = init_distributed(options.device)
    name = torch.cuda.get_device_name() if dist_info.device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}; {options.steps} steps after {options.warmup}")
    for recipe_name in (argument for argument in options.recipes if "=" not in argument):
        print(f"\n| {recipe_name} | tokens/s | ms per step | host ms | of the peak | loss | graphs | validation |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        data = None
        for row in options.rows.split(","):
            recipe = read_recipe(find_recipe(recipe_name), [*settings, *ROWS[row]])
            workload = workload_class(recipe).build(recipe, Path("/nowhere/run"), data)
            trainer = Trainer(recipe, Path("/nowhere/run"), workload, dist_info)
            speed = time_steps(trainer, options.warmup, options.steps, options.profile)
            validation = ""
            if options.validate:
                trainer.model.eval()
                start = time.perf_counter()
                metrics = workload.evaluate(trainer.model)
                validation = f"{time.perf_counter() - start:.1f} s, {workload.metric} {metrics[workload.metric]:.3g}"
            cells = f"{speed.tokens_per_second:,.0f} | {speed.step_seconds * 1e3:.2f} | {speed.host_seconds * 1e3:.2f}"
            peak = "" if speed.utilization is None else f"{speed.utilization:.1%}"
            print(f"| {row} | {cells} | {peak} | {speed.loss:.4f} | {speed.num_graphs} | {validation} |", flush=True)


if __name__ == "__main__":
    main()
