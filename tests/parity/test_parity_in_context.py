"""The likelihood of a label's words after a prompt, against Hugging Face's GPT-2 on the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from both import randomised

from qkv import Loaded
from qkv.data.examples import Labelled
from qkv.decode.in_context import Prompting, answer
from qkv.families import gpt2
from qkv.text.tokeniser import train_tokeniser
from qkv.weights import load

LINES = ["It was a fine day: yes", "It was not: no, never, not at all"] * 4
LABELS = ["yes", "no", "not at all, never"]


@pytest.mark.parametrize("shown", [0, 3])
def test_summed_log_likelihoods_equal_those_of_their_loss(tmp_path: Path, shown: int) -> None:
    tokeniser = train_tokeniser("byte_bpe", LINES, size=290, template=gpt2.TEMPLATE)
    config = transformers.GPT2Config(vocab_size=tokeniser.size, n_embd=24, n_layer=2, n_head=3, n_positions=96)
    theirs = randomised(transformers.GPT2LMHeadModel(config))
    theirs.save_pretrained(tmp_path)
    loaded = Loaded(load(tmp_path).model, tokeniser, tokeniser)
    how = Prompting(template="Q: {text} A: {label}\n")
    solved = [Labelled(f"a day of {n}", f"g:{n}", label=LABELS[n]) for n in range(shown)]
    asked = [Labelled(text, text) for text in ("It was fine", "a", "It was a day, not a fine day at all")]
    found = answer(loaded, asked, LABELS, solved, how)
    before = "".join(map(how.solved, solved))
    for example, one in zip(asked, found, strict=True):
        prompt = tokeniser.encode(before + how.question(example))
        for label in LABELS:
            whole = torch.tensor([tokeniser.encode(before + how.question(example) + how.said(label))])
            labels = whole.clone()
            labels[:, : len(prompt)] = -100  # not counted
            with torch.no_grad():
                mean = theirs(whole, labels=labels).loss
            count = whole.shape[1] - len(prompt)
            assert one.scores[label] == pytest.approx(-float(mean) * count, abs=1e-4)
