"""Log-probabilities of given outputs: with teacher forcing, or free-running.

"Teacher Forcing vs. No Teacher Forcing" of the lecture notes: with teacher forcing the decoder reads the reference;
free-running it reads its own predictions, and the reference's tokens are scored all the same. The negative mean is a
loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv.data.template_batch import build_template_ids
from qkv.errors import InputError
from qkv.nn import Model, Ragged
from qkv.tokenization.tokenizer import Tokenizer


def encode_without_eos(tokenizer: Tokenizer, texts: Sequence[str], eos_id: int) -> list[list[int]]:
    """Return the ids of texts in the checkpoint's template without EOS, which `collate` adds to every pair.

    A BART target thus begins with <s>, as in pretraining, and a T5 target with its first token.
    """
    ids = tokenizer.encode_batch(texts)
    if tokenizer.is_native:
        return ids
    prefix, _, suffix = build_template_ids(tokenizer).ids
    if suffix != [eos_id]:
        closing_tokens = " ".join(tokenizer.ids_to_display(suffix)) or "nothing"
        reason = f"its tokenizer ends a text with {closing_tokens}, and the model ends its output with token {eos_id}"
        raise InputError(f"{reason}; this model cannot be trained on pairs")
    return [[*prefix, *text_ids] for text_ids in ids]


@torch.no_grad()
def token_log_probs(
    model: Model, source: Ragged, target: Ragged, labels: Tensor, *, free_running: bool = False
) -> Ragged:
    """Return the log-probability of each label, packed like `target`, which begins with BOS.  # [T]"""
    if not free_running:
        log_probs = torch.log_softmax(model(source, target).float(), -1)  # [T, vocabulary]
        return target.with_values(log_probs.gather(1, labels[:, None]).squeeze(1))
    layout = target.layout
    padded_labels = target.with_values(labels).to_padded(model.spec.eos_id)  # [B, N]
    logits, state = model.prefill(source, 1, layout.max_length)
    token: Tensor | None = None
    steps = []
    for t in range(layout.max_length):
        if token is not None:
            logits, state = model.step(token, state)
        log_probs = torch.log_softmax(logits.float(), -1)  # [B, vocabulary]
        steps.append(log_probs.gather(1, padded_labels[:, t : t + 1]))
        token = log_probs.argmax(-1)
    return target.with_values(torch.cat(steps, 1)[layout.valid_mask()])
