"""Language models of fastai, such as ULMFiT's on WikiText-103: an AWD-LSTM and its words, read without running code.

A folder has the weights (`lstm_fwd.pth`, or `fwd_wt103.h5` of fastai 0.7, which torch wrote in spite of its name) and
the words (`itos_wt103.pkl`). fastai splits texts with spaCy and marks capitals and repetitions by words of its own;
here texts are lowercased and split at spaces and punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken
from torch import Tensor

from qkv import spec
from qkv.checkpoints.pickle_io import load_pickle, load_string_list
from qkv.errors import InputError, quote
from qkv.families import get_family
from qkv.files import open_file
from qkv.tokenization.build import build_words
from qkv.tokenization.tokenizer import Tokenizer

_WEIGHTS_SUFFIXES = (".pth", ".h5")
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_LAYER_NAME = re.compile(r"rnns\.(\d+)\.(?:module\.)?(weight_ih|weight_hh|bias_ih|bias_hh)_l0(_raw)?")
_EMBEDDING_NAMES = ("encoder.weight", "encoder_dp.emb.weight", "encoder_with_dropout.embed.weight")
# the words that have a role, in the versions of fastai from 1.0 on and before
_ROLE_WORDS = {"unk": ("xxunk", "_unk_"), "pad": ("xxpad", "_pad_"), "bos": ("xxbos", "xbos"), "eos": ("xxeos",)}


class FastaiModel(NamedTuple):
    """A language model under our names."""

    spec: spec.Model
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer


def is_fastai(folder: Path) -> bool:
    """Return whether a folder has the files of a language model of fastai."""
    return bool(_weights_files(folder)) and bool(_word_files(folder))


def _weights_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS_SUFFIXES)


def _word_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*itos*.pkl"))


def read_fastai(folder: Path) -> FastaiModel:
    """Read weights and words; other tensors than those of an AWD-LSTM are refused."""
    weights_path, words_path = _single(_weights_files(folder), folder), _single(_word_files(folder), folder)
    with open_file(weights_path) as file:
        is_hdf5 = file.read(len(_HDF5_MAGIC)) == _HDF5_MAGIC
    if is_hdf5:
        raise InputError(f"{weights_path}: an HDF5 file, which no version of fastai writes; give its .pth file")
    tensors = _rename(load_pickle(weights_path, key="model"), weights_path)
    words = load_string_list(words_path)
    num_rows = len(tensors["target_embedding.tokens.weight"])
    if len(words) != num_rows or len(set(words)) != num_rows:
        counts = f"has {len(words):,} words, {len(set(words)):,} of them different, and the model {num_rows:,}"
        raise InputError(f"{words_path}: {counts}; they do not belong together")
    tokenizer = _make_tokenizer(words, words_path)
    return FastaiModel(_make_spec(tensors, tokenizer, weights_path), tensors, tokenizer)


def _single(paths: list[Path], folder: Path) -> Path:
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths[:3])
        raise InputError(f"{folder}: has several models ({names}); put each into a folder with its list of words")
    return paths[0]


def _rename(state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the tensors under our names. `weight_hh_l0_raw` has the weights; `weight_hh_l0` a copy with dropout."""
    tensors: dict[str, Tensor] = {}
    raw_names: set[str] = set()
    for full_name, tensor in state.items():
        name = full_name.removeprefix("0.")
        match = _LAYER_NAME.fullmatch(name)
        if name in _EMBEDDING_NAMES:
            tensors.setdefault("target_embedding.tokens.weight", tensor.float())
        elif match is not None:
            new_name = f"decoder.layers.{match[1]}.{match[2]}_l0"
            if match[3]:
                raw_names.add(new_name)
            if match[3] or new_name not in raw_names:
                tensors[new_name] = tensor.float()
        elif name in ("1.decoder.weight", "1.decoder.bias"):
            tensors[f"head.linear.{name.rpartition('.')[2]}"] = tensor.float()
        else:
            remedy = "give a language model with LSTM layers in one direction"
            raise InputError(f"{path}: {quote(full_name)} is no tensor of an AWD-LSTM; {remedy}")
    if "target_embedding.tokens.weight" not in tensors:
        raise InputError(f"{path}: lacks the embedding ('0.encoder.weight'); restore it from where it came from")
    return tensors


def _make_spec(tensors: dict[str, Tensor], tokenizer: Tokenizer, path: Path) -> spec.Model:
    """Return the model that the shapes describe, and complete the head: the oldest files have no bias."""
    embedding = tensors["target_embedding.tokens.weight"]
    num_layers = sum(name.endswith("weight_hh_l0") for name in tensors)
    sizes = []
    for layer in range(num_layers):
        weight = tensors.get(f"decoder.layers.{layer}.weight_hh_l0")
        if weight is None or weight.dim() != 2 or weight.shape[0] != 4 * weight.shape[1]:
            raise InputError(f"{path}: layer {layer} lacks a gate, or all of its hidden-to-hidden matrix; restore it")
        sizes.append(weight.shape[1])
    if not sizes or embedding.dim() != 2 or len(set(sizes[:-1])) > 1:
        raise InputError(f"{path}: its layers have states of {sizes}, which is no AWD-LSTM; restore it")
    output = tensors.setdefault("head.linear.weight", embedding)
    is_tied = output is embedding or torch.equal(output, embedding)
    tensors.setdefault("head.linear.bias", torch.zeros(len(embedding)))
    if is_tied != (sizes[-1] == embedding.shape[1]):
        sizes_text = f"a last layer of {sizes[-1]} and embeddings of {embedding.shape[1]}"
        tied = "shares the embedding" if is_tied else "is another matrix"
        raise InputError(f"{path}: has {sizes_text}, and the output layer {tied}, which is no AWD-LSTM of fastai")
    awd_lstm = get_family("awd_lstm")
    config = awd_lstm.Config(
        d_model=embedding.shape[1], hidden_size=sizes[0], layers=len(sizes), tie_embeddings=is_tied
    )
    bos_id, eos_id = (tokenizer.special_ids.get(role, -1) for role in ("bos", "eos"))
    model: spec.Model = awd_lstm.make_spec(config, target_vocab_size=len(embedding), bos_id=bos_id, eos_id=eos_id)
    return model


def _make_tokenizer(words: list[str], path: Path) -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(words)}
    roles = {role: next((name for name in names if name in vocabulary), None) for role, names in _ROLE_WORDS.items()}
    unknown = roles["unk"]
    if unknown is None:
        raise InputError(f"{path}: has no word for unknown words (xxunk or _unk_); restore it from where it came from")
    backend = build_words(vocabulary, unknown, lowercase=True)
    special_words = [word for word in roles.values() if word is not None]
    backend.add_tokens([AddedToken(word, normalized=False, special=True) for word in special_words])
    return Tokenizer(backend, {role: vocabulary[word] for role, word in roles.items() if word is not None})
