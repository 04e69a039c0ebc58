"""Random kill -9 against a training run: every restart has to resume, and the last weights have to be the same bits.

    python bench/kills.py recipes/pretrain-gpt2-mini.yaml train.save_every=5 --minutes 10
    python bench/kills.py RECIPE data.streaming=true train.num_workers=2 --seed 2 --mean 4

The recipe is trained once undisturbed, then once more into another folder while the process with all its children is
killed without warning, again and again, at moments that `--seed` decides: the time between start and kill is
exponential, so that some kills fall into the imports, some into the reading, some into a checkpoint being written.
After `--minutes` of that the run is left to finish. On a GPU the recipe needs train.deterministic.

What is printed: kills, by what the process was at; the steps at which the next one resumed; whether the weights are
bit-equal. The exit code is 1 where they are not, or where a start ended with an error of its own.
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
sys.path.insert(0, str(ROOT))  # so that it runs from a checkout too

MODEL, LAST, SHARDED = "model.safetensors", "last.safetensors", "last.json"
_LOOK = 0.05  # seconds between two looks at the process


class Failed(Exception):
    """A start that ended by itself and not well."""


@dataclass
class Tale:
    """What happened to the disturbed run."""

    kills: Counter[str] = field(default_factory=Counter)  # by what the process was at
    steps: list[int] = field(default_factory=list)  # of the checkpoint that each start found


def command(recipe: str, changes: Sequence[str], folder: Path, device: str | None) -> list[str]:
    where = ["--device", device] if device else []
    return [sys.executable, "-m", "qkv.cli", "train", recipe, *changes, "-o", str(folder), *where]


def start(given: list[str], said: Path) -> subprocess.Popen[bytes]:
    with open(said, "wb") as out:
        return subprocess.Popen(given, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=Path.cwd())


def finish(process: subprocess.Popen[bytes], said: Path) -> None:
    if process.wait():
        raise Failed(f"exit code {process.returncode}: {said.read_text(errors='replace')[-2000:].strip()}")


def step_of(folder: Path) -> int:
    """The step of the checkpoint in use, 0 where there is none."""
    if (folder / SHARDED).is_file():
        return int(json.loads((folder / SHARDED).read_text())["progress"]["step"])
    if not (folder / LAST).is_file():
        return 0
    from safetensors import safe_open

    with safe_open(str(folder / LAST), framework="pt") as file:
        return int(json.loads(file.metadata()["progress"])["step"])


def at(folder: Path, said: Path) -> str:
    """What a process is doing now, as far as its files tell."""
    if any(folder.glob(".*.part*")):
        return "writing"
    return "training" if said.stat().st_size else "starting"


def disturb(given: list[str], folder: Path, said: Path, *, until: float, mean: float, chance: random.Random) -> Tale:
    """Starts the run and kills it until the time is over or the run is done."""
    tale = Tale()
    while time.monotonic() < until:
        tale.steps.append(step_of(folder))
        process = start(given, said)
        end = min(time.monotonic() + chance.expovariate(1 / mean), until)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(max(0.0, min(_LOOK, end - time.monotonic())))
        if process.poll() is not None:
            finish(process, said)
            return tale
        doing = at(folder, said)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        tale.kills[doing] += 1
    tale.steps.append(step_of(folder))
    finish(start(given, said), said)
    return tale


def digest(folder: Path) -> str:
    return hashlib.blake2b((folder / MODEL).read_bytes(), digest_size=16).hexdigest()


def told(tale: Tale) -> str:
    kinds = ", ".join(f"{count} while {doing}" for doing, count in sorted(tale.kills.items())) or "none"
    return f"{sum(tale.kills.values())} kills ({kinds}); resumed at steps {', '.join(map(str, tale.steps))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--mean", type=float, default=8.0, help="seconds from a start to its kill, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", help="cpu or cuda; the GPU if there is one")
    args = parser.parse_intermixed_args()

    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        place = Path(name)
        whole, cut, said = place / "undisturbed", place / "killed", place / "said"
        try:
            began = time.monotonic()
            finish(start(command(args.recipe, args.changes, whole, args.device), said), said)
            print(f"undisturbed: {time.monotonic() - began:.0f} s, weights {digest(whole)}", flush=True)
            tale = disturb(
                command(args.recipe, args.changes, cut, args.device), cut, said,
                until=time.monotonic() + 60 * args.minutes, mean=args.mean, chance=random.Random(args.seed),
            )  # fmt: skip
        except Failed as problem:
            print(f"a start failed with {problem}")
            return 1
        left = sorted(path.name for path in cut.iterdir() if path.name not in {p.name for p in whole.iterdir()})
        equal = digest(whole) == digest(cut)
        print(f"killed: {told(tale)}")
        print(f"files that the undisturbed run does not have: {', '.join(left) or 'none'}")
        print("the weights are bit-equal" if equal else f"the weights DIFFER: {digest(cut)}")
        return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
