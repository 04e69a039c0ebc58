"""How likely a model finds a given output: teacher-forced, or free-running.

"Teacher Forcing vs. No Teacher Forcing" of the notes: with a teacher the model reads the reference so far; without one
it reads what it would have said itself, and the reference's token is scored all the same. Negate and average
for a loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv.data.framing import frame_of
from qkv.errors import InputError
from qkv.nn import EncoderDecoder, Ragged
from qkv.text.tokeniser import Tokeniser


def unclosed(tokeniser: Tokeniser, texts: Sequence[str], end: int) -> list[list[int]]:
    """Ids of texts as pairs are kept: in the checkpoint's template, without the end token, which every batch adds.

    So a BART's target opens with <s>, as in its pretraining, and a T5's with nothing.
    """
    ids = tokeniser.encode_batch(texts)
    if tokeniser.ours:
        return ids
    before, _, behind = frame_of(tokeniser).ids
    if behind != [end]:
        closing = " ".join(tokeniser.tokens(behind)) or "nothing"
        said = f"its tokeniser closes a text with {closing}, and the model ends what it writes with token {end}"
        raise InputError(f"{said}; this model cannot learn from pairs")
    return [[*before, *one] for one in ids]


@torch.no_grad()
def score(model: EncoderDecoder, source: Ragged, target: Ragged, labels: Tensor, *, free: bool = False) -> Ragged:
    """log p of each label (packed like `target`, which opens with the start token).  # [T]"""
    if not free:
        log_probabilities = torch.log_softmax(model(source, target).float(), -1)  # [T, vocabulary]
        return target.like(log_probabilities.gather(1, labels[:, None]).squeeze(1))
    layout = target.layout
    wanted = target.like(labels).to_padded(model.spec.end)  # [B, N]
    state = model.begin(model.encode(source), len(target), layout.longest)
    token = torch.full((len(target),), model.spec.start, device=labels.device)
    steps = []
    for t in range(layout.longest):
        logits, state = model.step(token, state)
        log_probabilities = torch.log_softmax(logits.float(), -1)  # [B, vocabulary]
        steps.append(log_probabilities.gather(1, wanted[:, t : t + 1]))
        token = log_probabilities.argmax(-1)
    return target.like(torch.cat(steps, 1)[layout.real()])
