"""Logits processors: rules that change the scores of the next token, applied in the order of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qkv.errors import InputError
from qkv.generation.config import GenerationConfig

NEG_INF = float("-inf")
PADDING = -1  # in a history, after the tokens of a row
_NO_TOKEN, _ANY_TOKEN = -2, -3

# (scores [R, V], history [R, N], num_tokens [R], num_generated [R]) -> scores [R, V]
#
# The history of a row is its prompt or start token and the tokens generated so far, num_tokens in all, then PADDING;
# the last num_generated of them were generated. Rows may be at different steps. A processor has static shapes and
# never reads a value on the host, so that it can be captured as part of a CUDA graph.
LogitsProcessor = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def make_processors(
    config: GenerationConfig, *, eos_ids: Tensor, first_tokens: Sequence[int] = ()
) -> list[LogitsProcessor]:
    """Return the processors that a config asks for.

    Args:
        config: the settings.
        eos_ids: tokens that end an output.  # [E]
        first_tokens: tokens that every output begins with.
    """
    device, processors = eos_ids.device, []
    if config.repetition_penalty != 1.0:
        processors.append(_repetition_penalty(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        processors.append(_block_repeated_ngrams(config.no_repeat_ngram_size))
    eos_set = set(eos_ids.tolist()) if config.bad_words_ids else set()
    words = [word for word in config.bad_words_ids if not (len(word) == 1 and word[0] in eos_set)]
    if words:
        processors.append(_block_words(words, device))
    if config.min_length or config.min_new_tokens:
        processors.append(_minimum_length(config.min_length, config.min_new_tokens, eos_ids))
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


def _last_tokens(history: Tensor, num_tokens: Tensor, count: int) -> Tensor:
    """Return the last tokens of each row, with _NO_TOKEN before the first.  # [R, count]"""
    columns = num_tokens[:, None] + torch.arange(-count, 0, device=history.device)  # [R, count]
    return history.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, _NO_TOKEN)


def _forbid(scores: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Forbid some of the tokens [R, K] in each row: those `where` [R, K] marks."""
    values = torch.full_like(scores[:, :1], math.inf).expand(where.shape).masked_fill(where, NEG_INF)
    return scores.scatter_reduce(1, tokens.clamp(min=0), values, "amin")


def _repetition_penalty(penalty: float) -> LogitsProcessor:
    """Keskar et al. 2019: make tokens that occurred less probable."""

    def process(scores: Tensor, history: Tensor, num_tokens: Tensor, num_generated: Tensor) -> Tensor:  # noqa: ARG001
        # padding repeats the first token: equal tokens get equal scores, so their order does not matter
        tokens = torch.where(history == PADDING, history[:, :1], history).clamp(min=0)  # [R, N]
        occurred = scores.gather(1, tokens)
        return scores.scatter(1, tokens, torch.where(occurred < 0, occurred * penalty, occurred / penalty))

    return process


def _block_repeated_ngrams(size: int) -> LogitsProcessor:
    """Paulus et al. 2018: forbid the tokens that would complete an n-gram of the history."""

    def process(scores: Tensor, history: Tensor, num_tokens: Tensor, num_generated: Tensor) -> Tensor:  # noqa: ARG001
        num_ngrams = history.shape[1] - size + 1
        if num_ngrams < 1:
            return scores
        last_tokens = _last_tokens(history, num_tokens, size - 1)  # [R, size - 1]
        completions = history[:, size - 1 :]  # [R, W] the last token of each n-gram
        matches = completions != PADDING
        for i in range(size - 1):
            matches = matches & (history[:, i : i + num_ngrams] == last_tokens[:, i : i + 1])
        return _forbid(scores, completions, matches)

    return process


def _block_words(words: Sequence[Sequence[int]], device: torch.device) -> LogitsProcessor:
    """Forbid the last token of each word after its other tokens."""
    num_before = max(map(len, words)) - 1
    rows = [[*[_ANY_TOKEN] * (num_before + 1 - len(word)), *word] for word in words]
    *before, last = torch.tensor(rows, device=device).unbind(1)  # [W] each

    def process(scores: Tensor, history: Tensor, num_tokens: Tensor, num_generated: Tensor) -> Tensor:  # noqa: ARG001
        last_tokens = _last_tokens(history, num_tokens, num_before)  # [R, num_before]
        matches = torch.ones(len(scores), len(last), dtype=torch.bool, device=scores.device)  # [R, W]
        for i, tokens in enumerate(before):
            matches = matches & ((tokens == last_tokens[:, i : i + 1]) | (tokens == _ANY_TOKEN))
        return _forbid(scores, last.expand(matches.shape), matches)

    return process


def _minimum_length(min_length: int, min_new_tokens: int, eos_ids: Tensor) -> LogitsProcessor:
    def process(scores: Tensor, history: Tensor, num_tokens: Tensor, num_generated: Tensor) -> Tensor:  # noqa: ARG001
        too_short = ((num_tokens < min_length) | (num_generated < min_new_tokens))[:, None]  # [R, 1]
        return scores.index_copy(1, eos_ids, scores.index_select(1, eos_ids).masked_fill(too_short, NEG_INF))

    return process


def allow_only(scores: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Allow only one token [R] or [1] in the rows that `where` [R] marks."""
    is_allowed = torch.arange(scores.shape[1], device=scores.device) == tokens[:, None]
    forced = torch.zeros_like(scores).masked_fill(~is_allowed, NEG_INF)
    return torch.where(where[:, None], forced, scores)


def _force_first(tokens: Tensor) -> LogitsProcessor:
    def process(scores: Tensor, history: Tensor, num_tokens: Tensor, num_generated: Tensor) -> Tensor:  # noqa: ARG001
        next_tokens = tokens[num_generated.clamp(max=len(tokens) - 1)]  # [R]
        return allow_only(scores, next_tokens, num_generated < len(tokens))

    return process


def _suppress(tokens: Tensor, at_step: int | None = None) -> LogitsProcessor:
    def process(scores: Tensor, history: Tensor, num_tokens: Tensor, num_generated: Tensor) -> Tensor:  # noqa: ARG001
        suppressed = scores.index_fill(1, tokens, NEG_INF)
        return suppressed if at_step is None else torch.where((num_generated == at_step)[:, None], suppressed, scores)

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
