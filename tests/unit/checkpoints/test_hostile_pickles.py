"""Old `.bin` files: whatever they hold, the answer is the model or one line, without code and without much memory."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from safetensors.torch import load_file
from torch import Tensor

import qkv

NAME = "bert.encoder.layer.0.output.dense.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint without weights."""
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "kept")
    return tmp_path


def tensors(folder: Path) -> dict[Any, Any]:
    return dict(load_file(folder / "kept"))


def refusal(folder: Path) -> str:
    with pytest.raises(qkv.InputError) as error:
        qkv.load(folder)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


UNUSUAL = {
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: t.to_sparse_csr(),
    "without data": lambda t: t.to("meta"),
    "a billion rows of one number": lambda _: torch.zeros(1).expand(10**9, 16),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "complex": lambda t: t.to(torch.complex64),
    "truth values": lambda t: t > 0,
    "a single number": lambda _: torch.tensor(1.0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_tensor_that_is_not_plain_is_refused_by_name(folder: Path, kind: str, old: bool) -> None:
    state = tensors(folder)
    state[NAME] = UNUSUAL[kind](state[NAME])
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    assert any(part in refusal(folder) for part in (NAME, "encoder.blocks.0.feedforward.down.weight", "damaged"))


@pytest.mark.parametrize("key", [3, None, ("a",), 1.5])
def test_a_key_that_is_no_text_is_refused(folder: Path, key: Any) -> None:
    torch.save(tensors(folder) | {key: torch.zeros(1)}, folder / "pytorch_model.bin")
    assert "is no name of a tensor" in refusal(folder)


def test_tensors_that_share_one_storage_many_times_are_refused(folder: Path) -> None:
    shared = torch.zeros(1000)
    torch.save(tensors(folder) | {f"x{i}": shared for i in range(1000)}, folder / "pytorch_model.bin")
    assert "larger than the file" in refusal(folder)


def test_a_deflate_bomb_is_refused_before_it_is_unpacked(folder: Path) -> None:
    buffer = io.BytesIO()
    torch.save(tensors(folder), buffer)
    source = zipfile.ZipFile(buffer)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in source.namelist():
            bomb.writestr(name, bytes(1 << 24) if name.endswith("data/0") else source.read(name))
    assert "unpacks to" in refusal(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("old", [False, True])
def test_a_cut_or_changed_pickle_is_one_line(folder: Path, old: bool) -> None:
    buffer, rng = io.BytesIO(), random.Random(7)
    torch.save(tensors(folder), buffer, _use_new_zipfile_serialization=not old)
    for _ in range(40):
        content = bytearray(buffer.getvalue())
        position = rng.randrange(min(len(content), 6000))
        if rng.random() < 0.3:
            del content[position:]
        else:
            content[position : position + rng.randrange(4)] = rng.randbytes(rng.randrange(1, 5))
        (folder / "pytorch_model.bin").write_bytes(content)
        try:
            qkv.load(folder)
        except qkv.InputError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_a_plain_file_loads_with_parameters_and_half_precision(folder: Path) -> None:
    state: dict[str, Tensor] = tensors(folder)
    state[NAME] = torch.nn.Parameter(state[NAME].half())
    torch.save(state, folder / "pytorch_model.bin")
    assert qkv.load(folder).missing_keys == ()
