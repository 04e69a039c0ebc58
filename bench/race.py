"""Timing for machines that others use too, shared by the scripts in this folder.

All contestants run in turn, round after round, so that a machine that speeds up or slows down does it to everyone:
those of torch in one process, other engines each in its own (`Apart`). A sample taken while other processes were busy
is taken again and the less disturbed one kept. What is compared is the median over rounds of the ratio of two
contestants' times in the same round; absolute times drift, ratios hold.

Each figure also stands beside what the machine can do at all: the measured speed of a large matrix product
(`matrix_rate`), float32 on a CPU and bfloat16 on a GPU, because that is what the contestants compute in.
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

_QUIET = 0.1  # cores that others may use before a sample is taken again
_TRIES = 3
_AT_LEAST = 0.2  # seconds in a sample: shorter calls are repeated until they fill it


@dataclass
class Laps:
    """One contestant's seconds a call, a round each."""

    seconds: list[float] = field(default_factory=list)
    disturbed: int = 0  # samples that stayed noisy after every try

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        ordered = sorted(self.seconds)
        n = len(ordered)
        return (ordered[(3 * n) // 4] - ordered[n // 4]) / 2 / self.median


class Apart:
    """A contestant in a process of its own, where `serve` waits for it; a call is one line there and one back.

    Engines that share a process share OpenMP's runtime. Once it holds more threads than there are cores it lets none of
    them spin, and every kernel waits for threads to wake: 20 % of BERT's forward on two cores, small kernels most.
    """

    def __init__(self, command: Sequence[str]):
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        _APART.append(self)
        self._answer()

    def __call__(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        said = json.loads(line) if line else {"error": "its process ended"}
        if "missing" in said:
            raise ModuleNotFoundError(name=said["missing"])
        if "error" in said:
            raise RuntimeError(said["error"])

    def cores(self) -> float:
        """CPU seconds so far."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        words = stat.read_text().rpartition(")")[2].split() if stat.exists() else ["0"] * 13
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        _APART.remove(self)
        self.process.kill()
        self.process.communicate()


_APART: list[Apart] = []


def serve(make: Callable[[], Callable[[], object]]) -> None:
    """The other side of `Apart`: makes a call, and runs it whenever a line comes in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer

    def answer(**said: str | None) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    try:
        call = make()
        answer()
        for _ in sys.stdin:
            call()
            answer()
    except ModuleNotFoundError as error:
        answer(missing=error.name)
    except Exception as error:  # said where the race is run
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def speed_up(of: Laps, over: Laps) -> float:
    """How many times faster `of` is than `over`: the median of what each round says."""
    return statistics.median(slow / fast for fast, slow in zip(of.seconds, over.seconds, strict=True))


def race(calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, Laps]:
    """Times calls that are already warm, in turn; every other round runs backwards, so that no place is the best."""
    repeats = {name: _repeats(call, device) for name, call in calls.items()}
    laps = {name: Laps() for name in calls}
    for turn in range(rounds):
        names = list(calls) if turn % 2 == 0 else list(reversed(calls))
        for name in names:
            seconds, foreign = _least_disturbed(calls[name], repeats[name], device)
            laps[name].seconds.append(seconds)
            laps[name].disturbed += foreign > _QUIET
    return laps


def figures(laps: Mapping[str, Laps], tokens: int, least: float, against: str | None) -> list[dict[str, Any]]:
    """A row a contestant: `tokens` are what one call works on, `least` the seconds of its matrix products at best."""
    return [
        {
            "row": name,
            "tokens_per_second": tokens / lap.median,
            "ms": lap.median * 1e3,
            "spread": lap.spread,
            "ratio": speed_up(lap, laps[against]) if against in laps else None,
            "share_of_limit": least / lap.median,
            "disturbed": lap.disturbed,
        }
        for name, lap in laps.items()
    ]


def show(rows: list[dict[str, Any]], tokens: int, least: float, against: str | None) -> None:
    """The same as a table, with the limit under it."""
    print(f"\n| row | real tokens/s | ms | spread | x {against or 'no peer'} | of the matrix-product limit |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        shown = f"{row['tokens_per_second']:,.0f} | {row['ms']:.2f} | {row['spread']:.0%} | {ratio}"
        print(f"| {row['row']} | {shown} | {row['share_of_limit']:.0%} |")
    print(f"| limit | {tokens / least:,.0f} | {least * 1e3:.2f} | | | 100% |")
    disturbed = sum(row["disturbed"] for row in rows)
    if disturbed:
        print(f"noisy: others used the machine in {disturbed} samples; trust ratios only, or run again in quiet")
    print(flush=True)


def matrix_rate(device: torch.device) -> float:
    """Floating point operations a second of a large matrix product, the best of several; measured anew each time."""
    return measure_matmul_peak(device, use_bf16=device.type == "cuda", seconds=7 * _AT_LEAST)


def _repeats(call: Callable[[], object], device: torch.device) -> int:
    return max(1, int(_AT_LEAST / max(time_call(call, 1, device), 1e-6)))


def _least_disturbed(call: Callable[[], object], repeats: int, device: torch.device) -> tuple[float, float]:
    """Seconds a call, and how many cores others kept busy meanwhile."""
    samples = []
    for _ in range(_TRIES):
        others = Others()
        seconds = time_call(call, repeats, device)
        foreign = others.cores()
        samples.append((foreign, seconds))
        # on a GPU the work is not on these cores, and other processes' use of them says little
        if foreign <= _QUIET or device.type == "cuda":
            break
        time.sleep(0.1)
    foreign, seconds = min(samples)
    return seconds, 0.0 if device.type == "cuda" else foreign


class Others:
    """What other processes use of the machine from now on."""

    def __init__(self) -> None:
        self._busy, self._own, self._began = _busy(), _own(), time.perf_counter()

    def cores(self) -> float:
        """How many cores they kept busy."""
        wall = time.perf_counter() - self._began
        # /proc/stat counts in hundredths of a second, hence the allowance on short samples
        return max(0.0, (_busy() - self._busy - (_own() - self._own) - 0.02) / wall)


def _own() -> float:
    """CPU seconds of all contestants so far."""
    return time.process_time() + sum(apart.cores() for apart in _APART)


def _busy() -> float:
    """CPU seconds that the whole machine has worked, or lost to its host, so far; 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
