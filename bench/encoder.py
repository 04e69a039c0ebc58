"""Forward pass of a BERT-base without head and gradients: qkv and other engines with the same weights, in one run.

    python bench/encoder.py                             # on a GPU if there is one, else on the CPU
    python bench/encoder.py --device cpu --compile      # also transformers with torch.compile (a minute or two more)
    python bench/encoder.py --rounds 9 --seed 2 --json encoder.json
    python bench/encoder.py --only qkv,CTranslate2      # only transformers and rows whose name contains one of these

There are two batches: `variable`, 32 sentences with lognormal lengths of about 20 tokens, and `full`, 8 of 128 tokens
each. On a GPU both have 32 factor as many sentences, because 32 would measure kernel launches only. Computation is in
bfloat16 autocast on a GPU and in float32 on a CPU. Seed 1 gives the lengths that shared/peers used.

Weights are random, in the real size: transformers creates them once, and every row loads them from that folder. The
output of each row is compared with that of transformers at every real token before timing; a row that differs is
excluded. Peers get padded tensors and a mask that are prepared beforehand. CTranslate2 takes lists of ids, packs them
itself and also computes the pooler, one matrix-vector product per sentence. qkv gets the packed ids; its layout and
bucket plan are built in every call. On a CPU each row runs in its own process, because the threads of engines in one
process disturb each other (`paired_benchmark.SubprocessCall`).

The limit is the time of the real tokens' matrix products at the rate of one large product, measured in the same run.
Peers are installed with `pip install qkv[bench] onnx onnxscript onnxruntime ctranslate2`; missing ones are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run from a checkout

from bench.paired_benchmark import SubprocessCall, matmul_rate, print_table, serve, speedup, summarize, time_interleaved

VOCAB_SIZE, FIRST_TOKEN = 30522, 1000  # ids below are special or unused
TRANSFORMERS, COMPILED, CTRANSLATE, OURS = "transformers", "transformers, compiled", "CTranslate2", "qkv"
MEAN, STD = 25.0, 0.6  # of lengths before rounding and clipping; seed 1 then gives 19.4 per sentence
GOALS = {"variable": {TRANSFORMERS: 2.8, CTRANSLATE: 1.0}, "full": {TRANSFORMERS: 1.0}}
_TOLERANCE = {"cpu": 1e-4, "cuda": 3e-2}  # ‖row − transformers‖ / ‖transformers‖; bfloat16 rounds at 4e-3


@dataclass
class Batch:
    """Sentences as lists of ids and as a padded tensor."""

    name: str
    lengths: list[int]
    seed: int
    device: torch.device

    @cached_property
    def token_ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(FIRST_TOKEN, VOCAB_SIZE, (self.num_tokens,), generator=generator).to(self.device)  # [T]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def mask(self) -> Tensor:
        """Return 1 for real tokens, 0 for padding.  # [B, N]"""
        return (torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]).long().to(self.device)

    @cached_property
    def padded(self) -> Tensor:
        ids = torch.zeros(self.mask.shape, dtype=torch.long, device=self.device)
        ids[self.mask.bool()] = self.token_ids
        return ids  # [B, N]

    def matmul_flops(self, config: dict[str, Any]) -> float:
        """Return the FLOPs of the real tokens' matrix products: two per weight and token, and attention."""
        width, hidden = config["hidden_size"], config["intermediate_size"]
        dense = self.num_tokens * (4 * width**2 + 2 * width * hidden)
        return 2.0 * config["num_hidden_layers"] * (dense + 2 * width * sum(n * n for n in self.lengths))


def draw(options: argparse.Namespace) -> list[Batch]:
    factor = 32 if options.device.type == "cuda" else 1
    generator = torch.Generator().manual_seed(options.seed)
    noise = torch.randn(32 * factor, generator=generator)
    log_mean = math.log(MEAN) - STD**2 / 2
    variable = torch.exp(noise * STD + log_mean).round().clamp(4, 128).int().tolist()
    lengths = {"variable": variable, "full": [128] * 8 * factor}
    return [Batch(name, lengths[name], options.seed, options.device) for name in options.batch.split(",")]


