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

from qkv.data.batches import evaluation_batches
from qkv.data.examples import Labelled
from qkv.decode.frames import input_length, tokeniser_of
from qkv.decode.predict import evaluating
from qkv.decode.write import log_chances
from qkv.errors import InputError
from qkv.nn import Decoder, Ragged
from qkv.weights import Loaded

TEXT, SECOND, LABEL = "{text}", "{second}", "{label}"
EMPTY = ("N/A", "[MASK]", "")  # texts without content, as in Zhao et al.


@dataclass(frozen=True, kw_only=True)
class Prompting:
    """How an example is asked about."""

    template: str = "Text: {text}\nLabel: {label}\n\n"
    words: Mapping[str, str] = field(default_factory=dict)  # what stands for a label; by default its own name
    mean: bool = False  # scores a token, where labels of many tokens are not to lose for their length
    calibrate: bool = False
    too_long: Literal["refuse", "truncate"] = "refuse"  # truncate: the prompt's beginning is left out
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.template.count(LABEL) != 1 or TEXT not in self.template:
            raise InputError(f"template: needs {TEXT} and, once, {LABEL}: '{self.template}'")
        if self.template.index(LABEL) < self.template.index(TEXT) or not self.template.split(LABEL)[0].strip():
            raise InputError(f"template: {LABEL} has to come behind {TEXT}, which it is asked about: '{self.template}'")
        if SECOND in self.template.split(LABEL)[1]:
            raise InputError(f"template: {SECOND} has to come before {LABEL}: '{self.template}'")

    def word(self, label: str) -> str:
        return self.words.get(label, label)

    def question(self, example: Labelled) -> str:
        """An example up to its label; the space before that belongs to the label's words."""
        return self._filled(self.template.split(LABEL)[0], example).rstrip(" ")

    def solved(self, example: Labelled) -> str:
        """An example with its label."""
        before, behind = (self._filled(part, example) for part in self.template.split(LABEL))
        return f"{before}{self.word(_label(example))}{behind}"

    def said(self, label: str) -> str:
        """A label's words with the space that the template has before them."""
        before = self.template.split(LABEL)[0]
        return before[len(before.rstrip(" ")) :] + self.word(label)

    def _filled(self, part: str, example: Labelled) -> str:
        if SECOND in part and example.second is None:
            raise InputError(f"{example.where}: has no second text, which the template asks for")
        # in two steps of one split each: a text may itself hold braces
        return example.text.join(one.replace(SECOND, example.second or "") for one in part.split(TEXT))


@dataclass(frozen=True)
class Answer:
    """The likeliest label, and each label's score: the log-likelihood of its words, or as `Prompting` has it."""

    label: str
    scores: dict[str, float]

    @property
    def chance(self) -> float:
        """The label's probability among the labels."""
        most = max(self.scores.values())
        return math.exp(self.scores[self.label] - most) / sum(math.exp(x - most) for x in self.scores.values())


def shots(examples: Sequence[Labelled], count: int, seed: int) -> list[int]:
    """The numbers of `count` examples to be shown, in the order that the seed draws them in."""
    if not 0 <= count <= len(examples):
        raise InputError(f"{count} examples to show out of {len(examples)}; ask for fewer, or give more")
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(examples))
    return [int(number) for number in np.argsort(keys, kind="stable")[:count]]


def answer(
    loaded: Loaded,
    examples: Sequence[Labelled],
    labels: Sequence[str],
    shown: Sequence[Labelled] = (),
    how: Prompting | None = None,
) -> list[Answer]:
    """What a language model says of each example, with the solved ones that are `shown` before it."""
    how = how or Prompting()
    if len(set(labels)) < 2 or len({how.word(label) for label in labels}) < len(labels):
        raise InputError("labels: give at least two, each with words of its own")
    before = "".join(how.solved(example) for example in shown)
    scores = _scores(loaded, [before + how.question(e) for e in examples], [e.where for e in examples], labels, how)
    if how.calibrate:
        plain = [Labelled(text, "a text without content", second=text) for text in EMPTY]
        asked = [before + how.question(example) for example in plain]
        found = _scores(loaded, asked, [example.where for example in plain], labels, how)
        chances = torch.softmax(found, -1).mean(0)  # [labels]
        scores = scores - chances.log()
    best = scores.argmax(-1).tolist()
    rows = zip(best, scores.tolist(), strict=True)
    return [Answer(labels[place], dict(zip(labels, row, strict=True))) for place, row in rows]


