"""Log-probabilities of given outputs: with teacher forcing, or free-running.

"Teacher Forcing vs. No Teacher Forcing" of the lecture notes: with teacher forcing the decoder reads the reference;
free-running it reads its own predictions, and the reference's tokens are scored all the same. The negative mean is a
loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qkv.data.template_batch import build_template_ids
from qkv.errors import InputError
from qkv.generation.ensemble import Ensemble
from qkv.nn import Model, Ragged
from qkv.nn.heads import Head
from qkv.tokenization.tokenizer import Tokenizer

_MAX_LOGITS_CPU, _MAX_LOGITS = 2**24, 2**28  # logits in memory at once


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
def next_log_probs(model: Model, inputs: Sequence[Ragged], positions: Tensor | None, labels: Tensor) -> Tensor:
    """Return the log-probability of the label that follows each token, with teacher forcing.

    Args:
        model: a model that generates text.
        inputs: the tokens of a language model [T], or the source and the target [T] of an encoder-decoder.
        positions: indices of the tokens that a label follows [L]; None: all.
        labels: token ids [L].
    """
    if isinstance(model, Ensemble):
        members = torch.stack([next_log_probs(member, inputs, positions, labels) for member in model.models])  # [M, L]
        return torch.logsumexp(members, 0) - math.log(len(members))
    assert model.head is not None
    features = model(*inputs, return_logits=False)  # [T, width]
    return _label_log_probs(model.head, features if positions is None else features[positions], labels)


def _label_log_probs(head: Head, features: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities of labels; the logits of some rows at a time are in memory.  # [L]"""
    max_logits = _MAX_LOGITS_CPU if features.device.type == "cpu" else _MAX_LOGITS
    chunk_size, log_probs = max(1, max_logits // head.spec.num_outputs), []
    for x, y in zip(torch.split(features, chunk_size), torch.split(labels, chunk_size), strict=True):
        logits = head.compute_logits(x).float()  # [l, vocabulary]
        max_logit = logits.amax(-1, keepdim=True)  # [l, 1]
        label_logits = logits.gather(1, y[:, None]) - max_logit  # [l, 1]
        # in place: a copy of the logits takes as long as a tenth of the forward pass
        log_probs.append((label_logits - logits.sub_(max_logit).exp_().sum(-1, keepdim=True).log()).squeeze(1))
    return torch.cat(log_probs)


@torch.no_grad()
def token_log_probs(
    model: Model, source: Ragged, target: Ragged, labels: Tensor, *, free_running: bool = False
) -> Ragged:
    """Return the log-probability of each label, packed like `target`, which begins with BOS.  # [T]"""
    if not free_running:
        return target.with_values(next_log_probs(model, [source, target], None, labels))
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
