"""Learning from text alone: pieces of documents under one or several objectives, perplexity of held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv import families, spec
from qkv.data.batches import Place
from qkv.data.chance import Chance, Ints, Pieces
from qkv.data.encoded import Encoded
from qkv.data.framing import framed
from qkv.data.pieces import PieceBatch, PieceBatches
from qkv.data.stream import Stream
from qkv.decode.predict import evaluating
from qkv.errors import InputError
from qkv.nn import build
from qkv.objectives import causal, denoise, masked, mix, span
from qkv.objectives.term import Term, to_device
from qkv.text.marks import Marks, marks
from qkv.text.tokeniser import Tokeniser
from qkv.train.beginning import begun
from qkv.train.reading import Cutting, find_tokeniser, held_out_text, next_sentences, text_spec, training_text
from qkv.train.samples import said
from qkv.train.sections import TextRecipe
from qkv.weights.folder import SOURCE, AnyModel, Loaded
from qkv.weights.huggingface import head_names

_CERTAIN = 700.0  # a mean loss above which its exponential is no number


@dataclass(frozen=True)
class TextWork:
    """See `qkv.train.work.Work`."""

    recipe: TextRecipe
    cutting: Cutting
    train: Encoded | Stream
    about: str  # digest of the training text
    valid: Encoded
    start: AnyModel | None = None  # what it starts from; None: a fresh one

    metric = "perplexity"
    more_is_better = False
    notes = ()

    @property
    def spec(self) -> spec.Model:
        return self.cutting.spec

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("loss", "next_sentence_loss") if self.cutting.pairs else ("loss",)

    def digest(self) -> str:
        return self.about

    def check(self) -> None:
        if isinstance(self._batches, PieceBatches):
            self._batches.in_epoch(0)
        self.check_held_out()

    def check_held_out(self) -> None:
        if not any(self.prepare(batch, step).targets[0] for step, batch in enumerate(self._held_out)):
            said = "give more of it, of longer documents, or raise the objective's rate"
            raise InputError(f"no token of the held-out text is asked for; {said}")

    def write_down(self, folder: Path) -> None:
        self.cutting.tokeniser.save(folder / SOURCE)

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, PieceBatch]]:
        return self._batches.from_place(epoch, index)

    @cached_property
    def _batches(self) -> PieceBatches | Stream:
        if isinstance(self.train, Stream):
            return self.train
        how = self.recipe.train
        return PieceBatches(self.cutting(self.train), how.batch_tokens, self.recipe.seed, how.workers)

    @cached_property
    def _marks(self) -> Marks:
        return marks(self.cutting.tokeniser)

    def objective(self, step: int) -> str:
        """The one that a step has."""
        chosen = self.recipe.objective.chosen
        if len(chosen) == 1:
            return next(iter(chosen))
        return mix.choose({name: how.weight for name, how in chosen.items()}, seed=self.recipe.seed, step=step)

    def prepare(self, part: PieceBatch, step: int) -> Any:
        name, chance = self.objective(step), Chance(self.recipe.seed, part.epoch)
        how: Any = self.recipe.objective.chosen[name]
        if name == "causal":
            return causal.prepare(part.pieces, start=None if self.cutting.packed else self.cutting.tokeniser.start)
        whole, kinds = framed(part, self.cutting.frame)
        if name == "masked":
            assert isinstance(self.spec.source, spec.Embed)
            segments = kinds if self.spec.source.segments and self.cutting.pairs else None
            return masked.prepare(whole, self._marks, chance, how, segments=segments, follows=part.follows)
        if name == "span":
            return span.prepare(whole, self._marks, chance, how, model=self.spec)
        spoilt = denoise.prepare(whole, self._marks, chance, how, model=self.spec)
        if spoilt.source.layout.longest > self.cutting.most:
            said = f"spans of mean length {how.mean} put more masks into a text than they take tokens out of it"
            raise InputError(f"objective.denoise.mean: {said}; set it to 1 or more, or a smaller data.length")
        return spoilt

    def losses(self, model: Any, part: Any) -> tuple[Term, ...]:
        if isinstance(part, masked.Inputs):
            return masked.losses(model, part)
        if isinstance(part, causal.Inputs):
            return (causal.loss(model, part),)
        smoothing = self.recipe.train.smoothing if model.training else 0.0  # a perplexity is of the text as it is
        return (denoise.loss(model, part, smoothing=smoothing),)

    @cached_property
    def _held_out(self) -> list[PieceBatch]:
        """The same pieces, spoilt in the same way, whenever they are scored."""
        try:
            source = self.cutting(self.valid)
        except InputError as error:
            raise InputError(f"held-out text (data.valid, data.hold_out): {error}") from None
        budget = self.recipe.train.batch_tokens
        lengths = source.lengths(0)
        before = np.cumsum(lengths) - lengths
        numbers = np.flatnonzero(before < self.recipe.valid.tokens)
        batches = np.split(numbers, np.flatnonzero(np.diff(before[numbers] // budget)) + 1)
        return [source.take(0, batch) for batch in batches if len(batch)]

    def model(self) -> AnyModel:
        if self.start is not None:
            return self.start
        try:
            return build(self.spec)
        except InputError as error:
            raise InputError(f"model: {error}; see model.width, model.heads and their like") from None
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            raise InputError("model: does not fit into memory; make it smaller (qkv cost says what it needs)") from None

    @torch.no_grad()
    def score(self, model: AnyModel) -> dict[str, float]:
        """Perplexity of the tokens that are asked for; of masked ones that is no probability of the text."""
        sums = torch.zeros(len(self.kinds), 2, dtype=torch.float64)
        with evaluating(model):
            for step, batch in enumerate(self._held_out):
                found = self.losses(model, to_device(self.prepare(batch, step), model.device))
                sums += torch.tensor([[float(term.total), term.targets] for term in found], dtype=torch.float64)
        means = [total / max(targets, 1) for total, targets in sums.tolist()]
        return {"perplexity": math.exp(min(means[0], _CERTAIN))} | dict(zip(self.kinds, means, strict=True))

    def say(self, model: AnyModel) -> list[str]:
        wanted = self.recipe.valid.samples
        places = [number * len(self._held_out) // max(1, wanted) for number in range(wanted)]
        with evaluating(model), torch.no_grad():
            return [self._said(model, self._held_out[place], number) for number, place in enumerate(places)]

    def _said(self, model: AnyModel, batch: PieceBatch, number: int) -> str:
        """Of a batch, the piece whose place in it is the sample's number."""
        lengths, row = batch.pieces.lengths, number % len(batch)
        begin = int(lengths[:row].sum())
        ids = batch.pieces.ids[begin : begin + int(lengths[row])]

        def prepared(text: Ints) -> Any:
            return self.prepare(PieceBatch(0, Pieces.of(text, [len(text)], [number])), number)

        return said(model, self.cutting.tokeniser, ids, prepared)


