"""Timing on shared machines, used by the scripts in this folder.

All contestants run in round_index, round after round, so that changes in the machine's speed affect all of them: those
of torch in one process, other engines each in its own (`SubprocessCall`). A sample that was taken while other processes
were busy is repeated, and the limit_seconds disturbed one is used. The result is the median over rounds of the ratio of
two contestants' times in the same round; absolute times drift, ratios do not.

Each time is also compared with the limit of the machine: the measured speed of a large matrix product (`matmul_rate`),
in float32 on a CPU and in bfloat16 on a GPU, as the contestants compute.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qkv.train.perf.mfu import measure_matmul_peak, time_call

_MAX_OTHER_CORES = 0.1  # cores that other processes may use before a sample is repeated
_MAX_SAMPLES = 3
_MIN_SECONDS = 0.2  # of a sample; shorter calls are repeated


@dataclass
class Timings:
    """Seconds per call of one contestant, one value per round."""

    seconds: list[float] = field(default_factory=list)
    num_noisy: int = 0  # samples that were noisy in all repetitions

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def relative_spread(self) -> float:
        """Return half the interquartile range, divided by the median."""
        ordered = sorted(self.seconds)
        n = len(ordered)
        return (ordered[(3 * n) // 4] - ordered[n // 4]) / 2 / self.median


class SubprocessCall:
    """A contestant in its own process, which runs `serve`. A call is one line to that process and one line back.

    Engines in one process share the OpenMP runtime. If it has more threads than there are cores, threads do not spin,
    and every kernel waits until they wake up: 20 % of BERT's forward pass on two cores, mostly in small kernels.
    """

    def __init__(self, command: Sequence[str]):
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        _SUBPROCESSES.append(self)
        self._read_reply()

    def __call__(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._read_reply()

    def _read_reply(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        reply = json.loads(line) if line else {"error": "its process ended"}
        if "missing" in reply:
            raise ModuleNotFoundError(name=reply["missing"])
        if "error" in reply:
            raise RuntimeError(reply["error"])

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process so far."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        fields = stat.read_text().rpartition(")")[2].split() if stat.exists() else ["0"] * 13
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Kill the process."""
        _SUBPROCESSES.remove(self)
        self.process.kill()
        self.process.communicate()


_SUBPROCESSES: list[SubprocessCall] = []


def serve(make: Callable[[], Callable[[], object]]) -> None:
    """Run the process of a `SubprocessCall`: create the call, and run it for each line of stdin."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr

    def reply(**values: str | None) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    try:
        call = make()
        reply()
        for _ in sys.stdin:
            call()
            reply()
    except ModuleNotFoundError as error:
        reply(missing=error.name)
    except Exception as error:  # raised again in the parent process
        reply(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def speedup(timings: Timings, baseline: Timings) -> float:
    """Return how many times faster a contestant is than a baseline: the median of the ratios of all rounds."""
    return statistics.median(slow / fast for fast, slow in zip(timings.seconds, baseline.seconds, strict=True))


def time_interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, Timings]:
    """Time warmed-up calls in turn; every other round runs in reverse order, so that no position has an advantage."""
    repeats = {name: _repeats(call, device) for name, call in calls.items()}
    timings = {name: Timings() for name in calls}
    for round_index in range(rounds):
        names = list(calls) if round_index % 2 == 0 else list(reversed(calls))
        for name in names:
            seconds, other_cores = _least_disturbed(calls[name], repeats[name], device)
            timings[name].seconds.append(seconds)
            timings[name].num_noisy += other_cores > _MAX_OTHER_CORES
    return timings


def summarize(
    timings: Mapping[str, Timings], tokens: int, limit_seconds: float, baseline: str | None
) -> list[dict[str, Any]]:
    """Return one row per contestant.

    Args:
        timings: times of the contestants.
        tokens: tokens that one call processes.
        limit_seconds: time of its matrix products at the measured rate.
        baseline: contestant that the others are compared with.
    """
    return [
        {
            "row": name,
            "tokens_per_second": tokens / row_timings.median,
            "ms": row_timings.median * 1e3,
            "spread": row_timings.relative_spread,
            "ratio": speedup(row_timings, timings[baseline]) if baseline in timings else None,
            "fraction_of_limit": limit_seconds / row_timings.median,
            "num_noisy": row_timings.num_noisy,
        }
        for name, row_timings in timings.items()
    ]


def print_table(rows: list[dict[str, Any]], tokens: int, limit_seconds: float, baseline: str | None) -> None:
    """Print the rows of `summarize` as a table, with the limit in the last line."""
    print(f"\n| row | real tokens/s | ms | spread | x {baseline or 'no peer'} | of the matrix-product limit |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        cells = f"{row['tokens_per_second']:,.0f} | {row['ms']:.2f} | {row['spread']:.0%} | {ratio}"
        print(f"| {row['row']} | {cells} | {row['fraction_of_limit']:.0%} |")
    print(f"| limit | {tokens / limit_seconds:,.0f} | {limit_seconds * 1e3:.2f} | | | 100% |")
    num_noisy = sum(row["num_noisy"] for row in rows)
    if num_noisy:
        print(f"noisy: other processes used the machine in {num_noisy} samples", end="")
        print("; trust ratios only, or run again on an idle machine")
    print(flush=True)


def matmul_rate(device: torch.device) -> float:
    """Measure the FLOP/s of a large matrix product, the best of several."""
    return measure_matmul_peak(device, use_bf16=device.type == "cuda", seconds=7 * _MIN_SECONDS)


def _repeats(call: Callable[[], object], device: torch.device) -> int:
    return max(1, int(_MIN_SECONDS / max(time_call(call, 1, device), 1e-6)))


def _least_disturbed(call: Callable[[], object], repeats: int, device: torch.device) -> tuple[float, float]:
    """Return seconds per call, and the number of cores that other processes used meanwhile."""
    samples = []
    for _ in range(_MAX_SAMPLES):
        others = OtherLoad()
        seconds = time_call(call, repeats, device)
        other_cores = others.cores()
        samples.append((other_cores, seconds))
        # on a GPU the load of the CPU cores matters little
        if other_cores <= _MAX_OTHER_CORES or device.type == "cuda":
            break
        time.sleep(0.1)
    other_cores, seconds = min(samples)
    return seconds, 0.0 if device.type == "cuda" else other_cores


class OtherLoad:
    """The load of other processes from now on."""

    def __init__(self) -> None:
        self._busy, self._own, self._began = _machine_cpu_seconds(), _own_cpu_seconds(), time.perf_counter()

    def cores(self) -> float:
        """Return the mean number of cores that they used."""
        wall = time.perf_counter() - self._began
        # /proc/stat counts in hundredths of a second, hence the tolerance for short samples
        return max(0.0, (_machine_cpu_seconds() - self._busy - (_own_cpu_seconds() - self._own) - 0.02) / wall)


def _own_cpu_seconds() -> float:
    """Return the CPU seconds of all contestants so far."""
    return time.process_time() + sum(call.cpu_seconds() for call in _SUBPROCESSES)


def _machine_cpu_seconds() -> float:
    """Return the CPU seconds of the whole machine so far, steal time included; 0 if the system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
