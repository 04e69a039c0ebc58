"""The likelihood of a label's words after a prompt, against Hugging Face's GPT-2 on the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from both import randomised

from qkv import ModelBundle
from qkv.checkpoints import load
from qkv.data.examples import TextExample
from qkv.families import gpt2
from qkv.generation.prompting import PromptConfig, predict_with_prompt
from qkv.tokenization.tokenizer import train_tokenizer

LINES = ["It was a fine day: yes", "It was not: no, never, not at all"] * 4
LABELS = ["yes", "no", "not at all, never"]


@pytest.mark.parametrize("shown", [0, 3])
def test_summed_log_likelihoods_equal_those_of_their_loss(tmp_path: Path, shown: int) -> None:
    tokeniser = train_tokenizer("byte_bpe", LINES, vocab_size=290, template=gpt2.TOKENIZER_TEMPLATE)
    config = transformers.GPT2Config(vocab_size=tokeniser.vocab_size, n_embd=24, n_layer=2, n_head=3, n_positions=96)
    theirs = randomised(transformers.GPT2LMHeadModel(config))
    theirs.save_pretrained(tmp_path)
    bundle = ModelBundle(load(tmp_path).model, tokeniser, tokeniser)
    how = PromptConfig(template="Q: {text} A: {label}\n")
    solved = [TextExample(f"a day of {n}", f"g:{n}", label=LABELS[n]) for n in range(shown)]
    asked = [TextExample(text, text) for text in ("It was fine", "a", "It was a day, not a fine day at all")]
    found = predict_with_prompt(bundle, asked, LABELS, solved, how)
    before = "".join(map(how.render_demonstration, solved))
    for example, one in zip(asked, found, strict=True):
        prompt = tokeniser.encode(before + how.render_query(example))
        for label in LABELS:
            whole = torch.tensor([tokeniser.encode(before + how.render_query(example) + how.label_text(label))])
            labels = whole.clone()
            labels[:, : len(prompt)] = -100  # not counted
            with torch.no_grad():
                mean = theirs(whole, labels=labels).loss
            count = whole.shape[1] - len(prompt)
            assert one.scores[label] == pytest.approx(-float(mean) * count, abs=1e-4)