def prepare(recipe: TextRecipe, folder: Path) -> TextWork:
    """Reads the text and trains the tokeniser, or takes the one that the run's folder has."""
    if recipe.train.smoothing and {"causal", "masked"} & set(recipe.objective.chosen):
        raise InputError("train.smoothing: goes with denoise and span; set it to 0 for causal and masked")
    start = None
    if "from" in recipe.model:
        start, tokeniser = _continued(recipe)
        cutting = Cutting(recipe, tokeniser, start.spec)
    else:
        tokeniser = find_tokeniser(recipe, folder)
        cutting = Cutting(recipe, tokeniser, text_spec(recipe, tokeniser))
    valid = held_out_text(recipe, tokeniser)
    return TextWork(recipe, cutting, *training_text(recipe, cutting), valid, start)


def _continued(recipe: TextRecipe) -> tuple[AnyModel, Tokeniser]:
    """A model that is there, under the head that the objectives ask, and its tokeniser (Gururangan et al. 2020)."""
    where = recipe.model["from"]
    torch.manual_seed(recipe.seed)  # a head that the checkpoint has not is drawn
    loaded, pairs = begun(recipe), next_sentences(recipe)
    s = loaded.model.spec
    if s.head is None or s.head.kind != "lm" or (s.beside is not None) != pairs:
        masked_one = "masked_lm" in head_names(families.family(s.family))
        loaded = begun(recipe, head="pretraining" if pairs else "masked_lm" if masked_one else "lm")
    if loaded.source is None:
        raise InputError(f"model.from: {where} has no tokeniser; name a model that has one")
    for name in recipe.objective.chosen:
        mix.check(name, loaded.model.spec)
    return loaded.model, loaded.source


def perplexity(
    loaded: Loaded, recipe: TextRecipe, data: list[str] | None, format: str | None = None
) -> dict[str, float]:
    """The score of a finished model on all of some text, by default on all of the recipe's held-out text."""
    if loaded.source is None:
        raise InputError("this model has no tokeniser, so that no text can be scored; give one that was trained here")
    if data is not None:
        known = replace(recipe.data, valid=data)
        recipe = replace(recipe, data=known if format is None else replace(known, format=format))
    recipe = replace(recipe, valid=replace(recipe.valid, tokens=2**62))
    valid = held_out_text(recipe, loaded.source)
    work = TextWork(recipe, Cutting(recipe, loaded.source, loaded.model.spec), valid, "", valid)
    work.check_held_out()
    return work.score(loaded.model) | {"tokens": float(valid.tokens)}
