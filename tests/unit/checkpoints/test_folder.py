"""Models as folders, files that are whole or not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qkv import families
from qkv.checkpoints import ModelBundle, load, save
from qkv.checkpoints.safetensors_io import average_checkpoints, load_tensors, save_tensors
from qkv.checkpoints.state import unique_state_dict
from qkv.errors import InputError
from qkv.files import atomic_write
from qkv.nn import build
from qkv.nn.construction import build_on_meta
from qkv.tokenization.tokenizer import train_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "generation"))
from writers import sources, tiny

# encoder-decoders without a Hugging Face form; tests/every saves and loads all families
NATIVE = [n for n in families.names() if "seq2seq_lm" in getattr(families.get_family(n), "HEAD_NAMES", ())]


@pytest.fixture(params=NATIVE)
def bundle(request):
    letters = train_tokenizer("character", ["abcde"])  # 4 specials and 5 letters: the tiny models' vocabulary
    return ModelBundle(tiny(request.param, vocabulary=9), letters, letters)


def test_a_model_saved_and_loaded_gives_the_same_logits(bundle, tmp_path):
    save(bundle, tmp_path / "m")
    again = load(tmp_path / "m")
    source = sources(3, 5)
    with torch.no_grad():
        torch.testing.assert_close(again.model(source, source), bundle.model(source, source), rtol=0, atol=0)


def test_saving_what_was_loaded_writes_the_same_bytes(bundle, tmp_path):
    save(bundle, tmp_path / "one")
    save(load(tmp_path / "one"), tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_tied_weights_are_saved_once_and_tied_again(tmp_path):
    module = families.get_family("transformer")
    shape = module.Config(d_model=8, heads=2, layers=1, d_ff=8, share_embeddings=True)
    model = build(module.make_spec(shape, source_vocab_size=9, target_vocab_size=9))
    assert sum(name.endswith("tokens.weight") for name in unique_state_dict(model)) == 1
    letters = train_tokenizer("character", ["abcde"])
    save(ModelBundle(model, letters, letters), tmp_path)
    again = load(tmp_path).model
    assert again.source_embedding.tokens.weight is again.target_embedding.tokens.weight is again.head.linear.weight


def test_a_hollow_model_takes_no_memory(bundle):
    assert all(p.device.type == "meta" for p in build_on_meta(bundle.model.spec).parameters())


def test_a_write_that_fails_leaves_the_earlier_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("earlier")

    def fail(beside: Path) -> None:
        beside.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        InputError, match=r"a\.txt: cannot be saved: No space left on device; the earlier file is intact"
    ):
        atomic_write(path, fail)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["earlier"]


def test_an_average_is_the_mean_of_its_checkpoints(tmp_path):
    for i in range(3):
        save_tensors(tmp_path / f"{i}", {"w": torch.full((2,), float(i**2))})
    mean = average_checkpoints([tmp_path / f"{i}" for i in range(3)])
    torch.testing.assert_close(mean["w"], torch.full((2,), 5 / 3))


def test_notes_come_back_with_the_tensors(tmp_path):
    save_tensors(tmp_path / "a", {"w": torch.ones(1)}, {"step": "3"})
    assert load_tensors(tmp_path / "a")[1] == {"step": "3"}
