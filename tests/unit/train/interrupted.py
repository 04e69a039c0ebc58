"""Interrupt a run with several processes, each of which runs this file.

    interrupted.py RECIPE FOLDER

One process gets SIGTERM after step 3. Each process writes the step at which it stopped to FOLDER-RANK.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from qkv.recipe import read_recipe
from qkv.train.fit import fit
from qkv.train.interruption import TrainingInterrupted

if __name__ == "__main__":
    recipe, folder, rank = sys.argv[1], sys.argv[2], os.environ["RANK"]
    run = fit(read_recipe(recipe), folder, device="cpu")
    try:
        for record in run:
            if record.kind == "train" and record.step == 3 and rank == "1":
                signal.raise_signal(signal.SIGTERM)
    except TrainingInterrupted as interruption:
        Path(f"{folder}-{rank}").write_text(str(interruption))
