"""The published layout of ELMo's weights: HDF5 and options.json, with bad files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import qkv
from qkv.checkpoints.model_folder import read_spec
from qkv.errors import InputError

CHARACTERS = {
    "embedding": {"dim": 3},
    "filters": [[1, 4], [3, 5]],
    "n_highway": 2,
    "n_characters": 262,
    "max_characters_per_token": 50,
    "activation": "relu",
}
LSTM = {"cell_clip": 3, "use_skip_connections": True, "n_layers": 2, "proj_clip": 3, "projection_dim": 6, "dim": 8}
CELL = "RNN_{}/RNN/MultiRNNCell/Cell{}/LSTMCell"


def write_elmo(folder: Path, options: dict[str, Any] | None = None, **datasets: np.ndarray | None) -> Path:
    """Write random weights in the published layout; `datasets` replace some of them, None leaves one out."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"char_embed": (261, 3), "CNN_proj/W_proj": (9, 6), "CNN_proj/b_proj": (6,)}
    for i, (width, count) in enumerate(CHARACTERS["filters"]):
        shapes |= {f"CNN/W_cnn_{i}": (1, width, 3, count), f"CNN/b_cnn_{i}": (count,)}
    for i in range(2):
        shapes |= {f"CNN_high_{i}/W_{name}": (9, 9) for name in ("carry", "transform")}
        shapes |= {f"CNN_high_{i}/b_{name}": (9,) for name in ("carry", "transform")}
        for layer in range(2):
            cell = CELL.format(i, layer)
            shapes |= {f"{cell}/W_0": (12, 32), f"{cell}/B": (32,), f"{cell}/W_P_0": (8, 6)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} | datasets
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "weights.hdf5", "w") as file:
        for name, array in arrays.items():
            if array is not None:
                file[name] = array
    (folder / "options.json").write_text(json.dumps(options or {"lstm": LSTM, "char_cnn": CHARACTERS}))
    return folder


def restated_forward_layer(folder: Path, inputs: np.ndarray) -> np.ndarray:
    """The first forward layer in the terms of the file: gates i, j, f, o, forget bias 1, [input; state]."""
    with h5py.File(folder / "weights.hdf5") as file:
        w, b, p = (file[f"{CELL.format(0, 0)}/{name}"][()].astype(np.float64) for name in ("W_0", "B", "W_P_0"))

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    h, c, outputs = np.zeros(6), np.zeros(8), []
    for x in inputs:
        i, j, f, o = np.split(np.concatenate([x, h]) @ w + b, 4)
        c = np.clip(sigmoid(f + 1) * c + sigmoid(i) * np.tanh(j), -3, 3)
        h = np.clip((sigmoid(o) * np.tanh(c)) @ p, -3, 3)
        outputs.append(h)
    return np.stack(outputs)


def restated_word(folder: Path, word: str) -> np.ndarray:
    """The vector of a word in the terms of the file; the gate called "carry" lets the transformed vector through."""
    characters = [258, *word.encode()[:48], 259]
    with h5py.File(folder / "weights.hdf5") as file:
        x = file["char_embed"][()].astype(np.float64)[characters + [260] * (50 - len(characters))]
        pooled = []
        for i, (width, _) in enumerate(CHARACTERS["filters"]):
            w, b = file[f"CNN/W_cnn_{i}"][0], file[f"CNN/b_cnn_{i}"][()]
            windows = np.stack([np.einsum("wc,wcf->f", x[t : t + width], w) for t in range(50 - width + 1)])
            pooled.append(np.maximum((windows + b).max(0), 0))
        y = np.concatenate(pooled)
        for i in range(2):
            high = {name: array[()] for name, array in file[f"CNN_high_{i}"].items()}
            gate = 1 / (1 + np.exp(-(y @ high["W_carry"] + high["b_carry"])))
            y = gate * np.maximum(y @ high["W_transform"] + high["b_transform"], 0) + (1 - gate) * y
        return y @ file["CNN_proj/W_proj"][()] + file["CNN_proj/b_proj"][()]


