"""Damage files at random and check that each is read, or refused in one line.

python -m tests.fuzz --cases 20000 --seed 7
python -m tests.fuzz --seed 7 --only 1234          # one case again, with its traceback
python -m tests.fuzz --seed 7 --only 1234 --keep d # write the damaged folder of the case to d
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 10
_START_SECONDS = 120


class Worker:
    """A process that runs cases; it is replaced after a hang, a crash or a failure."""

    def __init__(self, corpus: Path, seed: int, only_class: str) -> None:
        self._command = [sys.executable, "-m", "tests.fuzz.worker", str(corpus), str(seed), only_class]
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, index: int) -> dict[str, Any]:
        """Run one case and return its result."""
        is_new = self._process is None
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{index}\n".encode())
        process.stdin.flush()
        ready = _wait(process, _START_SECONDS if is_new else 0)
        line = process.stdout.readline() if ready else b""
        if line:
            result: dict[str, Any] = json.loads(line)
            if result["outcome"] == "failed":
                self.stop()  # its memory and its state may be those of the failure
            return result
        reason = f"crashed with code {process.wait()}" if ready else "hangs"
        self.stop()
        return {"index": index, "target": "?", "mutations": [], "outcome": "failed", "message": reason, "seconds": 0}

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _wait(process: subprocess.Popen[bytes], extra_seconds: float) -> bool:
    """Wait for the answer of a process; it hangs if it computes too long, or waits for something even longer.

    The time that it computes is the same on a busy machine.
    """
    start, start_cpu = time.monotonic(), _cpu_seconds(process.pid)
    while True:
        if select.select([process.stdout], [], [], 0.5)[0]:
            return True
        waited, computed = time.monotonic() - start, _cpu_seconds(process.pid) - start_cpu
        if computed > MAX_SECONDS + extra_seconds or waited > 6 * MAX_SECONDS + extra_seconds:
            return False


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def build_corpus(folder: Path) -> None:
    """Write the valid files in a process of its own, once."""
    code = f"from pathlib import Path; from tests.fuzz.targets import build_corpus; build_corpus(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def run_cases(
    corpus: Path, indices: range | list[int], seed: int, only_class: str, workers: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the results of cases in the order in which they finish; none starts after so many seconds."""
    todo: SimpleQueue[int] = SimpleQueue()
    for index in indices:
        todo.put(index)
    results: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    deadline = time.monotonic() + seconds

    def work() -> None:
        worker = Worker(corpus, seed, only_class)
        try:
            while time.monotonic() < deadline:
                results.put(worker.run(todo.get_nowait()))
        except Empty:
            pass
        finally:
            worker.stop()
            results.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    running = workers
    while running:
        result = results.get()
        running -= result is None
        if result is not None:
            yield result


def _describe(result: dict[str, Any], seed: int, only_class: str) -> str:
    class_option = f" --class {only_class}" if only_class else ""
    reproduction = f"python -m tests.fuzz --seed {seed}{class_option} --only {result['index']}"
    mutations = "; ".join(result["mutations"])
    return f"{result['target']} [{mutations}] -> {result['message']}  ({reproduction})".replace("\n", "\\n")


def rerun(corpus: Path, seed: int, index: int, only_class: str, keep: Path | None) -> None:
    """Run one case in this process, so that its traceback is seen."""
    from tests.fuzz.targets import list_targets
    from tests.fuzz.worker import pick_case, prepare

    target, rng = pick_case(list_targets(corpus), seed, index, only_class)
    folder = keep.resolve() if keep is not None else Path(tempfile.mkdtemp()) / "case"
    mutations = prepare(target, rng, folder)
    print(f"{target.name}: {'; '.join(mutations)}\n{folder}")
    os.chdir(folder)
    target.operation(folder)
    print("ok")


def main() -> int:
    """Run the cases of the command line; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=2000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed, which determines a case together with its number")
    parser.add_argument("--class", dest="only_class", default="", help="run cases of this class only")
    parser.add_argument("--only", type=int, help="run the case of this number here and show its traceback")
    parser.add_argument("--keep", type=Path, help="with --only: the new folder for the damaged files")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so many seconds")
    parser.add_argument("--corpus", type=Path, help="folder of the valid files; written if it does not exist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        corpus = options.corpus or Path(temporary) / "corpus"
        if not corpus.exists():
            build_corpus(corpus)
        if options.only is not None:
            rerun(corpus, options.seed, options.only, options.only_class, options.keep)
            return 0
        start = time.monotonic()
        counts: collections.Counter[str] = collections.Counter()
        slowest, largest, slowest_index = 0.0, 0, 0
        for result in run_cases(
            corpus, range(options.cases), options.seed, options.only_class, options.workers, options.seconds
        ):
            counts[result["outcome"]] += 1
            slowest, slowest_index = max((slowest, slowest_index), (result["seconds"], result["index"]))
            largest = max(largest, result.get("mebibytes", 0))
            if result["outcome"] == "failed":
                print(_describe(result, options.seed, options.only_class), flush=True)
        total = sum(counts.values())
        print(
            f"{total:,} cases in {time.monotonic() - start:.0f} s: {counts['ok']:,} ok, {counts['refused']:,} refused, "
            f"{counts['failed']:,} failed; slowest {slowest:.1f} s (case {slowest_index}), largest {largest:,} MiB"
        )
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