# ---- the shared model ----------------------------------------------------------------------------------------------


def quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def make_folder(folder: Path, layers: int = 12) -> None:
    """Write a BERT-base with random weights as transformers does, and a vocabulary, which CTranslate2 needs."""
    transformers = quiet_transformers()
    torch.manual_seed(0)
    config = transformers.BertConfig(num_hidden_layers=layers)
    config.position_embedding_type = "absolute"  # read by the converter, but not written by transformers 5
    transformers.BertModel(config).save_pretrained(folder)
    special = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{i}" for i in range(VOCAB_SIZE - len(special)))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)


@dataclass
class Setup:
    """The options and the two models that rows are made from."""

    folder: Path
    options: argparse.Namespace

    @cached_property
    def theirs(self) -> Any:
        # without the pooler, which is not compared
        model = quiet_transformers().BertModel.from_pretrained(
            self.folder, attn_implementation="sdpa", add_pooling_layer=False
        )
        return model.to(self.options.device).eval()

    @cached_property
    def ours(self) -> nn.Module:
        from qkv import checkpoints

        bundle = checkpoints.load(self.folder, self.options.device, head="backbone")
        assert not bundle.missing_keys
        return bundle.model

    @contextlib.contextmanager
    def inference_context(self) -> Iterator[None]:
        kind = self.options.device.type
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            yield


@dataclass
class Contestant:
    """One row: `call` is timed, `read` returns the vectors of the real tokens, `close` frees resources."""

    call: Callable[[], Any]
    read: Callable[[Any], Tensor]  # [T, width]
    close: Callable[[], None] = lambda: None


# ---- rows -----------------------------------------------------------------------------------------------------------


def transformers_row(setup: Setup, batch: Batch, compiled: bool = False) -> Contestant:
    # the default: a second shape triggers compilation with dynamic shapes
    run = torch.compile(setup.theirs) if compiled else setup.theirs
    ids, mask = batch.padded, batch.mask

    def call() -> Tensor:
        with setup.inference_context():
            hidden: Tensor = run(input_ids=ids, attention_mask=mask).last_hidden_state
            return hidden

    return Contestant(call, lambda hidden: hidden[mask.bool()])


def our_row(setup: Setup, batch: Batch, compiled: bool = False) -> Contestant:
    from qkv.nn import Ragged

    run = torch.compile(setup.ours) if compiled else setup.ours

    def call() -> Tensor:
        with setup.inference_context():
            hidden: Tensor = run(Ragged.from_lengths(batch.token_ids, batch.lengths))
            return hidden

    return Contestant(call, lambda hidden: hidden)


def onnx_row(setup: Setup, batch: Batch, fused: bool = False) -> Contestant:
    import onnxruntime

    path = _export(setup)
    if fused:
        path = _fuse(setup, path)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = setup.options.threads
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    feed = dict(zip(names, (batch.padded.numpy(), batch.mask.numpy()), strict=True))
    return Contestant(lambda: session.run(None, feed), lambda out: torch.from_numpy(out[0])[batch.mask.bool()])


def _export(setup: Setup) -> Path:
    path = setup.folder / "bert.onnx"
    if path.exists():
        return path
    theirs = setup.theirs

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = theirs

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            hidden: Tensor = self.inner(input_ids=ids, attention_mask=mask).last_hidden_state
            return hidden

    example = Batch("small", [16, 9], 0, torch.device("cpu"))
    dynamic_shape = {0: torch.export.Dim("b", min=1, max=512), 1: torch.export.Dim("n", min=2, max=512)}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it logs every library that it could have exported
    with contextlib.redirect_stdout(None), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        names, shapes = ["ids", "mask"], (dynamic_shape, dynamic_shape)
        torch.onnx.export(
            Wrapper(),
            (example.padded, example.mask),
            str(path),
            input_names=names,
            dynamo=True,
            dynamic_shapes=shapes,
            verbose=False,
        )
    return path


