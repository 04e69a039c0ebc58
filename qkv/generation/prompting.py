"""In-context classification with a language model: no training, only a prompt (Brown et al. 2020, https://arxiv.org/abs/2005.14165).

A template renders an example as text, as in "Review: {text}\\nSentiment: {label}\\n\\n". The prompt consists of labeled
demonstrations and the query up to its label. The label whose words are the most probable continuation is predicted.

Zhao et al. 2021 (https://arxiv.org/abs/2102.09690) found that such predictions are biased towards some labels for any
text; `calibrate` divides by the probabilities for content-free inputs, as they do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qkv.checkpoints import ModelBundle
from qkv.checkpoints.inputs import require_tokenizer
from qkv.data.batching import evaluation_batches
from qkv.data.examples import TextExample
from qkv.errors import InputError
from qkv.generation.search import next_token_log_probs
from qkv.nn import Ragged
from qkv.nn.shell import Model

TEXT, TEXT_PAIR, LABEL = "{text}", "{text_pair}", "{label}"
CONTENT_FREE_INPUTS = ("N/A", "[MASK]", "")  # those of Zhao et al.


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """How examples are rendered and labels are scored."""

    template: str = "Text: {text}\nLabel: {label}\n\n"
    """Text of one example, with {text}, optionally {text_pair}, and {label} after them."""

    verbalizer: Mapping[str, str] = field(default_factory=dict)
    """Words of each label; by default the label itself."""

    length_normalize: bool = False
    """Rank labels by log-likelihood per token instead of in total."""

    calibrate: bool = False
    """Divide the label probabilities by those for content-free inputs."""

    on_too_long: Literal["refuse", "truncate"] = "refuse"
    """Refuse a prompt over the model's maximum length, or cut its beginning."""

    batch_tokens: int = 8192
    """Tokens per batch."""

    def __post_init__(self) -> None:
        if self.template.count(LABEL) != 1 or TEXT not in self.template:
            raise InputError(f"template: needs {TEXT} and, once, {LABEL}: '{self.template}'")
        if self.template.index(LABEL) < self.template.index(TEXT) or not self.template.split(LABEL)[0].strip():
            raise InputError(f"template: {LABEL} must come after {TEXT}: '{self.template}'")
        if TEXT_PAIR in self.template.split(LABEL)[1]:
            raise InputError(f"template: {TEXT_PAIR} must come before {LABEL}: '{self.template}'")

    def verbalize(self, label: str) -> str:
        """Return the words of a label."""
        return self.verbalizer.get(label, label)

    def render_query(self, example: TextExample) -> str:
        """Return an example up to its label; a space before the label is part of the label's text."""
        return self._fill_template(self.template.split(LABEL)[0], example).rstrip(" ")

    def render_demonstration(self, example: TextExample) -> str:
        """Return an example with its label."""
        prefix, suffix = (self._fill_template(template_part, example) for template_part in self.template.split(LABEL))
        return f"{prefix}{self.verbalize(_require_label(example))}{suffix}"

    def label_text(self, label: str) -> str:
        """Return a label's words with the space that precedes them in the template."""
        prefix = self.template.split(LABEL)[0]
        return prefix[len(prefix.rstrip(" ")) :] + self.verbalize(label)

    def _fill_template(self, template_part: str, example: TextExample) -> str:
        if TEXT_PAIR in template_part and example.text_pair is None:
            raise InputError(f"{example.location}: has no text pair, but the template has {TEXT_PAIR}")
        # split, not format: a text may contain braces
        return example.text.join(
            fragment.replace(TEXT_PAIR, example.text_pair or "") for fragment in template_part.split(TEXT)
        )


@dataclass(frozen=True)
class PromptPrediction:
    """The predicted label of one example."""

    label: str
    scores: dict[str, float]  # log-likelihood of each label's words, normalized and calibrated as configured

    @property
    def probability(self) -> float:
        """The predicted label's probability among all labels."""
        max_score = max(self.scores.values())
        return math.exp(self.scores[self.label] - max_score) / sum(
            math.exp(score - max_score) for score in self.scores.values()
        )


def sample_demonstrations(examples: Sequence[TextExample], count: int, seed: int) -> list[int]:
    """Return the indices of `count` random examples, in random order."""
    if not 0 <= count <= len(examples):
        raise InputError(f"{count} demonstrations from {len(examples)} examples; choose fewer, or give more examples")
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(examples))
    return [int(index) for index in np.argsort(keys, kind="stable")[:count]]


def predict_with_prompt(
    bundle: ModelBundle,
    examples: Sequence[TextExample],
    labels: Sequence[str],
    demonstrations: Sequence[TextExample] = (),
    config: PromptConfig | None = None,
) -> list[PromptPrediction]:
    """Predict the label of each example after the labeled `demonstrations`. The model must be in eval mode."""
    config = config or PromptConfig()
    if len(set(labels)) < 2 or len({config.verbalize(label) for label in labels}) < len(labels):
        raise InputError("labels: give at least two, each with its own words")
    prefix = "".join(config.render_demonstration(example) for example in demonstrations)
    scores = _label_log_likelihoods(
        bundle, [prefix + config.render_query(e) for e in examples], [e.location for e in examples], labels, config
    )
    if config.calibrate:
        content_free = [TextExample(text, "a content-free input", text_pair=text) for text in CONTENT_FREE_INPUTS]
        prompts = [prefix + config.render_query(example) for example in content_free]
        content_free_scores = _label_log_likelihoods(
            bundle, prompts, [example.location for example in content_free], labels, config
        )
        label_probs = torch.softmax(content_free_scores, -1).mean(0)  # [labels]
        scores = scores - label_probs.log()
    best = scores.argmax(-1).tolist()
    rows = zip(best, scores.tolist(), strict=True)
    return [PromptPrediction(labels[label_index], dict(zip(labels, row, strict=True))) for label_index, row in rows]


