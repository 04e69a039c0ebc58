"""Recipes are validated without torch, so what their schema imports from here must not import it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["qkv.data.examples", "qkv.data.pair", "qkv.data.formats", "qkv.data.noise.config"])
def test_importing_examples_formats_and_configs_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
