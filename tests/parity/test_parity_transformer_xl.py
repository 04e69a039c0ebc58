"""Transformer-XL against the last release of transformers that had it (`make_transformer_xl_fixture.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import qkv
from qkv import spec
from qkv.checkpoints import ModelBundle
from qkv.errors import InputError
from qkv.families import get_family
from qkv.nn import Ragged, build
from qkv.nn.memory import Memory

FOLDER = Path(__file__).parent / "fixtures" / "transformer_xl"
CASES = sorted(path.name for path in FOLDER.iterdir())


def read_segment(model, tokens, memory):
    """Return log-probabilities [B, N, vocabulary] and the memory after the segment."""
    logits, memory = model.forward_with_memory(Ragged.pack(list(tokens)), memory)
    return torch.log_softmax(logits, -1).view(*tokens.shape, -1), memory


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_four_segments_with_memory_have_the_log_probabilities_and_memories_of_transformers(case):
    model = qkv.load(FOLDER / case).model
    expected = load_file(FOLDER / case / "outputs.safetensors")
    memory = model.initial_memory(len(expected["tokens"][0]))
    for number, tokens in enumerate(expected["tokens"]):
        log_probs, memory = read_segment(model, tokens, memory)
        torch.testing.assert_close(log_probs, expected[f"log_probs.{number}"], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(memory["hidden"], expected[f"memory.{number}"], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_exported_checkpoint_is_read_back_with_the_same_outputs(case, tmp_path):
    bundle = qkv.load(FOLDER / case)
    expected = load_file(FOLDER / case / "outputs.safetensors")
    qkv.save(bundle, tmp_path / "hf", format="huggingface")
    model = qkv.load(tmp_path / "hf").model
    memory = Memory({"hidden": expected["memory.0"], "num_tokens": torch.full((2,), 6)})
    log_probs, _ = read_segment(model, expected["tokens"][1], memory)
    torch.testing.assert_close(log_probs, expected["log_probs.1"], atol=2e-5, rtol=1e-4)


def make_bundle(**fields):
    """Return a new model with the special tokens of a trained tokenizer."""
    family = get_family("transformer_xl")
    config = family.Config(d_model=16, heads=2, layers=1, d_ff=16, memory_length=8)
    model_spec = family.make_spec(config, target_vocab_size=20, bos_id=2, eos_id=3, pad_id=0)
    return ModelBundle(build(spec.replace(model_spec, **fields)))


def test_a_model_with_the_special_tokens_of_its_tokenizer_is_exported(tmp_path):
    bundle = make_bundle()
    qkv.save(bundle, tmp_path / "hf", format="huggingface")
    assert qkv.load(tmp_path / "hf").model.spec == bundle.model.spec


def test_a_model_that_is_no_plain_transformer_xl_is_refused_with_the_field_that_differs(tmp_path):
    decoder = spec.replace(make_bundle().model.spec.decoder, final_norm=True)
    with pytest.raises(InputError, match=r"its decoder\.final_norm is True, not False"):
        qkv.save(make_bundle(decoder=decoder), tmp_path / "hf", format="huggingface")
