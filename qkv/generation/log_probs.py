"""How likely a model finds a given output: teacher-forced, or free-running.

"Teacher Forcing vs. No Teacher Forcing" of the notes: with a teacher the model reads the reference so far; without one
it reads what it would have said itself, and the reference's token is scored all the same. Negate and average
for a loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv.data.template_batch import build_template_ids
from qkv.errors import InputError
from qkv.nn import EncoderDecoder, Ragged
from qkv.tokenization.tokenizer import Tokenizer


def encode_without_eos(tokenizer: Tokenizer, texts: Sequence[str], eos_id: int) -> list[list[int]]:
    """Ids of texts as pairs are kept: in the checkpoint's template, without the end token, which every batch adds.

    So a BART's target opens with <s>, as in its pretraining, and a T5's with nothing.
    """
    ids = tokenizer.encode_batch(texts)
    if tokenizer.is_native:
        return ids
    prefix, _, suffix = build_template_ids(tokenizer).ids
    if suffix != [eos_id]:
        closing_tokens = " ".join(tokenizer.ids_to_display(suffix)) or "nothing"
        reason = f"its tokeniser closes a text with {closing_tokens}, and the model ends what it writes with token {eos_id}"
        raise InputError(f"{reason}; this model cannot learn from pairs")
    return [[*prefix, *text_ids] for text_ids in ids]


@torch.no_grad()
def token_log_probs(model: EncoderDecoder, source: Ragged, target: Ragged, labels: Tensor, *, free_running: bool = False) -> Ragged:
    """log p of each label (packed like `target`, which opens with the start token).  # [T]"""
    if not free_running:
        log_probs = torch.log_softmax(model(source, target).float(), -1)  # [T, vocabulary]
        return target.with_values(log_probs.gather(1, labels[:, None]).squeeze(1))
    layout = target.layout
    padded_labels = target.with_values(labels).to_padded(model.spec.eos_id)  # [B, N]
    state = model.init_state(model.encode(source), len(target), layout.max_length)
    token = torch.full((len(target),), model.spec.bos_id, device=labels.device)
    steps = []
    for t in range(layout.max_length):
        logits, state = model.step(token, state)
        log_probs = torch.log_softmax(logits.float(), -1)  # [B, vocabulary]
        steps.append(log_probs.gather(1, padded_labels[:, t : t + 1]))
        token = log_probs.argmax(-1)
    return target.with_values(torch.cat(steps, 1)[layout.valid_mask()])
