"""Logits processors: rules that change the scores of the next token, applied in the order of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qkv.errors import InputError
from qkv.generation.config import GenerationConfig

NEG_INF = float("-inf")
PADDING = -1  # in a history, before the prompt of a row that is shorter than others

# (scores [R, vocabulary], history [R, L], number of tokens generated so far) -> scores; the history of a row is its
# prompt or start token, and the tokens generated so far
LogitsProcessor = Callable[[Tensor, Tensor, int], Tensor]


def make_processors(
    config: GenerationConfig,
    *,
    eos_ids: Tensor,
    prompt_lengths: Tensor,
    first_tokens: Sequence[int] = (),
) -> list[LogitsProcessor]:
    """Return the processors that a config asks for.

    Args:
        config: the settings.
        eos_ids: tokens that end an output.  # [E]
        prompt_lengths: tokens of each row before the first new one: its prompt, or 1 for the start token.  # [R]
        first_tokens: tokens that every output begins with.
    """
    device, processors = eos_ids.device, []
    if config.repetition_penalty != 1.0:
        processors.append(_repetition_penalty(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        processors.append(_block_repeated_ngrams(config.no_repeat_ngram_size))
    if config.bad_words_ids:
        eos_set = set(eos_ids.tolist())
        words = [word for word in config.bad_words_ids if not (len(word) == 1 and word[0] in eos_set)]
        processors.append(_block_words([torch.tensor(word, device=device) for word in words]))
    if config.min_length or config.min_new_tokens:
        min_new_tokens = (config.min_length - prompt_lengths).clamp(min=config.min_new_tokens)  # [R]
        if bool((min_new_tokens > 0).any()):
            processors.append(_minimum_length(min_new_tokens, eos_ids))
    if first_tokens:
        processors.append(_force_first(torch.tensor(first_tokens, device=device)))
    if config.suppress_tokens:
        processors.append(_suppress(torch.tensor(config.suppress_tokens, device=device)))
    if config.begin_suppress_tokens:
        processors.append(_suppress(torch.tensor(config.begin_suppress_tokens, device=device), len(first_tokens)))
    return processors


def check_token_ids(config: GenerationConfig, vocab_size: int) -> None:
    """Refuse token ids that are not in the vocabulary."""
    ids: dict[str, Sequence[int]] = {
        name: getattr(config, name) for name in ("suppress_tokens", "begin_suppress_tokens", "stop_token_ids")
    }
    ids["bad_words_ids"] = [token for word in config.bad_words_ids for token in word]
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        ids[name] = [] if getattr(config, name) is None else [getattr(config, name)]
    for name, tokens in ids.items():
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InputError(f"{name}: token {str(wrong)[:20]} is not in the vocabulary of {vocab_size:,} tokens")


def _token_mask(tokens: Tensor, selected: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens of the vocabulary occur among the selected tokens of each row.  # [R, L] -> [R, V]"""
    mask = torch.zeros(len(tokens), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return mask.scatter_(1, tokens.masked_fill(~selected, vocab_size), True)[:, :vocab_size]


def _repetition_penalty(penalty: float) -> LogitsProcessor:
    """Keskar et al. 2019: make tokens that occurred less probable."""

    def process(scores: Tensor, history: Tensor, step: int) -> Tensor:  # noqa: ARG001
        occurred = _token_mask(history, history != PADDING, scores.shape[1])
        return torch.where(occurred, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    return process


def _block_repeated_ngrams(size: int) -> LogitsProcessor:
    """Paulus et al. 2018: forbid the tokens that would complete an n-gram of the history."""

    def process(scores: Tensor, history: Tensor, step: int) -> Tensor:  # noqa: ARG001
        length = history.shape[1]
        if length < size:
            return scores
        ngrams = history.unfold(1, size, 1)  # [R, W, size]
        last_tokens = history[:, length - size + 1 :]  # [R, size - 1]
        matches = (ngrams[..., :-1] == last_tokens[:, None]).all(-1) & (ngrams != PADDING).all(-1)  # [R, W]
        return scores.masked_fill(_token_mask(ngrams[..., -1], matches, scores.shape[1]), NEG_INF)

    return process


def _block_words(words: Sequence[Tensor]) -> LogitsProcessor:
    """Forbid the last token of each word after its other tokens."""

    def process(scores: Tensor, history: Tensor, step: int) -> Tensor:  # noqa: ARG001
        scores = scores.clone()
        for word in words:
            num_preceding = len(word) - 1
            if num_preceding > history.shape[1]:
                continue
            matches = (history[:, history.shape[1] - num_preceding :] == word[:-1]).all(-1)  # [R]
            last_token = int(word[-1])
            scores[:, last_token] = scores[:, last_token].masked_fill(matches, NEG_INF)
        return scores

    return process


def _minimum_length(min_new_tokens: Tensor, eos_ids: Tensor) -> LogitsProcessor:
    longest = int(min_new_tokens.max())

    def process(scores: Tensor, history: Tensor, step: int) -> Tensor:  # noqa: ARG001
        if step >= longest:
            return scores
        too_short = (step < min_new_tokens)[:, None]  # [R, 1]
        return scores.index_copy(1, eos_ids, scores[:, eos_ids].masked_fill(too_short, NEG_INF))

    return process


def allow_only(scores: Tensor, token: Tensor) -> Tensor:
    """Return scores that allow only one token [1]."""
    return torch.full_like(scores, NEG_INF).index_fill(1, token, 0.0)


def _force_first(tokens: Tensor) -> LogitsProcessor:
    def process(scores: Tensor, history: Tensor, step: int) -> Tensor:  # noqa: ARG001
        return allow_only(scores, tokens[step : step + 1]) if step < len(tokens) else scores

    return process


def _suppress(tokens: Tensor, at_step: int | None = None) -> LogitsProcessor:
    def process(scores: Tensor, history: Tensor, step: int) -> Tensor:  # noqa: ARG001
        return scores.index_fill(1, tokens, NEG_INF) if at_step in (None, step) else scores

    return process


# ---- sampling -------------------------------------------------------------------------------------------------------


def filter_for_sampling(scores: Tensor, config: GenerationConfig) -> Tensor:
    """Apply temperature and mask the tokens that are not sampled.  # [R, vocabulary]"""
    scores = scores / config.temperature
    if config.top_k is not None:
        min_score = scores.topk(min(config.top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < min_score, NEG_INF)  # Fan et al. 2018
    if config.top_p is not None and config.top_p < 1:
        scores = _keep_mass(scores, -scores, config.top_p)  # Holtzman et al. 2020
    if config.min_p is not None:
        probs = torch.softmax(scores, -1)
        scores = scores.masked_fill(probs < config.min_p * probs.amax(-1, keepdim=True), NEG_INF)
    if config.typical_p is not None and config.typical_p < 1:
        log_probs = torch.log_softmax(scores, -1)
        entropy = -(log_probs.exp() * log_probs).nansum(-1, keepdim=True)
        scores = _keep_mass(scores, (-log_probs - entropy).abs(), config.typical_p)  # Meister et al. 2022
    return scores


def _keep_mass(scores: Tensor, ranks: Tensor, mass: float) -> Tensor:
    """Keep the tokens of lowest rank until their probability reaches `mass`; the first always stays."""
    order = ranks.argsort(dim=-1, stable=True)
    probs = torch.softmax(scores.gather(-1, order), -1)
    dropped = probs.cumsum(-1) - probs >= mass  # the tokens before it have enough probability
    dropped[..., :1] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), NEG_INF)