def encode_continuations(
    bundle: ModelBundle,
    prompts: Sequence[str],
    label_texts: Sequence[str],
    locations: Sequence[str],
    config: PromptConfig,
) -> list[tuple[list[int], list[list[int]]]]:
    """Return the ids of each prompt, and those of each label text after it.

    Prompt and label text are tokenized together, since a tokenizer may merge characters of both; the prompt is then the
    common prefix.
    """
    tokenizer, max_length = require_tokenizer(bundle), bundle.model.max_input_length
    texts = [prompt + label_text for prompt in prompts for label_text in ("", *label_texts)]
    ids = [encoding.ids for encoding in tokenizer.encode_plus_batch(texts)]
    encoded_prompts = []
    for index, location in enumerate(locations):
        prompt_ids, *full_ids = ids[index * (len(label_texts) + 1) : (index + 1) * (len(label_texts) + 1)]
        prefix_length = min(common_prefix_length(prompt_ids, candidate_ids) for candidate_ids in full_ids)
        continuation_ids, num_tokens = (
            [candidate_ids[prefix_length:] for candidate_ids in full_ids],
            max(map(len, full_ids)),
        )
        if not all(continuation_ids):
            raise InputError(
                f"{location}: the words of a label have no token of their own after the prompt; choose other words"
            )
        if num_tokens > max_length and config.on_too_long == "refuse":
            reason = f"a prompt of {num_tokens} tokens with its label, and the model takes at most {max_length}"
            raise InputError(f"{location}: {reason}; use fewer demonstrations, or choose --on-too-long truncate")
        prompt_tail = prompt_ids[max(0, num_tokens - max_length) : prefix_length]
        if not prompt_tail:
            raise InputError(f"{location}: no token of the prompt is left before the label; give a longer template")
        encoded_prompts.append((prompt_tail, continuation_ids))
    return encoded_prompts


@torch.inference_mode()
def _label_log_likelihoods(
    bundle: ModelBundle, prompts: Sequence[str], locations: Sequence[str], labels: Sequence[str], config: PromptConfig
) -> Tensor:
    """Return the log-likelihood of each label's words after each prompt.  # [prompts, labels]"""
    model = bundle.model
    if not model.is_generative or not model.continues_input:
        raise InputError(f"prompting needs a causal language model; this {model.spec.family} is not one")
    encoded_prompts = encode_continuations(
        bundle, prompts, [config.label_text(label) for label in labels], locations, config
    )
    scores = torch.zeros(len(prompts), len(labels), dtype=torch.float64)
    # a prompt is encoded once, and its KV cache serves as many labels as fit into a batch
    labels_per_pass = max(1, min(len(labels), config.batch_tokens // max(len(ids) for ids, _ in encoded_prompts)))
    lengths = np.array([len(ids) for ids, _ in encoded_prompts])
    for indices in evaluation_batches(lengths, max(1, config.batch_tokens // labels_per_pass)):
        source = Ragged.pack([torch.tensor(encoded_prompts[i][0]) for i in indices]).to(model.device)
        for start in range(0, len(labels), labels_per_pass):
            continuations = [encoded_prompts[i][1][start : start + labels_per_pass] for i in indices]
            log_probs = _continuation_log_probs(model, source, continuations)
            scores[indices, start : start + labels_per_pass] = log_probs.double().cpu()
    if config.length_normalize:
        scores /= torch.tensor(
            [[len(continuation) for continuation in continuation_ids] for _, continuation_ids in encoded_prompts]
        )
    return scores


def _continuation_log_probs(
    model: Model, prompts: Ragged, batch_continuations: Sequence[Sequence[Sequence[int]]]
) -> Tensor:
    """Return the summed log-probabilities of each prompt's K continuations.  # [B, K]"""
    rows = [continuation for prompt_continuations in batch_continuations for continuation in prompt_continuations]
    max_length, device = max(map(len, rows)), prompts.values.device
    target_ids = torch.tensor(
        [[*row, *[-1] * (max_length - len(row))] for row in rows], device=device
    )  # [B * K, max_length]
    logits, state = model.prefill(prompts, len(batch_continuations[0]), max_length)
    total = torch.zeros(len(rows), device=device)
    suppressed = torch.tensor(model.spec.suppress_tokens, dtype=torch.long, device=device)
    for step in range(max_length):
        if step:
            logits, state = model.step(target_ids[:, step - 1].clamp(min=0), state)
        step_ids = target_ids[:, step]
        log_probs = next_token_log_probs(logits, suppressed).gather(1, step_ids.clamp(min=0)[:, None]).squeeze(1)
        total += torch.where(step_ids >= 0, log_probs, 0.0)
    return total.view(len(batch_continuations), -1)


def common_prefix_length(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other_ids, strict=False)))


def _require_label(example: TextExample) -> str:
    if not isinstance(example.label, str):
        raise InputError(f"{example.location}: its label is not a class; prompting needs one")
    return example.label