def continuations(
    loaded: Loaded, prompts: Sequence[str], ends: Sequence[str], places: Sequence[str], how: Prompting
) -> list[tuple[list[int], list[list[int]]]]:
    """Each prompt's ids, and those that come behind them in the prompt with each of its `ends`.

    Text and end are cut as one: a tokeniser may join the end of one with the beginning of the other, and then the
    tokens before the joint are the prompt.
    """
    tokeniser, room = tokeniser_of(loaded), input_length(loaded.model.spec)
    texts = [prompt + end for prompt in prompts for end in ("", *ends)]
    ids = [frame.ids for frame in tokeniser.frame_batch(texts)]
    found = []
    for number, where in enumerate(places):
        alone, *whole = ids[number * (len(ends) + 1) : (number + 1) * (len(ends) + 1)]
        joint = min(_common(alone, one) for one in whole)
        behind, longest = [one[joint:] for one in whole], max(map(len, whole))
        if not all(behind):
            raise InputError(f"{where}: a label's words leave no token behind the prompt; give other words")
        if longest > room and how.too_long == "refuse":
            said = f"a prompt of {longest} tokens with its label, and the model takes at most {room}"
            raise InputError(f"{where}: {said}; show fewer examples, or choose --too-long truncate")
        kept = alone[max(0, longest - room) : joint]
        if not kept:
            raise InputError(f"{where}: no token of the prompt is left before the label; give a longer template")
        found.append((kept, behind))
    return found


@torch.inference_mode()
def _scores(
    loaded: Loaded, prompts: Sequence[str], places: Sequence[str], labels: Sequence[str], how: Prompting
) -> Tensor:
    """Log-likelihoods of the labels' words.  # [prompts, labels]"""
    model = loaded.model
    if not isinstance(model, Decoder) or model.head is None or model.head.spec.kind != "lm":
        raise InputError(f"a {model.spec.family} of this shape goes on from no text; prompting needs a language model")
    found = continuations(loaded, prompts, [how.said(label) for label in labels], places, how)
    scores = torch.zeros(len(prompts), len(labels), dtype=torch.float64)
    # a prompt is read once, and its keys and values serve as many labels as there is room for
    at_once = max(1, min(len(labels), how.batch_tokens // max(len(ids) for ids, _ in found)))
    with evaluating(model):
        for rows in evaluation_batches(np.array([len(ids) for ids, _ in found]), max(1, how.batch_tokens // at_once)):
            source = Ragged.pack([torch.tensor(found[i][0]) for i in rows]).to(model.device)
            for first in range(0, len(labels), at_once):
                ends = [found[i][1][first : first + at_once] for i in rows]
                scores[rows, first : first + at_once] = _likelihoods(model, source, ends).double().cpu()
    if how.mean:
        scores /= torch.tensor([[len(end) for end in behind] for _, behind in found])
    return scores


def _likelihoods(model: Decoder, prompts: Ragged, ends: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Summed log-probabilities of each prompt's continuations, each prompt having as many.  # [B, K]"""
    rows = [end for some in ends for end in some]
    longest, device = max(map(len, rows)), prompts.values.device
    wanted = torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows], device=device)  # [B * K, longest]
    logits, state = model.read(prompts, len(ends[0]), longest)
    total = torch.zeros(len(rows), device=device)
    for place in range(longest):
        if place:
            logits, state = model.step(wanted[:, place - 1].clamp(min=0), state)
        now = wanted[:, place]
        chances = log_chances(model, logits).gather(1, now.clamp(min=0)[:, None]).squeeze(1)
        total += torch.where(now >= 0, chances, 0.0)
    return total.view(len(ends), -1)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _label(example: Labelled) -> str:
    if not isinstance(example.label, str):
        raise InputError(f"{example.where}: has no class for a label; prompting needs one")
    return example.label
