"""In-context classification: a language model is shown a few solved examples and asked how likely each label is.

Nothing is trained (Brown et al. 2020, https://arxiv.org/abs/2005.14165). A template turns an example into text, as in
"Review: {text}\\nSentiment: {label}\\n\\n"; a prompt is some solved examples, then the one that is asked about, up to
its label. Each label's words are scored as the text's continuation, and the likeliest is the answer.

Zhao et al. 2021 (https://arxiv.org/abs/2102.09690) found that such answers lean towards some labels whatever the text
is, and divide by what the model says of a text without content; `calibrate` does so.
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
from qkv.data.batching import evaluation_batches
from qkv.data.examples import TextExample
from qkv.errors import InputError
from qkv.generation.generate import eval_mode
from qkv.checkpoints.inputs import max_input_length, require_tokenizer
from qkv.generation.sampling import next_token_log_probs
from qkv.nn import Decoder, Ragged

TEXT, TEXT_PAIR, LABEL = "{text}", "{text_pair}", "{label}"
CONTENT_FREE_INPUTS = ("N/A", "[MASK]", "")  # texts without content, as in Zhao et al.


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """How an example is asked about."""

    template: str = "Text: {text}\nLabel: {label}\n\n"
    verbalizer: Mapping[str, str] = field(default_factory=dict)  # what stands for a label; by default its own name
    length_normalize: bool = False  # scores a token, where labels of many tokens are not to lose for their length
    calibrate: bool = False
    on_too_long: Literal["refuse", "truncate"] = "refuse"  # truncate: the prompt's beginning is left out
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.template.count(LABEL) != 1 or TEXT not in self.template:
            raise InputError(f"template: needs {TEXT} and, once, {LABEL}: '{self.template}'")
        if self.template.index(LABEL) < self.template.index(TEXT) or not self.template.split(LABEL)[0].strip():
            raise InputError(f"template: {LABEL} has to come behind {TEXT}, which it is asked about: '{self.template}'")
        if TEXT_PAIR in self.template.split(LABEL)[1]:
            raise InputError(f"template: {TEXT_PAIR} has to come before {LABEL}: '{self.template}'")

    def verbalize(self, label: str) -> str:
        return self.verbalizer.get(label, label)

    def render_query(self, example: TextExample) -> str:
        """An example up to its label; the space before that belongs to the label's words."""
        return self._fill_template(self.template.split(LABEL)[0], example).rstrip(" ")

    def render_demonstration(self, example: TextExample) -> str:
        """An example with its label."""
        prefix, suffix = (self._fill_template(template_part, example) for template_part in self.template.split(LABEL))
        return f"{prefix}{self.verbalize(_require_label(example))}{suffix}"

    def label_text(self, label: str) -> str:
        """A label's words with the space that the template has before them."""
        prefix = self.template.split(LABEL)[0]
        return prefix[len(prefix.rstrip(" ")) :] + self.verbalize(label)

    def _fill_template(self, template_part: str, example: TextExample) -> str:
        if TEXT_PAIR in template_part and example.text_pair is None:
            raise InputError(f"{example.location}: has no second text, which the template asks for")
        # in two steps of one split each: a text may itself hold braces
        return example.text.join(fragment.replace(TEXT_PAIR, example.text_pair or "") for fragment in template_part.split(TEXT))


@dataclass(frozen=True)
class PromptPrediction:
    """The likeliest label, and each label's score: the log-likelihood of its words, or as `PromptConfig` has it."""

    label: str
    scores: dict[str, float]

    @property
    def probability(self) -> float:
        """The label's probability among the labels."""
        max_score = max(self.scores.values())
        return math.exp(self.scores[self.label] - max_score) / sum(math.exp(score - max_score) for score in self.scores.values())


def sample_demonstrations(examples: Sequence[TextExample], count: int, seed: int) -> list[int]:
    """The numbers of `count` examples to be shown, in the order that the seed draws them in."""
    if not 0 <= count <= len(examples):
        raise InputError(f"{count} examples to show out of {len(examples)}; ask for fewer, or give more")
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(examples))
    return [int(index) for index in np.argsort(keys, kind="stable")[:count]]


def predict_with_prompt(
    bundle: ModelBundle,
    examples: Sequence[TextExample],
    labels: Sequence[str],
    demonstrations: Sequence[TextExample] = (),
    config: PromptConfig | None = None,
) -> list[PromptPrediction]:
    """What a language model says of each example, with the solved `demonstrations` before it."""
    config = config or PromptConfig()
    if len(set(labels)) < 2 or len({config.verbalize(label) for label in labels}) < len(labels):
        raise InputError("labels: give at least two, each with words of its own")
    prefix = "".join(config.render_demonstration(example) for example in demonstrations)
    scores = _label_log_likelihoods(bundle, [prefix + config.render_query(e) for e in examples], [e.location for e in examples], labels, config)
    if config.calibrate:
        content_free = [TextExample(text, "a text without content", text_pair=text) for text in CONTENT_FREE_INPUTS]
        prompts = [prefix + config.render_query(example) for example in content_free]
        content_free_scores = _label_log_likelihoods(bundle, prompts, [example.location for example in content_free], labels, config)
        label_probs = torch.softmax(content_free_scores, -1).mean(0)  # [labels]
        scores = scores - label_probs.log()
    best = scores.argmax(-1).tolist()
    rows = zip(best, scores.tolist(), strict=True)
    return [PromptPrediction(labels[label_index], dict(zip(labels, row, strict=True))) for label_index, row in rows]


