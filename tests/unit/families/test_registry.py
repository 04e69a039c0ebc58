"""Families are looked up without torch and one at a time, and can be added from outside the package."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qkv import InputError, families
from qkv.families import bert


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_family_imports_torch() -> None:
    run(
        "import sys; from qkv import families\n"
        "for name in families.names(): families.get_family(name)\n"
        "import qkv.families.hf.rules, qkv.families.hf.format, qkv.families.heads\n"
        "assert 'torch' not in sys.modules"
    )


def test_looking_up_a_family_imports_no_other() -> None:
    run(
        "import sys; from qkv import families\n"
        "families.by_model_type('bert', 'here'); families.get_family('bert')\n"
        "loaded = {name for name in families.names() if f'qkv.families.{name}' in sys.modules}\n"
        "assert loaded == {'bert'}, loaded"
    )


def test_loading_a_checkpoint_imports_its_family_only() -> None:
    run(
        "import sys, tempfile; sys.path.append('tests/unit/checkpoints')\n"
        "from pathlib import Path; from checkpoints import checkpoint; from qkv import families, load\n"
        "load(checkpoint(Path(tempfile.mkdtemp()) / 'bert'))\n"
        "loaded = {name for name in families.names() if f'qkv.families.{name}' in sys.modules}\n"
        "assert loaded == {'bert'}, loaded"
    )


def test_the_table_of_model_types_is_that_of_the_families() -> None:
    modules = {name: families.get_family(name) for name in families.names()}
    table = {module.HF_FORMAT.model_type: name for name, module in modules.items() if hasattr(module, "HF_FORMAT")}
    assert {model_type: families.by_model_type(model_type, "here") for model_type in table} == {
        model_type: modules[name] for model_type, name in table.items()
    }


def test_an_unknown_model_type_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"here: .*model_type 'brt'; did you mean 'bert'"):
        families.by_model_type("brt", "here")


def test_a_registered_family_is_found_by_name_and_by_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families.FAMILIES, "_entries", dict(families.FAMILIES._entries))
    hf_format = replace(bert.HF_FORMAT, model_type="toy-bert")
    toy = SimpleNamespace(
        PAPER="none", Config=bert.Config, PRESETS=bert.PRESETS, make_spec=bert.make_spec, HF_FORMAT=hf_format
    )
    families.FAMILIES.register("toy", toy)  # type: ignore[arg-type]
    assert families.get_family("toy") is toy
    assert families.by_model_type("toy-bert", "here") is toy
    assert "toy" in families.names()
    assert families.head_names(toy)[0] == "masked_lm"  # type: ignore[arg-type]
    with pytest.raises(InputError, match="already registered"):
        families.FAMILIES.register("bert", toy)  # type: ignore[arg-type]