@torch.no_grad()
def test_weights_give_the_vectors_of_their_own_layout(tmp_path: Path) -> None:
    bundle = qkv.load(write_elmo(tmp_path))
    words = ["Zoë", "ran", "x" * 70]
    output = bundle([" ".join(words)], hidden_states=True)
    embeddings = qkv.embed(bundle, [" ".join(words)], pool="words", layers=0)[0]
    expected = np.stack([restated_word(tmp_path, word) for word in words])
    np.testing.assert_allclose(embeddings[:, :6], expected, atol=1e-4)
    np.testing.assert_array_equal(embeddings[:, :6], embeddings[:, 6:])
    assert output.tokens[0][:4] == ["<S>", "Ġ", "Z", "o"]
    layers = output.hidden_states[0]  # [3, tokens, 12]
    word_starts = [0, *(i for i, token in enumerate(output.tokens[0]) if token == "Ġ"), -1]
    forward = restated_forward_layer(tmp_path, layers[0][word_starts, :6].double().numpy())
    np.testing.assert_allclose(layers[1][word_starts, :6], forward, atol=1e-4)


def test_the_same_sentence_always_has_the_same_vectors(tmp_path: Path) -> None:
    bundle = qkv.load(write_elmo(tmp_path))
    first = qkv.embed(bundle, ["a b c"], pool="words")[0]
    assert torch.equal(qkv.embed(bundle, ["a b c"], pool="words")[0], first)


def test_a_read_model_is_saved_in_our_format_and_takes_a_head(tmp_path: Path) -> None:
    bundle = qkv.load(write_elmo(tmp_path / "elmo"), head="token", labels=["no", "yes"])
    qkv.save(bundle, tmp_path / "ours")
    again = qkv.load(tmp_path / "ours")
    torch.testing.assert_close(again(["a é"]).logits, bundle(["a é"]).logits)
    assert read_spec(tmp_path / "elmo").encoder == bundle.model.spec.encoder


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({f"{CELL.format(1, 0)}/W_P_0": None}, "weights.hdf5: lacks 'RNN_1/RNN/MultiRNNCell/Cell0/LSTMCell/W_P_0'"),
        (
            {f"{CELL.format(0, 1)}/B": np.zeros(24, np.float32)},
            r"Cell1/LSTMCell/B' is float32 of shape \[24\], and options.json describes floats of \[32\]",
        ),
        ({"CNN/W_cnn_1": np.zeros((1, 3, 3, 5), np.int64)}, "'CNN/W_cnn_1' is int64"),
        ({"char_embed": None}, "no HDF5 file in it has 'char_embed'"),
    ],
)
def test_a_missing_or_wrong_matrix_is_named(datasets: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        qkv.load(write_elmo(tmp_path, **datasets))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"char_cnn": CHARACTERS}, "options.json: lacks 'lstm'"),
        ({"lstm": LSTM | {"dim": "8"}, "char_cnn": CHARACTERS}, "lstm.dim cannot be '8'"),
        ({"lstm": LSTM | {"cell_clip": -1}, "char_cnn": CHARACTERS}, "lstm.cell_clip cannot be -1"),
        ({"lstm": LSTM, "char_cnn": CHARACTERS | {"filters": [[1]]}}, r"expected \[width, count\] pairs"),
        ({"lstm": LSTM, "char_cnn": CHARACTERS | {"activation": "rely"}}, "did you mean 'relu'"),
        ({"lstm": LSTM | {"n_layers": 0}, "char_cnn": CHARACTERS}, "encoder.layers cannot be 0"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        qkv.load(write_elmo(tmp_path, changes))


def test_a_damaged_file_and_a_missing_h5py_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_elmo(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"HDF5 weights need h5py; pip install 'qkv\[hdf5\]'"):
        qkv.load(tmp_path)
    monkeypatch.undo()
    (tmp_path / "weights.hdf5").write_bytes(b"no")
    with pytest.raises(InputError, match="damaged or not an HDF5 file"):
        qkv.load(tmp_path)
