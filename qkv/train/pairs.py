"""Learning from pairs: tokenisers, encoded pairs, held-out examples that are really decoded.

The model is fresh and so are its tokenisers, or both are those of a model that is there (`model.from`): a T5, a BART, a
Marian, a run of ours. Then a text is framed as that model's family has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from qkv import spec
from qkv.data.batches import Batch, Batches, EncodedPairs, Place
from qkv.data.mixing import MixedBatches, shares
from qkv.data.pair import Example, Pair
from qkv.decode import predict
from qkv.decode.predict import source_ids
from qkv.decode.score import unclosed
from qkv.decode.settings import Decoding
from qkv.errors import InputError
from qkv.evaluate import evaluate, reference_loss
from qkv.evaluate.task import ERROR_RATES, text_figures
from qkv.nn import EncoderDecoder, build
from qkv.objectives import seq2seq
from qkv.objectives.term import Term
from qkv.text.tokeniser import Tokeniser, train_tokeniser
from qkv.train.beginning import begun
from qkv.train.checkpoint import LAST
from qkv.train.pair_sets import as_examples, read_part, read_sets
from qkv.train.recipe import model_spec
from qkv.train.sections import Data, PairRecipe, Text
from qkv.weights.folder import SOURCE, TARGET, AnyModel, Loaded

__all__ = ["PairWork", "held_out", "metrics_of", "prepare", "read_part", "tokenisers"]

_LESS_IS_BETTER = (*ERROR_RATES, "ter", "loss")
_SHOWN, _WRITTEN = 100, 300  # characters of a source, and of what is written for it, that a sample shows


@dataclass(frozen=True)
class Start:
    """What a run begins with."""

    spec: spec.Model
    source: Tokeniser
    target: Tokeniser
    model: AnyModel | None = None  # None: a fresh one


@dataclass(frozen=True, eq=False)
class PairWork:
    """See `qkv.train.work.Work`."""

    recipe: PairRecipe
    start: Start
    pairs: EncodedPairs  # of all sets, one behind the other
    sizes: tuple[int, ...]  # pairs of each
    sets: Mapping[str, list[Example]]  # held-out examples of each
    notes: tuple[str, ...]

    kinds = ("loss",)

    @property
    def spec(self) -> spec.Model:
        return self.start.spec

    @property
    def source(self) -> Tokeniser:
        return self.start.source

    @property
    def target(self) -> Tokeniser:
        return self.start.target

    @property
    def valid(self) -> list[Example]:
        return [example for examples in self.sets.values() for example in examples]

    @property
    def metric(self) -> str:
        return self.recipe.valid.metric

    @property
    def more_is_better(self) -> bool:
        return self.metric not in _LESS_IS_BETTER

    def digest(self) -> str:
        return self.pairs.digest()

    def write_down(self, folder: Path) -> None:
        self.source.save(folder / SOURCE)
        self.target.save(folder / TARGET)

    def check(self) -> None:
        self._batches.in_epoch(0)
        for name in _text_metrics(self.metric):  # a package that is not there is said now, not at the first validation
            text_figures(name, ["a"], [["a"]])

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, Batch]]:
        return self._batches.from_place(epoch, index)

    @cached_property
    def _batches(self) -> Batches | MixedBatches:
        how, seed = self.recipe.train, self.recipe.seed
        if len(self.sizes) == 1:
            return Batches(self.pairs, how.batch_tokens, seed, how.workers)
        parts = _shares(self.recipe.data, self.sizes)
        return MixedBatches(self.pairs, self.sizes, parts, how.batch_tokens, seed, how.workers)

    def prepare(self, part: Batch, step: int) -> seq2seq.Inputs:  # noqa: ARG002  # the same in every step
        return seq2seq.inputs(part, start=self.spec.start, end=self.spec.end)

    def losses(self, model: AnyModel, part: seq2seq.Inputs) -> tuple[Term, ...]:
        how = self.recipe.train
        assert isinstance(model, EncoderDecoder)  # every start is one
        total = seq2seq.loss(model, part, smoothing=how.smoothing, own=how.own, agree=how.agree)
        return (Term(total, len(part.labels)),)

    def model(self) -> AnyModel:
        return build(self.spec) if self.start.model is None else self.start.model

    def _decoding(self) -> Decoding:
        data = self.recipe.data
        return Decoding(
            beams=self.recipe.valid.beams,
            unknown=data.unknown,
            too_long="truncate" if data.too_long == "truncate" else "refuse",
            limit=data.target_length,
        )

    def score(self, model: AnyModel) -> dict[str, float]:
        """Real decoding and the real metric; of several sets the mean, and each one's own."""
        loaded = Loaded(model, self.source, self.target)
        found = {name: self._score(loaded, examples) for name, examples in self.sets.items()}
        if len(found) == 1:
            return next(iter(found.values()))
        out: dict[str, float] = {}
        for figure in sorted(next(iter(found.values())), key=lambda name: name != self.metric):  # what decides is first
            out[figure] = sum(one[figure] for one in found.values()) / len(found)
            out |= {f"{figure} {name}": one[figure] for name, one in found.items()}
        return out

    def _score(self, loaded: Loaded, examples: list[Example]) -> dict[str, float]:
        if self.metric == "loss":
            return {"loss": reference_loss(loaded, examples)}
        if self.metric in ERROR_RATES:
            return evaluate(loaded, examples, self._decoding()).values
        values = evaluate(loaded, examples, self._decoding(), _text_metrics(self.metric)).values
        return values | {"loss": reference_loss(loaded, examples)}

    def say(self, model: AnyModel) -> list[str]:
        """Some held-out sources and what the model now writes for them."""
        valid, wanted = self.valid, min(self.recipe.valid.samples, len(self.valid))
        chosen = [valid[number * len(valid) // wanted] for number in range(wanted)]
        places = [example.where for example in chosen]
        written = predict(Loaded(model, self.source, self.target), [e.source for e in chosen], self._decoding(), places)
        rows = zip(chosen, written, strict=True)
        return [f"{_begun(e.source, _SHOWN)} → {_begun(found[0].text, _WRITTEN) if found else ''}" for e, found in rows]


def _begun(text: str, most: int) -> str:
    """A text in one line, as far as it is shown."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}…"


def _shares(data: Data, sizes: Sequence[int]) -> list[float]:
    return shares(sizes, [one.weight for one in data.sets.values()], data.temperature)


def tokenisers(text: Text | None, pairs: list[Pair]) -> tuple[Tokeniser, Tokeniser]:
    """Each side's tokeniser, trained on the training pairs; one for both where the vocabulary is joint."""
    if text is None:
        raise InputError("key 'text' is missing: it says how the source and the target of a fresh model are cut")
    sources, targets = [p.source for p in pairs], [p.target for p in pairs]
    one, other = text.source, text.target or text.source
    if text.joint and one != other:
        raise InputError("text.joint: one vocabulary needs the same settings for text.source and text.target")
    if text.joint:
        both = train_tokeniser(one.kind, sources + targets, size=one.size, lowercase=one.lowercase)
        return both, both
    return (
        train_tokeniser(one.kind, sources, size=one.size, lowercase=one.lowercase),
        train_tokeniser(other.kind, targets, size=other.size, lowercase=other.lowercase),
    )


def prepare(recipe: PairRecipe, folder: Path) -> PairWork:
    """Reads the data, and trains the tokenisers or takes those that the run's folder or its model already has."""
    train = read_sets(recipe.data, "train")
    pairs = [pair for some in train.values() for pair in some]
    start = _start(recipe, folder, pairs)
    if recipe.train.own and not isinstance(start.spec.decoder, spec.RecurrentDecoder):
        raise InputError("train.own: only a recurrent decoder can read its own outputs in training; set it to 0")
    encoded, notes = [], []
    for name, some in train.items():
        ids, said = _encode(recipe.data, some, start, name)
        encoded.append(ids)
        notes += said
    sizes = tuple(len(sources) for sources, _ in encoded)
    if len(sizes) > 1:
        parts = zip(train, sizes, _shares(recipe.data, sizes), strict=True)
        notes = [f"{name}: {size:,} pairs, {share:.1%} of an epoch" for name, size, share in parts] + notes
    every = EncodedPairs([ids for sources, _ in encoded for ids in sources], [ids for _, t in encoded for ids in t])
    seen = {p.source for p in pairs} if recipe.valid.unseen else set()
    valid = {
        name: _chosen(recipe, examples, start, seen)
        for name, examples in held_out(recipe, "valid", start.source, start.spec).items()
    }
    return PairWork(recipe, start, every, sizes, valid, tuple(notes))


def _start(recipe: PairRecipe, folder: Path, pairs: list[Pair]) -> Start:
    if "from" in recipe.model:
        return _loaded(recipe)
    if all((folder / name).is_file() for name in (LAST, SOURCE, TARGET)):
        source, target = Tokeniser.load(folder / SOURCE), Tokeniser.load(folder / TARGET)
    else:
        source, target = tokenisers(recipe.text, pairs)
    s = model_spec(recipe, source=source.size, target=target.size, start=target.start, end=target.end)
    return Start(s, source, target)


def _loaded(recipe: PairRecipe) -> Start:
    """A model that writes, with its own tokenisers."""
    where = str(recipe.model["from"])
    if recipe.text is not None:
        raise InputError("text: a model that is there has its tokenisers; leave the section out beside model.from")
    loaded = begun(recipe)
    model, head = loaded.model, loaded.model.spec.head
    if not isinstance(model, EncoderDecoder) or head is None or head.kind != "lm":
        raise InputError(
            f"model.from: {where} is no encoder-decoder that writes, such as a T5, and these pairs need one"
        )
    if loaded.source is None or loaded.target is None:
        raise InputError(f"model.from: {where} has no tokeniser; name a model that has one")
    return Start(model.spec, loaded.source, loaded.target, model)


def _limits(data: Data, s: spec.Model) -> tuple[int, int]:
    """Tokens of a source and of a target at most, without the end token that every sequence gets."""
    assert s.source is not None
    assert s.target is not None
    longest = min(s.source.length, data.source_length or s.source.length)
    return longest - 1, min(s.target.length, data.target_length or s.target.length) - 1


Encoded = tuple[list[list[int]], list[list[int]]]


def _encode(data: Data, pairs: list[Pair], start: Start, name: str) -> tuple[Encoded, list[str]]:
    """Ids of both sides of a set's pairs that fit, and what happened to those that do not."""
    end, limits = start.spec.end, _limits(data, start.spec)
    sides = (
        unclosed(start.source, [p.source for p in pairs], end),
        unclosed(start.target, [p.target for p in pairs], end),
    )
    fits = [len(a) <= limits[0] and len(b) <= limits[1] for a, b in zip(*sides, strict=True)]
    if all(fits):
        return sides, []
    if data.too_long == "refuse":
        i = fits.index(False)
        said = (
            f"{len(sides[0][i])} and {len(sides[1][i])} tokens, and the model takes at most {limits[0]} and {limits[1]}"
        )
        raise InputError(f"{pairs[i].where}: {said}; set a larger model.length, or data.too_long: drop or truncate")
    over = f"{fits.count(False):,} of the {len(fits):,} training pairs{f' of {name}' if name else ''} are longer than"
    over = f"{over} {limits[0]} and {limits[1]} tokens and are"
    if data.too_long == "truncate":
        cut = [ids[: limits[0]] for ids in sides[0]], [ids[: limits[1]] for ids in sides[1]]
        return cut, [f"{over} cut"]
    kept = [i for i, fit in enumerate(fits) if fit]
    if not kept:
        raise InputError("every training pair is longer than model.length; set a larger one")
    return ([sides[0][i] for i in kept], [sides[1][i] for i in kept]), [f"{over} left out"]


def metrics_of(recipe: PairRecipe) -> list[str]:
    """What the finished model is scored by: as asked for, else as in validation."""
    if recipe.test.metrics:
        return list(recipe.test.metrics)
    return _text_metrics(recipe.valid.metric) or list(ERROR_RATES)


def _text_metrics(metric: str) -> list[str]:
    """The metric of texts that has a figure of this name, if it is one of texts."""
    if metric in (*ERROR_RATES, "loss"):
        return []
    return ["rouge" if metric.startswith("rouge") else metric]


def held_out(
    recipe: PairRecipe, part: str, source: Tokeniser, s: spec.Model, data: Data | None = None
) -> dict[str, list[Example]]:
    """The examples of `valid` or `test` by set, as they are scored; `data` may name another file.

    Error rates are of sources with all their targets, as a dictionary is scored. Figures of texts are of lines: two
    captions that happen to have one translation are two examples, as everybody counts them.
    """
    data = data or recipe.data
    metrics = metrics_of(recipe) if part == "test" else [recipe.valid.metric]
    by_source = all(metric in ERROR_RATES for metric in metrics)
    found = {name: as_examples(pairs, by_source) for name, pairs in read_sets(data, part).items()}
    if data.too_long != "truncate":
        return found
    longest = _limits(data, s)[0]
    return {name: _cut(some, source, s.end, longest) for name, some in found.items()}


def _cut(examples: list[Example], tokeniser: Tokeniser, end: int, longest: int) -> list[Example]:
    """The texts of sources as far as they are read: whoever scores or shows them sees what the model saw."""
    cut = []
    for example, ids in zip(examples, unclosed(tokeniser, [e.source for e in examples], end), strict=True):
        if len(ids) > longest:
            frame = tokeniser.frame(example.source)
            ends = [last for (_, last), part in zip(frame.offsets, frame.parts, strict=True) if part == 0]
            kept = example.source[: ends[len(ends) - (len(ids) - longest) - 1]]
            example = replace(example, source=kept)
        cut.append(example)
    return cut


def _chosen(recipe: PairRecipe, examples: list[Example], start: Start, seen: set[str]) -> list[Example]:
    """Those of a set that are scored while it is learned; one that cannot be read is said before training."""
    valid = [e for e in examples if e.source not in seen]
    if not valid:
        raise InputError("no validation examples are left; see data.valid, data.hold_out and valid.unseen")
    wanted, data = recipe.valid.examples, recipe.data
    if wanted is not None and wanted < len(valid):
        valid = [valid[i * len(valid) // wanted] for i in range(wanted)]
    longest = _limits(data, start.spec)[0]
    lengths = [len(ids) for ids in unclosed(start.source, [e.source for e in valid], start.spec.end)]
    if data.too_long == "drop":
        valid = [e for e, length in zip(valid, lengths, strict=True) if length <= longest]
    elif data.too_long == "refuse" and max(lengths) > longest:
        i = lengths.index(max(lengths))
        said = f"{lengths[i]} tokens, and the model takes at most {longest}"
        raise InputError(f"{valid[i].where}: {said}; shorten it, or set data.too_long: drop or truncate")
    if start.source.ours:
        how = Decoding(unknown=data.unknown, too_long="truncate" if data.too_long == "truncate" else "refuse")
        source_ids(start.source, [e.source for e in valid], [e.where for e in valid], longest, how)
    return valid
