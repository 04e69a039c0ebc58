"""Processes of their own that begin at once: a server imports torch and qkv a single time, and forks them.

A fork of the process of the tests would not do: autograd refuses to work in one.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "qkv.cli.entry",
        "qkv.cli.train",
        "qkv.train.distributed.sharded_checkpoint",
        "qkv.train.workloads.finetuning",
        "qkv.train.workloads.pretraining",
        "qkv.train.workloads.seq2seq",
        "torch.distributed.fsdp",
    ]
)


def start(*arguments: str, program: str = "qkv.cli", output: Path | None = None, **variables: str) -> BaseProcess:
    """Run a module or a file with its arguments; what it prints goes to a file, or nowhere."""
    process = _CONTEXT.Process(target=_run, args=(program, arguments, str(output or os.devnull), variables))
    process.start()
    return process


def start_two(*arguments: str, program: str = "qkv.cli", output: Path | None = None) -> list[BaseProcess]:
    """Run it in two processes that find each other, as torchrun's do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(*arguments, program=program, output=output, RANK=rank, LOCAL_RANK=rank, **shared) for rank in ("0", "1")
    ]


def _run(program: str, arguments: tuple[str, ...], output: str, variables: dict[str, str]) -> None:
    os.environ |= variables
    torch.set_num_threads(1)  # as many as the tests have: two add up in another order
    sys.argv = [program, *arguments]
    with _printing_to(output):
        if Path(program).is_file():
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")


@contextmanager
def _printing_to(path: str) -> Iterator[None]:
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield
