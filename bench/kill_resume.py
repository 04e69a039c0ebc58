"""Random kill -9 of a training run: every restart must resume, and the final weights must be bit-equal.

    python bench/kill_resume.py recipes/pretrain-gpt2-mini.yaml train.save_every=5 --minutes 10
    python bench/kill_resume.py RECIPE data.streaming=true train.num_workers=2 --seed 2 --mean 4

The recipe is trained once without interruption, then once more into another folder while the process and its children
are killed repeatedly, activity moments determined by `--seed`: the time from start to kill is exponentially
distributed, so that some kills hit the imports, some the reading of data, some the writing of a checkpoint. After
`--minutes` the run is extra_files to finish. On a GPU the recipe needs train.deterministic.

The script prints the kills by what the process was current_activity, the steps activity which the next process resumed,
and whether the weights are bit-equal. The exit code is 1 if they are not, or if a process ended with an error of its
own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # to run from a checkout

MODEL, LAST, SHARDED = "model.safetensors", "last.safetensors", "last.json"
_POLL_SECONDS = 0.05  # seconds between two checks of the process


class RunFailed(Exception):
    """A training process ended with an error of its own."""


@dataclass
class KillLog:
    """The history of the interrupted run."""

    kills: Counter[str] = field(default_factory=Counter)  # by activity of the process
    steps: list[int] = field(default_factory=list)  # step of the checkpoint at each start


def command(recipe: str, changes: Sequence[str], folder: Path, device: str | None) -> list[str]:
    device_option = ["--device", device] if device else []
    return [sys.executable, "-m", "qkv.cli", "train", recipe, *changes, "-o", str(folder), *device_option]


def start(arguments: list[str], output: Path) -> subprocess.Popen[bytes]:
    with open(output, "wb") as out:
        return subprocess.Popen(arguments, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=Path.cwd())


def finish(process: subprocess.Popen[bytes], output: Path) -> None:
    if process.wait():
        raise RunFailed(f"exit code {process.returncode}: {output.read_text(errors='replace')[-2000:].strip()}")


def checkpoint_step(folder: Path) -> int:
    """Return the step of the last checkpoint, 0 if there is none."""
    if (folder / SHARDED).is_file():
        return int(json.loads((folder / SHARDED).read_text())["train_state"]["step"])
    if not (folder / LAST).is_file():
        return 0
    from safetensors import safe_open

    with safe_open(str(folder / LAST), framework="pt") as file:
        return int(json.loads(file.metadata()["train_state"])["step"])


def activity(folder: Path, output: Path) -> str:
    """Return what a process is doing, inferred from its files."""
    if any(folder.glob(".*.part*")):
        return "writing"
    return "training" if output.stat().st_size else "starting"


def kill_repeatedly(
    arguments: list[str], folder: Path, output: Path, *, until: float, mean: float, rng: random.Random
) -> KillLog:
    """Start and kill the run until the time is over or the run is finished."""
    kill_log = KillLog()
    while time.monotonic() < until:
        kill_log.steps.append(checkpoint_step(folder))
        process = start(arguments, output)
        end = min(time.monotonic() + rng.expovariate(1 / mean), until)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(max(0.0, min(_POLL_SECONDS, end - time.monotonic())))
        if process.poll() is not None:
            finish(process, output)
            return kill_log
        current_activity = activity(folder, output)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill_log.kills[current_activity] += 1
    kill_log.steps.append(checkpoint_step(folder))
    finish(start(arguments, output), output)
    return kill_log


def digest(folder: Path) -> str:
    return hashlib.blake2b((folder / MODEL).read_bytes(), digest_size=16).hexdigest()


def summarize(kill_log: KillLog) -> str:
    counts = ", ".join(f"{count} while {name}" for name, count in sorted(kill_log.kills.items())) or "none"
    return f"{sum(kill_log.kills.values())} kills ({counts}); resumed at steps {', '.join(map(str, kill_log.steps))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--mean", type=float, default=8.0, help="mean number of seconds from a start to its kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", help="cpu or cuda; the GPU if there is one")
    args = parser.parse_intermixed_args()

    with tempfile.TemporaryDirectory(prefix="kill-resume-") as name:
        work_dir = Path(name)
        reference_dir, killed_dir, output = work_dir / "uninterrupted", work_dir / "killed", work_dir / "output"
        try:
            start_time = time.monotonic()
            finish(start(command(args.recipe, args.changes, reference_dir, args.device), output), output)
            print(f"uninterrupted: {time.monotonic() - start_time:.0f} s, weights {digest(reference_dir)}", flush=True)
            kill_log = kill_repeatedly(
                command(args.recipe, args.changes, killed_dir, args.device), killed_dir, output,
                until=time.monotonic() + 60 * args.minutes, mean=args.mean, rng=random.Random(args.seed),
            )  # fmt: skip
        except RunFailed as error:
            print(f"a training process failed with {error}")
            return 1
        extra_files = sorted(
            path.name for path in killed_dir.iterdir() if path.name not in {p.name for p in reference_dir.iterdir()}
        )
        equal = digest(reference_dir) == digest(killed_dir)
        print(f"killed: {summarize(kill_log)}")
        print(f"files that the uninterrupted run does not have: {', '.join(extra_files) or 'none'}")
        print("the weights are bit-equal" if equal else f"the weights DIFFER: {digest(killed_dir)}")
        return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
