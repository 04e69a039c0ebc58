"""Fine-tuning on pairs: the loss of a framed pair, against what Hugging Face's models make of the same texts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).parents[1] / "unit" / "train"))
from sentences import framed, pretrained

from qkv.checkpoints import load, save
from qkv.data.pair import SourceWithReferences
from qkv.metrics import reference_loss

CLASSES = {"t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration", "marian": "MarianMTModel"}


@pytest.mark.parametrize("family", CLASSES)
def test_the_loss_of_a_pair_equals_theirs_for_the_tokenised_source_and_labels(tmp_path: Path, family: str) -> None:
    bundle = load(pretrained(tmp_path / family, family))
    save(bundle, tmp_path / "theirs", "huggingface")
    theirs = getattr(transformers, CLASSES[family]).from_pretrained(tmp_path / "theirs").eval()
    for source, target in (("a man sees.", "ein Mann sieht."), ("old „Café“", "alt „Kaffee“ rennt ein Hund")):
        given = torch.tensor([framed(bundle.source_tokenizer, source)])
        labels = torch.tensor([framed(bundle.target_tokenizer, target)])
        with torch.no_grad():
            right = float(theirs(given, labels=labels).loss)
        assert reference_loss(bundle, [SourceWithReferences(source, (target,), "here")]) == pytest.approx(
            right, rel=1e-4
        )
