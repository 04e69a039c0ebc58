"""Language models in fastai's layouts: read without running code, and used as any other model."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qkv.checkpoints import load
from qkv.checkpoints.pickle_io import load_string_list
from qkv.errors import InputError
from qkv.nn import Ragged

WORDS = ["xxunk", "xxpad", "xxbos", "xxeos", "xxfld", "xxmaj", "the", "cat", "sat", ",", "."]
WIDTH, HIDDEN, LAYERS = 6, 8, 3


def make_state(layout: str) -> dict[str, Tensor]:
    """Return a state dict with the names of fastai 1 and 2, or of fastai 0.7 (`old`), or of an encoder alone."""
    torch.manual_seed(3)
    embedding = torch.randn(len(WORDS), WIDTH)
    copy_name = "0.encoder_with_dropout.embed.weight" if layout == "old" else "0.encoder_dp.emb.weight"
    state = {"0.encoder.weight": embedding, copy_name: embedding.clone()}
    for layer in range(LAYERS):
        lstm = nn.LSTM(WIDTH if layer == 0 else HIDDEN, WIDTH if layer == LAYERS - 1 else HIDDEN)
        for name, parameter in lstm.state_dict().items():
            if name != "weight_hh_l0":
                state[f"0.rnns.{layer}.module.{name}"] = parameter
            elif layout == "old":
                state[f"0.rnns.{layer}.module.weight_hh_l0_raw"] = parameter
            else:
                state[f"0.rnns.{layer}.weight_hh_l0_raw"] = parameter
                state[f"0.rnns.{layer}.module.weight_hh_l0"] = parameter * 0  # the copy that dropout left behind
    state["1.decoder.weight"] = embedding.clone()
    if layout != "old":
        state["1.decoder.bias"] = torch.randn(len(WORDS))
    if layout == "encoder":
        return {name.removeprefix("0."): tensor for name, tensor in state.items() if name.startswith("0.")}
    return state


def write(folder: Path, state: object, words: object = WORDS, name: str = "lstm_fwd.pth") -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / name)
    (folder / "itos_wt103.pkl").write_bytes(pickle.dumps(words))
    return folder


def restate(state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = state["0.encoder.weight"][tokens]
    for layer in range(LAYERS):
        lstm = nn.LSTM(x.shape[1], WIDTH if layer == LAYERS - 1 else HIDDEN)
        raw = state.get(f"0.rnns.{layer}.weight_hh_l0_raw")
        raw = state[f"0.rnns.{layer}.module.weight_hh_l0_raw"] if raw is None else raw
        weights = {
            name: state[f"0.rnns.{layer}.module.{name}"] for name in ("weight_ih_l0", "bias_ih_l0", "bias_hh_l0")
        }
        lstm.load_state_dict(weights | {"weight_hh_l0": raw})
        x = lstm(x[:, None])[0][:, 0]
    return x @ state["1.decoder.weight"].T + state.get("1.decoder.bias", 0)


@pytest.mark.parametrize(("layout", "name"), [("new", "lstm_fwd.pth"), ("old", "fwd_wt103.h5")])
@torch.no_grad()
def test_logits_are_those_of_the_file(layout: str, name: str, tmp_path: Path) -> None:
    state = make_state(layout)
    bundle = load(write(tmp_path / "model", state, name=name))
    tokens = torch.tensor([2, 6, 7, 8, 9])
    torch.testing.assert_close(bundle.model(Ragged.pack([tokens])), restate(state, tokens))
    assert bundle.missing_keys == ()
    assert bundle.source_tokenizer is not None
    assert bundle.source_tokenizer.encode("The cat sat, dog.") == [6, 7, 8, 9, 0, 10]
    assert bundle.model.spec.bos_id == 2


def test_weights_beside_an_optimizer_and_an_encoder_alone_are_read(tmp_path: Path) -> None:
    whole = load(write(tmp_path / "whole", {"model": make_state("new"), "opt": {"lr": 0.1}})).model.state_dict()
    encoder = load(write(tmp_path / "encoder", make_state("encoder"))).model.state_dict()
    name = "decoder.layers.2.weight_hh_l0"
    assert torch.equal(whole[name], encoder[name])
    assert not encoder["head.linear.bias"].any()


def test_a_classifier_starts_from_it(tmp_path: Path) -> None:
    bundle = load(write(tmp_path / "model", make_state("new")), head="sequence", labels=["no", "yes"])
    head = bundle.model.spec.head
    assert head is not None
    assert (head.pool, head.pooled_dim, head.dense_size) == ("concat", 3 * WIDTH, 50)
    assert bundle.model(Ragged.pack([torch.tensor([2, 6])])).shape == (1, 2)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_list_of_words_is_read_in_every_protocol(protocol: int, tmp_path: Path) -> None:
    words = [*WORDS, WORDS[0], "naïve", "a" * 300]
    (tmp_path / "itos.pkl").write_bytes(pickle.dumps(words, protocol=protocol))
    assert load_string_list(tmp_path / "itos.pkl") == words


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    "words", [[Harmful()], ["a", ["b"]], [1, 2], {"a": 1}, ("a",)], ids=["code", "nested", "numbers", "dict", "tuple"]
)
def test_anything_but_a_list_of_words_is_refused(
    words: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "itos.pkl").write_bytes(pickle.dumps(words))
    with pytest.raises(InputError, match="more than a list of words"):
        load_string_list(tmp_path / "itos.pkl")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("0.rnns.1.weight_hh_l0_raw") is state.pop("0.rnns.1.module.weight_hh_l0"), "gate"),
        (lambda state: state.update({"0.rnns.0.module.weight_ih_l0": torch.zeros(3, 3)}), "weight_ih"),
        (
            lambda state: state.update({"0.rnns.0.layers.0.linear.weight": torch.zeros(3, 3)}),
            "no tensor of an AWD-LSTM",
        ),
        (lambda state: state.update({"1.decoder.weight": torch.zeros(len(WORDS), WIDTH)}), "another matrix"),
    ],
    ids=["a missing gate", "a wrong shape", "a QRNN", "an untied output"],
)
def test_weights_that_do_not_fit_are_refused(change, message: str, tmp_path: Path) -> None:
    state = make_state("new")
    change(state)
    with pytest.raises(InputError, match=message):
        load(write(tmp_path / "model", state))


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 10 words, 10 of them different, and the model 11"):
        load(write(tmp_path / "model", make_state("new"), WORDS[:-1]))


def test_an_hdf5_file_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", make_state("new"))
    (folder / "lstm_fwd.pth").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    with pytest.raises(InputError, match="HDF5"):
        load(folder)
