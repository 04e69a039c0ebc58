"""Samples of a language model in training: a filled mask, a continuation or a reconstruction, as one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from qkv.data.template_batch import TemplateIds
from qkv.generation.config import GenerationConfig
from qkv.generation.generate import generate
from qkv.nn import Decoder, Encoder, EncoderDecoder, Ragged
from qkv.objectives.seq2seq import Inputs
from qkv.tokenization.tokenizer import Tokenizer

SAMPLE_LENGTH = 32  # tokens of a held-out text in a sample
_PROMPT_LENGTH = 12
_TOP_K = 3  # candidates shown for a mask


def fill_mask_sample(model: Encoder, tokenizer: Tokenizer, template: TemplateIds, ids: list[int]) -> str:
    """Mask the middle token of a text and show the most likely tokens and the original one in its place."""
    assert tokenizer.mask_id is not None  # masking a batch has checked it
    middle = len(ids) // 2
    input_ids = [*template.ids[0], *ids, *template.ids[2]]
    position = len(template.ids[0]) + middle
    input_ids[position] = tokenizer.mask_id
    source = Ragged.from_lengths(torch.tensor(input_ids), [len(input_ids)]).to(model.device)
    logits = model.logits(source, torch.tensor([position], device=model.device))  # [1, vocabulary]
    top_ids = logits[0].topk(min(_TOP_K, logits.shape[1])).indices.tolist()
    candidates = "/".join(decode_token(tokenizer, token_id) for token_id in top_ids)
    prefix, suffix = tokenizer.decode(ids[:middle]), tokenizer.decode(ids[middle + 1 :])
    return one_line(f"{prefix} [{candidates} (was: {decode_token(tokenizer, ids[middle])})] {suffix}")


def continuation_sample(model: Decoder, tokenizer: Tokenizer, ids: list[int]) -> str:
    """Show the beginning of a text and a sampled continuation."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompt = [*bos, *ids][: max(1, min(_PROMPT_LENGTH, _max_length(model) // 2))]
    max_new_tokens = min(SAMPLE_LENGTH, _max_length(model) - len(prompt))
    source = Ragged.from_lengths(torch.tensor(prompt), [len(prompt)]).to(model.device)
    # sampled, because greedy decoding of a small model repeats itself
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=40, max_new_tokens=max_new_tokens)
    hypothesis = generate(model, source, config)[0][0]
    full_text, prefix = tokenizer.decode([*prompt, *hypothesis.tokens]), tokenizer.decode(prompt)
    return one_line(f"{prefix} → {full_text.removeprefix(prefix).strip()}")


def reconstruction_sample(model: EncoderDecoder, tokenizer: Tokenizer, inputs: Inputs) -> str:
    """Show a corrupted text and the model's output for it, both with special tokens."""
    # a limit near the reference's length: an untrained model seldom generates the end token
    max_new_tokens = min(len(inputs.labels) + len(inputs.labels) // 4, _max_length(model))
    hypothesis = generate(model, inputs.source.to(model.device), GenerationConfig(max_new_tokens=max_new_tokens))[0][0]
    source = decode_with_specials(tokenizer, inputs.source.values.tolist())
    return one_line(f"{source} → {decode_with_specials(tokenizer, hypothesis.tokens)}")


def one_line(text: str) -> str:
    """Replace line breaks and runs of white space by single spaces."""
    return " ".join(text.split())


def decode_with_specials(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode tokens with the special tokens, which `Tokenizer.decode` leaves out."""
    special = set(tokenizer.backend.special_tokens)
    texts = []
    for is_special, run in groupby(ids, lambda token_id: tokenizer.backend.id_to_token(token_id) in special):
        run_ids = list(run)
        texts += tokenizer.ids_to_display(run_ids) if is_special else [tokenizer.decode(run_ids).strip()]
    return " ".join(text for text in texts if text)


def decode_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token, or the name of a special one."""
    return tokenizer.decode([token_id]).strip() or tokenizer.ids_to_display([token_id])[0]


def _max_length(model: Decoder | EncoderDecoder) -> int:
    assert model.spec.target_embedding is not None
    return model.spec.target_embedding.max_length
