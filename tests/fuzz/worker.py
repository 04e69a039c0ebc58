"""Run cases in a process that the caller can kill: case numbers come in, results go out as JSON lines.

    python -m tests.fuzz.worker CORPUS SEED CLASS

An outcome is "ok", "refused" (an `InputError` of one line), or "failed": another exception, text of a panic, too much
memory. A hang or a crash is noticed by the caller.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from qkv import files
from qkv.errors import InputError
from tests.fuzz.mutations import mutate
from tests.fuzz.targets import WEIGHTS, Target, list_targets

MAX_EXTRA_BYTES = 1 << 30
MAX_MESSAGE_CHARS = 600  # a list of all keys of a recipe's section is the longest
_PANIC_TEXTS = ("panicked", "stack backtrace", "RUST_BACKTRACE", "Traceback", "Segmentation", "terminate called")


def pick_case(targets: dict[str, list[Target]], seed: int, index: int, only_class: str) -> tuple[Target, random.Random]:
    """Return what a case damages, and the generator that decides how."""
    rng = random.Random(f"{seed}:{index}")
    name = only_class or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    return rng.choice(targets[name]), rng


def prepare(target: Target, rng: random.Random, folder: Path) -> list[str]:
    """Copy the valid folder and damage the copy; return the mutations."""
    shutil.copytree(target.folder, folder)
    return [mutate(folder, rng, target.is_editable) for _ in range(rng.choice((1, 1, 1, 2, 3)))]


def run_operation(target: Target, folder: Path) -> tuple[str, str]:
    """Run the operation of a case and return its outcome with a description."""
    os.chdir(folder)
    try:
        target.operation(folder)
    except InputError as error:
        message = str(error)
        is_one_line = "\n" not in message and len(message.replace(str(folder), "")) <= MAX_MESSAGE_CHARS
        has_panic = any(text in message for text in _PANIC_TEXTS)
        return ("refused" if is_one_line and not has_panic else "failed"), message[:1000]
    except BaseException as error:  # a panic of Rust is no Exception
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if "/qkv/" in f.filename), "")
        return "failed", f"{type(error).__name__}: {str(error)[:300]} at {place}"
    return "ok", ""


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_case(target: Target, rng: random.Random, folder: Path, stderr: Path) -> dict[str, Any]:
    """Run one case; the result has its outcome, its mutations, its memory and its time."""
    mutations = prepare(target, rng, folder)
    _reset_peak()
    base, start = _peak_bytes(), time.process_time()
    outcome, message = run_operation(target, folder)
    seconds, extra_bytes = time.process_time() - start, _peak_bytes() - base
    os.chdir("/")
    printed = stderr.read_text(errors="replace")
    os.truncate(stderr, 0)
    if any(text in printed for text in _PANIC_TEXTS):
        outcome, message = "failed", f"printed {printed[:300]!r} ({message})"
    if extra_bytes > MAX_EXTRA_BYTES:
        outcome, message = "failed", f"took {extra_bytes / 2**20:.0f} MiB ({message})"
    result = {"target": target.name, "mutations": mutations, "outcome": outcome, "message": message}
    return result | {"seconds": round(seconds, 3), "mebibytes": extra_bytes >> 20}


def _limit_address_space() -> None:
    """Let an allocation of many gigabytes fail instead of taking the memory of the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 30),) * 2)


def main() -> None:
    """Answer case numbers from stdin on stdout."""
    corpus, seed, only_class = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    import torch

    torch.set_num_threads(1)
    files._FIFO_SECONDS = 0.05  # a named pipe of these cases never has a writer
    warnings.simplefilter("ignore")
    targets = list_targets(corpus)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    scratch = Path(tempfile.mkdtemp(prefix="qkv-fuzz-"))
    stderr = scratch / "stderr"
    stderr.touch()
    descriptor = os.open(stderr, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):  # libraries that are not written in Python print too
        os.dup2(descriptor, stream)
    _limit_address_space()
    for line in sys.stdin:
        target, rng = pick_case(targets, seed, int(line), only_class)
        folder = scratch / "case"
        result = run_case(target, rng, folder, stderr)
        _remove(folder)
        gc.collect(0)
        answers.write(json.dumps(result | {"index": int(line)}) + "\n")
    _remove(scratch)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
