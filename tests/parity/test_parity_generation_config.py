"""Checkpoints with a generation_config.json generate as `transformers.generate` does by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_parity_generate_seq2seq as seq2seq
import torch
import transformers
from both import ids

import qkv
from qkv.errors import InputError
from qkv.generation import GenerationConfig, generate
from qkv.tasks.predictor import Predictor

SETTINGS: dict[str, Any] = {
    "num_beams": 3,
    "length_penalty": 2.0,
    "early_stopping": True,
    "no_repeat_ngram_size": 2,
    "min_length": 4,
    "max_length": 11,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 2,
    "bad_words_ids": [[7], [8, 9]],
}


def save(folder: Path, settings: dict[str, Any], in_model_config: bool) -> Any:
    """Save a BART with generation settings in their own file, or in config.json as old checkpoints have them."""
    theirs = seq2seq.made("bart").theirs
    theirs.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / ("config.json" if in_model_config else "generation_config.json")
    content = json.loads(path.read_text()) if in_model_config else {"eos_token_id": 2, "decoder_start_token_id": 2}
    path.write_text(json.dumps(content | settings))
    return transformers.BartForConditionalGeneration.from_pretrained(folder).eval()


@pytest.mark.parametrize("in_model_config", [False, True])
def test_a_checkpoint_generates_with_its_own_settings(tmp_path: Path, in_model_config: bool) -> None:
    theirs = save(tmp_path, SETTINGS, in_model_config)
    bundle, batch = qkv.load(tmp_path), ids([4, 9, 1, 6], seq2seq.VOCABULARY, 7)
    tensors = {"input_ids": batch.to_padded().long(), "attention_mask": batch.layout.valid_mask().long()}
    with torch.no_grad():
        sequences = theirs.generate(**tensors, **(SETTINGS if in_model_config else {}), do_sample=False)[:, 1:].tolist()
    eos_id = bundle.model.spec.eos_id
    expected = [row[: row.index(eos_id)] if eos_id in row else row for row in sequences]
    config = GenerationConfig(**bundle.generation_settings)
    assert [rows[0].tokens for rows in generate(bundle.model, batch, config)] == expected


def test_settings_of_the_user_win_one_by_one(tmp_path: Path) -> None:
    save(tmp_path, SETTINGS, False)
    predictor = Predictor(qkv.load(tmp_path)).with_settings(num_beams=2, max_new_tokens=5)
    assert predictor.task.config.num_beams == 2
    assert predictor.task.config.no_repeat_ngram_size == 2
    sampling = Predictor(qkv.load(tmp_path)).with_settings(do_sample=True)
    assert sampling.task.config.num_beams == 1


def test_settings_are_exported_and_imported_again(tmp_path: Path) -> None:
    save(tmp_path / "theirs", SETTINGS, False)
    bundle = qkv.load(tmp_path / "theirs")
    for format in ("qkv", "huggingface"):
        qkv.save(bundle, tmp_path / format, format)
        assert qkv.load(tmp_path / format).generation_settings == bundle.generation_settings
    exported = transformers.GenerationConfig.from_pretrained(tmp_path / "huggingface")
    assert {name: getattr(exported, name) for name in SETTINGS} == SETTINGS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": "four"}, "num_beams must be a whole number, not 'four'"),
        ({"length_penalty": [1]}, r"length_penalty must be a number, not \[1\]"),
        ({"bad_words_ids": [3]}, "bad_words_ids must be ids, not 3"),
        ({"forced_bos_token_id": 10**9}, "token 1000000000 is not in the vocabulary of 31 tokens"),
        ({"eos_token_id": [2, -1]}, "token -1 is not in the vocabulary"),
        ({"early_stopping": "maybe"}, "early_stopping is true, false or"),
    ],
)
def test_a_damaged_generation_config_is_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    theirs = seq2seq.made("bart").theirs
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message):
        qkv.load(tmp_path)


def test_settings_that_qkv_does_not_have_are_named_in_a_warning(tmp_path: Path) -> None:
    theirs = seq2seq.made("bart").theirs
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"guidance_scale": 2.0, "eta_cutoff": 0.0}))
    with pytest.warns(UserWarning, match="guidance_scale not supported"):
        qkv.load(tmp_path)