def _fuse(setup: Setup, path: Path) -> Path:
    """Apply onnxruntime's optimizer, which fuses attention, residual with norm, and GELU where it finds them."""
    from onnxruntime.transformers import optimizer

    out = path.with_suffix(".fused.onnx")
    if not out.exists():
        size = {"num_heads": setup.theirs.config.num_attention_heads, "hidden_size": setup.theirs.config.hidden_size}
        optimized = optimizer.optimize_model(str(path), "bert", opt_level=1, **size)
        print("    fused:", {k: n for k, n in optimized.get_fused_operator_statistics().items() if n} or "nothing")
        optimized.save_model_to_file(str(out), use_external_data_format=False)
    return out


def ctranslate_row(setup: Setup, batch: Batch) -> Contestant:
    import ctranslate2
    import numpy

    folder = setup.folder / "ctranslate2"
    if not folder.exists():
        ctranslate2.converters.TransformersConverter(str(setup.folder)).convert(str(folder))
    encoder = ctranslate2.Encoder(
        str(folder), device="cpu", inter_threads=1, intra_threads=setup.options.threads, compute_type="float32"
    )
    sentences = [ids.tolist() for ids in batch.token_ids.split(batch.lengths)]

    def read(out: Any) -> Tensor:
        return torch.from_numpy(numpy.array(out.last_hidden_state))[batch.mask.bool()]

    return Contestant(lambda: encoder.forward_batch(sentences), read)


def in_subprocess(name: str) -> Callable[[Setup, Batch], Contestant]:
    """Return the maker of a row that runs in its own process and writes its vectors to a file."""

    def make(setup: Setup, batch: Batch) -> Contestant:
        arguments = {"serve": name, "batch": batch.name, "folder": setup.folder, "seed": batch.seed, "device": "cpu"}
        arguments["threads"] = setup.options.threads
        flags = [flag for key, value in arguments.items() for flag in (f"--{key}", str(value))]
        call = SubprocessCall([__file__, *flags])
        return Contestant(call, lambda _: torch.load(_vectors_path(setup.folder, name)), call.close)

    return make


def _vectors_path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(', ', '-')}.pt"


def serve_row(setup: Setup, name: str) -> None:
    """Run the process of a row of `in_subprocess`."""
    if TRANSFORMERS not in name and OURS not in name:
        torch.set_num_threads(1)  # its idle threads would compete with those of the engine

    def make() -> Callable[[], Any]:
        contestant = rows(setup.options)[name](setup, draw(setup.options)[0])
        torch.save(contestant.read(contestant.call()).clone(), _vectors_path(setup.folder, name))
        return contestant.call

    serve(make)


def rows(options: argparse.Namespace) -> dict[str, Callable[[Setup, Batch], Contestant]]:
    makers: dict[str, Callable[[Setup, Batch], Contestant]] = {TRANSFORMERS: transformers_row}
    if options.compile:
        makers[COMPILED] = lambda setup, batch: transformers_row(setup, batch, compiled=True)
    if options.device.type == "cpu":
        makers["onnxruntime"] = onnx_row
        makers["onnxruntime, fused"] = lambda setup, batch: onnx_row(setup, batch, fused=True)
        makers[CTRANSLATE] = ctranslate_row
    makers[OURS] = our_row
    if options.device.type == "cuda":
        makers["qkv, compiled"] = lambda setup, batch: our_row(setup, batch, compiled=True)
    patterns = [pattern for pattern in options.only.split(",") if pattern]
    return {n: make for n, make in makers.items() if n == TRANSFORMERS or not patterns or any(p in n for p in patterns)}


