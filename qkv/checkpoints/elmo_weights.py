"""The published weights of ELMo: options.json and one HDF5 file (bilm-tf), read without executing code.

The LSTM packs its matrices as [input; state], with the gates input, candidate, forget, output; its forget gates add 1
to their bias. Row i of the characters is byte i, then the beginning and end of a sentence, the beginning and end of a
word, and padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from qkv import spec
from qkv.errors import InputError, describe_value, did_you_mean
from qkv.families import get_family
from qkv.files import read_json
from qkv.spec.characters import NUM_CHARACTERS, NUM_LETTERS
from qkv.spec.check import check_model
from qkv.tokenization.spelled_words import build_letters
from qkv.tokenization.template import special_tokens_around_vocab
from qkv.tokenization.tokenizer import Tokenizer

OPTIONS_FILE = "options.json"
_HDF5_SUFFIXES = (".hdf5", ".h5")
_MISSING = object()


def is_elmo(folder: Path) -> bool:
    """Return whether a folder has the options of a published ELMo."""
    return (folder / OPTIONS_FILE).is_file() and bool(_hdf5_files(folder))


def _hdf5_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _HDF5_SUFFIXES)


def make_tokenizer() -> Tokenizer:
    """Return the tokenizer of a published model: words end at white space, and all of them are spelled."""
    return Tokenizer(*build_letters(get_family("elmo").TOKENIZER_TEMPLATE))


def read_elmo_spec(folder: Path) -> spec.Model:
    """Return the spec of the model that an options.json describes, without a head."""
    path = folder / OPTIONS_FILE
    options = read_json(path)
    if not isinstance(options, dict):
        raise InputError(f"{path}: holds no JSON object; restore it from where the weights came from")
    lstm, characters = (_section(options, name, path) for name in ("lstm", "char_cnn"))
    filters = _get(characters, "filters", list, path, "char_cnn")
    if not filters or not all(isinstance(pair, list) and [type(n) for n in pair] == [int, int] for pair in filters):
        raise InputError(f"{path}: char_cnn.filters cannot be {describe_value(filters)}; expected [width, count] pairs")
    activation = _get(characters, "activation", str, path, "char_cnn")
    if activation not in get_args(spec.Activation):
        hint = did_you_mean(activation[:60], get_args(spec.Activation))
        raise InputError(f"{path}: char_cnn.activation cannot be {describe_value(activation)}; {hint}")
    embedding, elmo = _section(characters, "embedding", path), get_family("elmo")
    config = elmo.Config(
        char_dim=_get(embedding, "dim", int, path, "char_cnn.embedding"),
        filter_widths=tuple(width for width, _ in filters),
        filter_counts=tuple(count for _, count in filters),
        num_highway=_get(characters, "n_highway", int, path, "char_cnn"),
        activation=activation,  # checked above
        max_characters=_get(characters, "max_characters_per_token", int, path, "char_cnn"),
        d_model=_get(lstm, "projection_dim", int, path, "lstm"),
        hidden_size=_get(lstm, "dim", int, path, "lstm"),
        layers=_get(lstm, "n_layers", int, path, "lstm"),
        skip_connections=_get(lstm, "use_skip_connections", bool, path, "lstm"),
        dropout=0.0,
    )
    num_special = len(special_tokens_around_vocab(elmo.TOKENIZER_TEMPLATE)[0])
    model: spec.Model = elmo.make_spec(config, source_vocab_size=num_special + NUM_LETTERS, head="backbone")
    assert isinstance(model.encoder, spec.BiLM)
    cell_clip, projection_clip = _clip(lstm, "cell_clip", path), _clip(lstm, "proj_clip", path)
    encoder = spec.replace(model.encoder, cell_clip=cell_clip, projection_clip=projection_clip)
    model = spec.replace(model, encoder=encoder)
    try:
        check_model(model)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return model


def _section(options: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    section: dict[str, Any] = _get(options, name, dict, path, "")
    return section


def _get(section: Mapping[str, Any], key: str, kind: type, path: Path, section_name: str) -> Any:
    label, value = f"{section_name}.{key}".lstrip("."), section.get(key, _MISSING)
    if value is _MISSING:
        raise InputError(f"{path}: lacks '{label}'; is it the options.json of an ELMo?")
    if type(value) is not kind:
        raise InputError(f"{path}: {label} cannot be {describe_value(value)}")
    return value


def _clip(lstm: Mapping[str, Any], key: str, path: Path) -> float | None:
    value = lstm.get(key)
    if value is None or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{path}: lstm.{key} cannot be {describe_value(value)}; it must be positive")
    return float(value)


# ---- weights --------------------------------------------------------------------------------------------------------


def read_elmo_tensors(folder: Path, model: spec.Model) -> dict[str, Tensor]:
    """Return the weights of a folder under our names; a missing matrix and a wrong shape are refused by name."""
    embedding, encoder = model.source_embedding, model.encoder
    assert isinstance(embedding, spec.CharacterEmbedding)
    assert isinstance(encoder, spec.BiLM)
    with _HDF5Weights(folder) as weights:
        return _character_tensors(weights, embedding) | _lstm_tensors(weights, encoder)


class _HDF5Weights:
    """The datasets of the HDF5 file in a folder that holds the weights."""

    def __init__(self, folder: Path) -> None:
        try:
            import h5py  # type: ignore[import-untyped]
        except ImportError:
            raise InputError(f"{folder}: HDF5 weights need h5py; pip install 'qkv[hdf5]'") from None
        self._h5py, self._folder, self._file = h5py, folder, None

    def __enter__(self) -> _HDF5Weights:
        for path in _hdf5_files(self._folder):
            try:
                file = self._h5py.File(path, "r")
            except OSError:
                raise InputError(f"{path}: damaged or not an HDF5 file; restore it") from None
            if "char_embed" in file:
                self._path, self._file = path, file
                return self
            file.close()
        raise InputError(f"{self._folder}: no HDF5 file in it has 'char_embed', the characters of an ELMo")

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, name: str, *shape: int) -> Tensor:
        """Return one matrix; its shape is checked before it is read."""
        assert self._file is not None
        dataset = self._file.get(name)
        if not isinstance(dataset, self._h5py.Dataset):
            raise InputError(f"{self._path}: lacks '{name}'; restore the file from where the weights came from")
        if dataset.shape != shape or dataset.dtype.kind != "f":
            stored = f"{dataset.dtype} of shape {list(dataset.shape)}"
            raise InputError(
                f"{self._path}: '{name}' is {stored}, and {OPTIONS_FILE} describes floats of {list(shape)}"
            )
        try:
            return torch.from_numpy(dataset[()]).float()
        except OSError:
            raise InputError(f"{self._path}: '{name}' is damaged; restore the file") from None


def _character_tensors(weights: _HDF5Weights, s: spec.CharacterEmbedding) -> dict[str, Tensor]:
    prefix, n = "source_embedding", s.num_filters
    tensors = {f"{prefix}.characters": weights.read("char_embed", NUM_CHARACTERS, s.char_dim)}
    for i, (width, count) in enumerate(zip(s.filter_widths, s.filter_counts, strict=True)):
        filters = weights.read(f"CNN/W_cnn_{i}", 1, width, s.char_dim, count)[0]  # [width, char_dim, count]
        tensors[f"{prefix}.filters.{i}.weight"] = filters.permute(2, 1, 0).contiguous()
        tensors[f"{prefix}.filters.{i}.bias"] = weights.read(f"CNN/b_cnn_{i}", count)
    for i in range(s.num_highway):
        group = f"CNN_high_{i}"  # its "carry" gate multiplies the transformed vector, not the carried one
        tensors[f"{prefix}.highway.{i}.gate.weight"] = weights.read(f"{group}/W_carry", n, n).T.contiguous()
        tensors[f"{prefix}.highway.{i}.gate_bias"] = weights.read(f"{group}/b_carry", n)
        tensors[f"{prefix}.highway.{i}.transform.weight"] = weights.read(f"{group}/W_transform", n, n).T.contiguous()
        tensors[f"{prefix}.highway.{i}.transform.bias"] = weights.read(f"{group}/b_transform", n)
    tensors[f"{prefix}.projection.weight"] = weights.read("CNN_proj/W_proj", n, s.d_model).T.contiguous()
    tensors[f"{prefix}.projection.bias"] = weights.read("CNN_proj/b_proj", s.d_model)
    return tensors


def _lstm_tensors(weights: _HDF5Weights, s: spec.BiLM) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for layer in range(s.layers):
        groups = [f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell" for direction in (0, 1)]
        matrices = [weights.read(f"{group}/W_0", 2 * s.d_model, 4 * s.hidden_size) for group in groups]
        biases = [weights.read(f"{group}/B", 4 * s.hidden_size) for group in groups]
        projections = [weights.read(f"{group}/W_P_0", s.hidden_size, s.d_model) for group in groups]
        gates = torch.stack([_order_gates(matrix).T for matrix in matrices])  # [2, 4 hidden, 2 width]
        bias = torch.stack([_order_gates(bias) for bias in biases])  # [2, 4 hidden]
        bias[:, s.hidden_size : 2 * s.hidden_size] += 1
        name = f"encoder.layers.{layer}"
        tensors[f"{name}.input_weight"] = gates[..., : s.d_model].contiguous()
        tensors[f"{name}.state_weight"] = gates[..., s.d_model :].contiguous()
        tensors[f"{name}.bias"] = bias
        tensors[f"{name}.projection"] = torch.stack([matrix.T for matrix in projections]).contiguous()
    return tensors


def _order_gates(packed: Tensor) -> Tensor:
    """Return gates i, j, f, o of the last axis in the order i, f, j, o."""
    i, j, f, o = packed.chunk(4, -1)
    return torch.cat([i, f, j, o], -1)