def encode_continuations(
    bundle: ModelBundle, prompts: Sequence[str], label_texts: Sequence[str], input_names: Sequence[str], config: PromptConfig
) -> list[tuple[list[int], list[list[int]]]]:
    """Each prompt's ids, and those that come behind them in the prompt with each of `label_texts`.

    Text and end are cut as one: a tokeniser may join the end of one with the beginning of the other, and then the
    tokens before the joint are the prompt.
    """
    tokenizer, max_length = require_tokenizer(bundle), max_input_length(bundle.model.spec)
    texts = [prompt + label_text for prompt in prompts for label_text in ("", *label_texts)]
    ids = [encoding.ids for encoding in tokenizer.encode_plus_batch(texts)]
    encoded_prompts = []
    for index, location in enumerate(input_names):
        prompt_ids, *full_ids = ids[index * (len(label_texts) + 1) : (index + 1) * (len(label_texts) + 1)]
        prefix_length = min(_common_prefix_length(prompt_ids, candidate_ids) for candidate_ids in full_ids)
        continuation_ids, num_tokens = [candidate_ids[prefix_length:] for candidate_ids in full_ids], max(map(len, full_ids))
        if not all(continuation_ids):
            raise InputError(f"{location}: a label's words leave no token behind the prompt; give other words")
        if num_tokens > max_length and config.on_too_long == "refuse":
            reason = f"a prompt of {num_tokens} tokens with its label, and the model takes at most {max_length}"
            raise InputError(f"{location}: {reason}; show fewer examples, or choose --on-too-long truncate")
        prompt_tail = prompt_ids[max(0, num_tokens - max_length) : prefix_length]
        if not prompt_tail:
            raise InputError(f"{location}: no token of the prompt is left before the label; give a longer template")
        encoded_prompts.append((prompt_tail, continuation_ids))
    return encoded_prompts


@torch.inference_mode()
def _label_log_likelihoods(
    bundle: ModelBundle, prompts: Sequence[str], input_names: Sequence[str], labels: Sequence[str], config: PromptConfig
) -> Tensor:
    """Log-likelihoods of the labels' words.  # [prompts, labels]"""
    model = bundle.model
    if not isinstance(model, Decoder) or model.head is None or model.head.spec.kind != "lm":
        raise InputError(f"a {model.spec.family} of this shape goes on from no text; prompting needs a language model")
    encoded_prompts = encode_continuations(bundle, prompts, [config.label_text(label) for label in labels], input_names, config)
    scores = torch.zeros(len(prompts), len(labels), dtype=torch.float64)
    # a prompt is read once, and its keys and values serve as many labels as there is room for
    labels_per_pass = max(1, min(len(labels), config.batch_tokens // max(len(ids) for ids, _ in encoded_prompts)))
    with eval_mode(model):
        for indices in evaluation_batches(np.array([len(ids) for ids, _ in encoded_prompts]), max(1, config.batch_tokens // labels_per_pass)):
            source = Ragged.pack([torch.tensor(encoded_prompts[i][0]) for i in indices]).to(model.device)
            for start in range(0, len(labels), labels_per_pass):
                batch_continuations = [encoded_prompts[i][1][start : start + labels_per_pass] for i in indices]
                scores[indices, start : start + labels_per_pass] = _continuation_log_probs(model, source, batch_continuations).double().cpu()
    if config.length_normalize:
        scores /= torch.tensor([[len(continuation) for continuation in continuation_ids] for _, continuation_ids in encoded_prompts])
    return scores


def _continuation_log_probs(model: Decoder, prompts: Ragged, batch_continuations: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Summed log-probabilities of each prompt's continuations, each prompt having as many.  # [B, K]"""
    rows = [continuation for prompt_continuations in batch_continuations for continuation in prompt_continuations]
    max_length, device = max(map(len, rows)), prompts.values.device
    target_ids = torch.tensor([[*row, *[-1] * (max_length - len(row))] for row in rows], device=device)  # [B * K, longest]
    logits, state = model.prefill(prompts, len(batch_continuations[0]), max_length)
    total = torch.zeros(len(rows), device=device)
    for step in range(max_length):
        if step:
            logits, state = model.step(target_ids[:, step - 1].clamp(min=0), state)
        step_ids = target_ids[:, step]
        log_probs = next_token_log_probs(model, logits).gather(1, step_ids.clamp(min=0)[:, None]).squeeze(1)
        total += torch.where(step_ids >= 0, log_probs, 0.0)
    return total.view(len(batch_continuations), -1)


def _common_prefix_length(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other_ids, strict=False)))


def _require_label(example: TextExample) -> str:
    if not isinstance(example.label, str):
        raise InputError(f"{example.location}: has no class for a label; prompting needs one")
    return example.label
