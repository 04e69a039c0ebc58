"""Tokens per second of generation, ours and transformers', with random weights of real sizes and forced lengths.

    python bench/generate.py                      # all rows that fit the machine
    python bench/generate.py gpt2-b1 marian-beam4 # some rows
    python bench/generate.py --peers none         # ours only

The contestants run in turn in one process. On a GPU the limit is the time to read the decoder's weights once per step
at the measured copy bandwidth; a row states the fraction of it that is reached.
"""

from __future__ import annotations

import argparse
import json
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

import qkv
from qkv import spec
from qkv.generation import GenerationConfig, generate
from qkv.nn import Ragged


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
    "gpt2-b1": Row("gpt2", 1, 16, 32),
    "gpt2-b8": Row("gpt2", 8, 16, 32),
    "marian-greedy": Row("marian", 16, 24, 32),
    "marian-beam4": Row("marian", 16, 24, 32, 4),
    "t5-greedy": Row("t5-small", 16, 24, 32),
}


def make_peer(name: str) -> Any:
    """Return a model of transformers with random weights."""
    torch.manual_seed(0)
    if name.startswith("gpt2"):
        sizes = {} if name == "gpt2" else {"n_embd": 1600, "n_layer": 48, "n_head": 25}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    if name == "marian":
        sizes = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "vocab_size": 58101}
        heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
        widths = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "max_position_embeddings": 512}
        ids = {"pad_token_id": 58100, "decoder_start_token_id": 58100, "eos_token_id": 0, "scale_embedding": True}
        config = transformers.MarianConfig(**sizes, **heads, **widths, **ids, activation_function="swish")
        return transformers.MarianMTModel(config).eval()
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=512, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0)
    ).eval()


class Contestants:
    """The calls of one row: each generates all tokens and returns nothing."""

    def __init__(self, row: Row, device: torch.device, peers: list[str], dtype: str | None) -> None:
        self.row = row
        peer = make_peer(row.model)
        self.num_parameters = sum(p.numel() for p in peer.parameters())
        with TemporaryDirectory() as folder:
            peer.save_pretrained(folder)
            bundle = qkv.load(folder, str(device))
        self.decoder_bytes = 2 * _decoder_parameters(bundle.model)
        # no EOS: the length is forced
        bundle.model.spec = spec.replace(bundle.model.spec, eos_id=-1, suppress_tokens=())
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(10, 1000, (row.batch_size, row.input_length), generator=generator)
        config = GenerationConfig(
            num_beams=row.num_beams, max_new_tokens=row.new_tokens, unfinished_beams="ranked", dtype=dtype
        )
        source = Ragged.pack(list(ids)).to(device)
        self.calls: dict[str, Callable[[], Any]] = {"qkv": lambda: generate(bundle.model, source, config)}
        if not peers:
            return
        peer = peer.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        inputs = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
        forced = {"min_new_tokens": row.new_tokens, "max_new_tokens": row.new_tokens, "do_sample": False}
        forced |= {"num_beams": row.num_beams, "pad_token_id": 0}
        if "transformers" in peers:
            self.calls["transformers"] = lambda: peer.generate(**inputs, **forced)
        if "static" in peers and row.num_beams == 1:
            self.calls["static+compile"] = lambda: peer.generate(**inputs, **forced, cache_implementation="static")


def _decoder_parameters(model: Any) -> int:
    modules = [model.decoder, model.head]
    return sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())


def measure(row: Row, device: torch.device, peers: list[str], rounds: int, dtype: str | None) -> dict[str, Any]:
    """Return tokens per second of each contestant, in turn, and the seconds of the first call of ours."""
    contestants = Contestants(row, device, peers, dtype)
    result: dict[str, Any] = {"decoder_bytes": contestants.decoder_bytes}
    seconds: dict[str, list[float]] = {name: [] for name in contestants.calls}
    for name, call in contestants.calls.items():  # warm-up: graphs, compilation
        try:
            result[f"first_call_seconds:{name}"] = _timed(call, device)
            _timed(call, device)
        except Exception as error:
            result[f"error:{name}"] = str(error).splitlines()[0][:200]
            del seconds[name]
    for _ in range(rounds):
        for name in seconds:
            seconds[name].append(_timed(contestants.calls[name], device))
    tokens = row.batch_size * row.new_tokens
    result["tokens_per_second"] = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    return result


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(1 << 28, device=device)
    target = torch.empty_like(source)
    times = [_timed(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * 4 * source.numel() / min(times)


def main() -> None:
    """Run the rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--peers", default="transformers,static")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bf16"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = ROWS if device.type == "cuda" else CPU_ROWS
    peers = [] if arguments.peers == "none" else arguments.peers.split(",")
    if device.type == "cpu":
        peers = [peer for peer in peers if peer != "static"]
    transformers.logging.set_verbosity_error()
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else 0.0
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}, {bandwidth / 1e12:.2f} TB/s")
    results = {}
    for name in arguments.rows or rows:
        row = rows[name]
        result = results[name] = measure(row, device, peers, arguments.rounds, arguments.dtype)
        speeds = result["tokens_per_second"]
        line = "  ".join(f"{contestant} {speed:,.0f}" for contestant, speed in speeds.items())
        if "transformers" in speeds and "qkv" in speeds:
            line += f"  ratio {speeds['qkv'] / speeds['transformers']:.2f}"
        if bandwidth and "qkv" in speeds:
            steps = speeds["qkv"] / row.batch_size
            line += f"  weight-reading limit {steps * result['decoder_bytes'] / bandwidth:.0%}"
        print(f"{name:14} {line}  first call {result.get('first_call_seconds:qkv', 0):.1f} s", flush=True)
        for key, value in result.items():
            if key.startswith("error"):
                print(f"  {key}: {value}")
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
