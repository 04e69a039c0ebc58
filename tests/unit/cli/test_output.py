"""Output that cannot be written, Ctrl-C while modules are imported, and shell completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

QKV = [sys.executable, "-m", "qkv.cli"]
needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")


@needs_full_device
@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["recipes", "schema"], ["list", "objectives"]])
def test_full_output_is_one_line_and_exit_code_2(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*QKV, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    message = "qkv: the output cannot be written: No space left on device; free some space, or write it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, message)


@needs_full_device
def test_a_message_that_cannot_be_written_keeps_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*QKV, "no-such-command"], stdout=subprocess.PIPE, stderr=full, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("module", ["qkv.errors", "typer", "torch"])
def test_ctrl_c_while_a_module_is_imported_ends_with_one_line(module: str) -> None:
    program = (
        "import os, signal, sys; from qkv.cli import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have told tests to ignore it
        "sys.meta_path.insert(0, Interrupt())\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 130
    assert done.stderr.startswith("qkv: interrupted")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "completion"),
    [
        ("qkv tra", "train"),
        ("qkv train --epo", "--epochs"),
        ("qkv train --task regr", "regression"),
        ("qkv recipes show g2p-d", "g2p-demo"),
        ("qkv list score", "score-functions"),
    ],
)
def test_the_shell_completes_without_importing_torch(words: str, completion: str) -> None:
    program = (
        "import sys; from qkv.cli import main\n"
        "try: main()\n"
        "finally: print('TORCH' if 'torch' in sys.modules else 'LIGHT', file=sys.stderr)"
    )
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_QKV_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [completion]
    assert done.stderr.strip() == "LIGHT"
