"""Tokens per second of generation, ours beside the peers', with random weights of real sizes and forced lengths.

    python bench/generate.py                      # all rows that fit the machine
    python bench/generate.py gpt2-b1 marian-beam4 # some rows
    python bench/generate.py --peers none         # ours only

Peers: transformers (on a GPU also with a static cache and compilation); on a CPU CTranslate2 in float32 and int8. The
contestants run in turn, CTranslate2 in a process of its own. A sample is taken while others use little of the machine,
as far as possible, and the median of the least disturbed half counts. The ratio is to the fastest peer of the same
precision. The limit is the time to read the weights of the decoder once per step at the measured bandwidth, or on a CPU
in float32 the time of its products at the measured speed of a large one, if that is longer.

onnxruntime has no row yet: it needs an exporter of models with a cache, such as optimum.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from generation_peers import Call, ctranslate2_call, make_peer, transformers_call

import qkv
from qkv import spec
from qkv.generation import GenerationConfig, generate
from qkv.nn import Ragged

PRECISIONS = ("float32", "int8")  # of a CPU; a GPU has one, bf16 unless --dtype is given


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    batch_size: int
    input_length: int
    new_tokens: int
    num_beams: int = 1


ROWS = {
    "gpt2-b1": Row("gpt2", 1, 16, 128),
    "gpt2-b8": Row("gpt2", 8, 16, 128),
    "gpt2-b64": Row("gpt2", 64, 16, 128),
    "gpt2-xl-b1": Row("gpt2-xl", 1, 16, 128),
    "marian-greedy": Row("marian", 64, 24, 64),
    "marian-beam4": Row("marian", 64, 24, 64, 4),
    "t5-greedy": Row("t5-small", 64, 24, 64),
}
CPU_ROWS = {
    "gpt2-b1": Row("gpt2", 1, 16, 64),
    "gpt2-b8": Row("gpt2", 8, 16, 32),
    "marian-greedy": Row("marian", 16, 24, 32),
    "marian-beam4": Row("marian", 16, 24, 32, 4),
    "t5-greedy": Row("t5-small", 16, 24, 32),
}


class Contestants:
    """The calls of one row by name; a name ends with its precision if the row has several."""

    def __init__(self, row: Row, device: torch.device, peers: list[str], dtype: str | None, folder: Path) -> None:
        self.row = row
        peer = make_peer(row.model)
        peer.save_pretrained(folder / "transformers")
        self.model = qkv.load(folder / "transformers", str(device)).model
        self.num_parameters = _decoder_parameters(self.model)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(10, 1000, (row.batch_size, row.input_length), generator=generator)
        self.source = Ragged.pack(list(self.ids)).to(device)
        precisions = PRECISIONS if device.type == "cpu" and dtype is None else (dtype,)
        self._avoid_eos(dtype)
        self.calls: dict[str, Call] = {}
        for precision in precisions:
            suffix = f" {precision}" if device.type == "cpu" else ""
            self.calls[f"qkv{suffix}"] = self._our_call(precision)
            if "transformers" in peers and precision != "int8":
                self._add_transformers(peer, device, suffix, peers)
            if "ctranslate2" in peers and device.type == "cpu":
                arguments = self.ids, row.new_tokens, row.num_beams, precision or "float32"
                self.calls[f"ctranslate2{suffix}"] = ctranslate2_call(row.model, folder, *arguments)

    def _add_transformers(self, peer: Any, device: torch.device, suffix: str, peers: list[str]) -> None:
        peer = peer.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        arguments = peer, self.ids.to(device), self.row.new_tokens, self.row.num_beams
        self.calls[f"transformers{suffix}"] = transformers_call(*arguments)
        if "static" in peers and self.row.num_beams == 1 and device.type == "cuda":
            self.calls["static+compile"] = transformers_call(*arguments, cache_implementation="static")

    def _our_call(self, dtype: str | None) -> Call:
        row = self.row
        config = GenerationConfig(
            num_beams=row.num_beams, max_new_tokens=row.new_tokens, unfinished_beams="ranked", dtype=dtype
        )
        return lambda: [len(outputs[0].tokens) for outputs in generate(self.model, self.source, config)]

    def _avoid_eos(self, dtype: str | None) -> None:
        """Choose an EOS token that the model does not generate, which forces the length without a rule."""
        vocab_size = self.model.spec.head.num_outputs
        for eos_id in range(vocab_size - 2, 0, -1):
            self.model.spec = spec.replace(self.model.spec, eos_id=eos_id)
            if set(self._our_call(dtype)()) == {self.row.new_tokens}:
                return


def _decoder_parameters(model: Any) -> int:
    modules = [model.decoder, model.head]
    return sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())


def measure(row: Row, device: torch.device, peers: list[str], rounds: int, dtype: str | None) -> dict[str, Any]:
    """Return tokens per second of each contestant and the seconds of its first call."""
    with TemporaryDirectory() as folder:
        contestants = Contestants(row, device, peers, dtype, Path(folder))
        result: dict[str, Any] = {"decoder_parameters": contestants.num_parameters, "first_call_seconds": {}}
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants.calls}
        for name, call in contestants.calls.items():  # warm-up: graphs, compilation, packed weights
            try:
                result["first_call_seconds"][name] = _timed(call, device)
                lengths = set(call())
                assert lengths == {row.new_tokens}, f"{lengths} tokens instead of {row.new_tokens}"
            except Exception as error:
                result[f"error:{name}"] = str(error).splitlines()[0][:200]
                del samples[name]
        for _ in range(rounds):
            for name in samples:
                samples[name].append(_least_disturbed_sample(contestants.calls[name], device))
    for process in multiprocessing.active_children():
        process.terminate()
    tokens = row.batch_size * row.new_tokens
    result["tokens_per_second"] = {name: tokens / _seconds(pairs) for name, pairs in samples.items()}
    result["load_of_others"] = statistics.mean(load for pairs in samples.values() for _, load in pairs)
    return result


def _seconds(samples: list[tuple[float, float]]) -> float:
    """Return the median of the half of the samples during which others used the machine least."""
    quiet = sorted(samples, key=lambda sample: sample[1])[: (len(samples) + 1) // 2]
    return statistics.median(seconds for seconds, _ in quiet)


def _least_disturbed_sample(call: Call, device: torch.device, attempts: int = 3) -> tuple[float, float]:
    """Return the seconds of a call, and the cores that others used meanwhile; repeat a disturbed call."""
    samples = []
    for _ in range(attempts):
        busy, own, start = _busy_seconds(), _own_seconds(), time.perf_counter()
        seconds = _timed(call, device)
        others = (_busy_seconds() - busy - (_own_seconds() - own)) / (time.perf_counter() - start)
        samples.append((seconds, max(0.0, others)))
        if others < 0.1 or device.type == "cuda":
            break
    return min(samples, key=lambda sample: sample[1])


def _busy_seconds() -> float:
    """Return the processor seconds of the whole machine so far, time lost to its host included."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _io, irq, soft_irq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the processor seconds of this process and of those that it started."""
    seconds = time.process_time()
    for process in multiprocessing.active_children():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a copy on a GPU, and of a product of a matrix and a vector on a CPU."""
    if device.type == "cuda":
        source = torch.empty(1 << 28, device=device)
        target = torch.empty_like(source)
        return 2 * 4 * source.numel() / min(_timed(lambda: target.copy_(source), device) for _ in range(10))
    matrix, vector = torch.ones(1 << 15, 1 << 12), torch.ones(1 << 12)
    return 4 * matrix.numel() / min(_timed(lambda: torch.mv(matrix, vector), device) for _ in range(10))


def product_speed(device: torch.device) -> float:
    """Return the float32 operations per second of a large matrix product on a CPU."""
    if device.type == "cuda":
        return float("inf")
    matrix = torch.ones(2048, 2048)
    return 2 * 2048**3 / min(_timed(lambda: matrix @ matrix, device) for _ in range(5))


def limit(row: Row, precision: str, num_parameters: int, bandwidth: float, speed: float) -> float:
    """Return the tokens per second that the machine allows."""
    num_bytes = {"float32": 4, "int8": 1}.get(precision, 2)
    seconds = num_bytes * num_parameters / bandwidth
    if precision == "float32":
        seconds = max(seconds, 2 * num_parameters * row.batch_size * row.num_beams / speed)
    return row.batch_size / seconds


def report(name: str, row: Row, result: dict[str, Any], bandwidth: float, speed: float) -> None:
    """Print the lines of a row, one per precision."""
    speeds = result["tokens_per_second"]
    for ours in [contestant for contestant in speeds if contestant.startswith("qkv")]:
        precision = ours.removeprefix("qkv").strip()
        peers = {p: s for p, s in speeds.items() if not p.startswith("qkv") and (not precision or precision in p)}
        line = "  ".join(f"{p.split()[0]} {s:,.1f}" for p, s in {ours: speeds[ours], **peers}.items())
        if peers:
            line += f"  ratio to the best {speeds[ours] / max(peers.values()):.2f}"
        share = speeds[ours] / limit(row, precision, result["decoder_parameters"], bandwidth, speed)
        first = result["first_call_seconds"][ours]
        others = result["load_of_others"]
        print(f"{name:14} {precision:8} {line}  limit {share:.0%}  first call {first:.1f} s  others {others:.2f} cores")
    for key, value in result.items():
        if key.startswith("error"):
            print(f"  {key}: {value}")
    sys.stdout.flush()


def main() -> None:
    """Run the rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--peers", default="transformers,static,ctranslate2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bf16", "int8"])
    parser.add_argument("--threads", type=int, help="of a CPU; by default all cores")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = ROWS if device.type == "cuda" else CPU_ROWS
    peers = [] if arguments.peers == "none" else arguments.peers.split(",")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    bandwidth, speed = read_bandwidth(device), product_speed(device)
    print(
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, reads {bandwidth / 1e9:,.0f} GB/s, float32 products {speed / 1e9:,.0f} GFLOP/s"
    )
    results = {}
    for name in arguments.rows or rows:
        results[name] = measure(rows[name], device, peers, arguments.rounds, arguments.dtype)
        report(name, rows[name], results[name], bandwidth, speed)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