def enter(name: str, make: Callable[[], Contestant], reference: Tensor | None, tolerance: float) -> Contestant | None:
    """Build a row, compare it with `reference` and warm it up; a row that fails is reported and skipped."""
    start = time.perf_counter()
    try:
        contestant = make()
        vectors = contestant.read(contestant.call()).float()
        difference = 0.0 if reference is None else float((vectors - reference).norm() / reference.norm())
        if not difference <= tolerance:
            raise RuntimeError(
                f"its output differs from transformers' by {difference:.1e} of it (at most {tolerance:.0e})"
            )
        contestant.call()
    except ModuleNotFoundError as error:
        print(f"  {name}: not installed: {error.name}", flush=True)
    except Exception as error:  # the failure of one row must not lose the results of the others
        print(f"  {name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
    else:
        print(f"  {name}: difference {difference:.1e}, ready in {time.perf_counter() - start:.1f} s", flush=True)
        return contestant
    return None


# ---- the run --------------------------------------------------------------------------------------------------------


def run(batch: Batch, setup: Setup) -> dict[str, Any]:
    """Time one batch; print the results and return them."""
    options = setup.options
    num_positions = batch.padded.numel()
    sizes = f"{len(batch.lengths)} sentences, {batch.num_tokens} real tokens in {num_positions} padded positions"
    print(f"\n{batch.name}: {sizes}")
    contestants, reference = {}, None
    for name, make in rows(options).items():
        make = in_subprocess(name) if options.device.type == "cpu" else make
        contestant = enter(name, partial(make, setup, batch), reference, _TOLERANCE[options.device.type])
        if contestant is not None:
            contestants[name] = contestant
            reference = contestant.read(contestant.call()).float() if reference is None else reference
    before = matmul_rate(options.device)
    timings = time_interleaved(
        {name: contestant.call for name, contestant in contestants.items()}, options.rounds, options.device
    )
    rate = max(before, matmul_rate(options.device))
    for contestant in contestants.values():
        contestant.close()
    flops = batch.matmul_flops(json.loads((setup.folder / "config.json").read_text()))
    print(f"\nmatrix products: {rate / 1e9:,.0f} GFLOP/s; a call needs {flops / 1e9:,.1f} GFLOP")
    table = summarize(timings, batch.num_tokens, flops / rate, TRANSFORMERS)
    print_table(table, batch.num_tokens, flops / rate, TRANSFORMERS)
    goals = GOALS[batch.name] if options.device.type == "cpu" else {}
    for peer in [n for n in timings if not n.startswith(OURS)] if OURS in timings else []:
        goal = f" (goal {goals[peer]})" if peer in goals else ""
        print(f"{batch.name}: ours / {peer} = {speedup(timings[OURS], timings[peer]):.2f}{goal}")
    return {"batch": batch.name, "lengths": batch.lengths, "matrix_rate": rate, "operations": flops, "rows": table}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="variable,full", help="comma-separated list of batches")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1, help="seed of the lengths and the tokens")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="add a compiled row on a CPU")
    parser.add_argument("--layers", type=int, default=12, help="number of layers; fewer to try this script")
    parser.add_argument("--only", default="", help="comma-separated list: only rows whose name contains one of these")
    parser.add_argument("--folder", default="", help="folder that keeps the models for later runs")
    parser.add_argument("--json", default="", help="write all results to this file")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)  # the row that this process runs
    options = parser.parse_args()
    options.device = torch.device(options.device)
    options.compile = options.compile or options.device.type == "cuda" or options.serve == COMPILED
    return options


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    if options.serve:
        serve_row(Setup(Path(options.folder), options), options.serve)
        return
    device = options.device
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"torch {torch.__version__}, {device_name}, seed {options.seed}, {options.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_folder(folder, options.layers)
        setup = Setup(folder, options)
        results = [run(batch, setup) for batch in draw(options)]
    if options.json:
        Path(options.json).write_text(
            json.dumps({"torch": torch.__version__, "device": device_name, "runs": results}, indent=1)
        )


if __name__ == "__main__":
    main()
