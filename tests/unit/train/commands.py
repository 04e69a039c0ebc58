"""Run several qkv commands in all processes of one launch; torchrun starts this file.

    python -m torch.distributed.run --standalone --nproc-per-node 2 commands.py FILE

FILE holds a JSON list of ports and arguments. One launch saves the time of starting Python with torch several times.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from qkv.cli import main


def all_of_them(commands: list[tuple[int, list[str]]]) -> None:
    for port, words in commands:
        # each command has its own rendezvous: in torchrun's they would find the keys of the previous one
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
        sys.argv = ["qkv", *words]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    all_of_them(json.loads(Path(sys.argv[1]).read_text()))
