"""What a model in training says of text that it was not trained on: a filled mask, a continuation, a restored text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from qkv.checkpoints.model_folder import AnyModel
from qkv.data.rng import Ints
from qkv.data.template_batch import build_template_ids
from qkv.generation.config import GenerationConfig
from qkv.generation.generate import generate
from qkv.nn import Decoder, Encoder, EncoderDecoder, Ragged
from qkv.objectives.seq2seq import Inputs
from qkv.tokenization.tokenizer import Tokenizer

SAMPLE_LENGTH = 32  # tokens of a text that a sample shows
_PROMPT_LENGTH = 12
_TOP_K = 3  # how many words are offered for a mask


def sample_text(model: AnyModel, tokenizer: Tokenizer, ids: Ints, collate: Callable[[Ints], Any]) -> str:
    """One sample. `ids` are those of a text, `collate` makes of them what is to be restored."""
    ids = ids[:SAMPLE_LENGTH]
    if isinstance(model, Encoder):
        text = _fill_mask(model, tokenizer, ids.tolist())
    elif isinstance(model, Decoder):
        text = _continue_text(model, tokenizer, ids.tolist())
    else:
        text = _restore_text(model, tokenizer, collate(ids))
    return " ".join(text.split())


def _restore_text(model: EncoderDecoder, tokenizer: Tokenizer, inputs: Inputs) -> str:
    max_new_tokens = min(len(inputs.labels) + len(inputs.labels) // 4, _max_length(model))  # what is not trained yet hardly ever ends
    hypothesis = generate(model, inputs.source.to(model.device), GenerationConfig(max_new_tokens=max_new_tokens))[0][0]
    return f"{decode_with_specials(tokenizer, inputs.source.values.tolist())} → {decode_with_specials(tokenizer, hypothesis.tokens)}"


def _fill_mask(model: Encoder, tokenizer: Tokenizer, ids: list[int]) -> str:
    """The middle token is masked; the likeliest words stand in its place, the right one behind them."""
    assert tokenizer.mask_id is not None  # the objective needs it
    template, middle = build_template_ids(tokenizer), len(ids) // 2
    input_ids = [*template.ids[0], *ids, *template.ids[2]]
    position = len(template.ids[0]) + middle
    input_ids[position] = tokenizer.mask_id
    source = Ragged.from_lengths(torch.tensor(input_ids), [len(input_ids)]).to(model.device)
    logits = model(source, None, torch.tensor([position], device=model.device))  # [1, vocabulary]
    top_ids = logits[0].topk(min(_TOP_K, logits.shape[1])).indices.tolist()
    candidates = "/".join(tokenizer.decode([token_id]).strip() or tokenizer.ids_to_display([token_id])[0] for token_id in top_ids)
    gold = tokenizer.decode([ids[middle]]).strip() or tokenizer.ids_to_display([ids[middle]])[0]
    prefix, suffix = tokenizer.decode(ids[:middle]), tokenizer.decode(ids[middle + 1 :])
    return f"{prefix} [{candidates} (was: {gold})] {suffix}"


def _continue_text(model: Decoder, tokenizer: Tokenizer, ids: list[int]) -> str:
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompt = [*bos, *ids][: max(1, min(_PROMPT_LENGTH, _max_length(model) // 2))]
    max_new_tokens = min(SAMPLE_LENGTH, _max_length(model) - len(prompt))
    source = Ragged.from_lengths(torch.tensor(prompt), [len(prompt)]).to(model.device)
    # sampled: the likeliest words alone go round in circles
    generation_config = GenerationConfig(do_sample=True, temperature=0.8, top_k=40, max_new_tokens=max_new_tokens)
    hypothesis = generate(model, source, generation_config)[0][0]
    full_text, prefix = tokenizer.decode([*prompt, *hypothesis.tokens]), tokenizer.decode(prompt)
    return f"{prefix} → {full_text.removeprefix(prefix).strip()}"


def _max_length(model: AnyModel) -> int:
    assert model.spec.target_embedding is not None
    return model.spec.target_embedding.max_length


def decode_with_specials(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """A text with its special tokens, which `decode` leaves out."""
    special = set(tokenizer.backend.special_tokens)
    texts = []
    for is_special, run in groupby(ids, lambda token_id: tokenizer.backend.id_to_token(token_id) in special):
        run_ids = list(run)
        texts += tokenizer.ids_to_display(run_ids) if is_special else [tokenizer.decode(run_ids).strip()]
    return " ".join(text for text in texts if text)
