"""Learning from pairs: tokenisers, encoded pairs, held-out examples that are really decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qkv import spec
from qkv.data.batches import Batch, Batches, EncodedPairs, Place
from qkv.data.pair import Example, Pair, group, hold_out
from qkv.data.readers import read_pairs
from qkv.decode.predict import source_ids
from qkv.decode.settings import Decoding
from qkv.errors import InputError
from qkv.evaluate import evaluate
from qkv.nn import build
from qkv.objectives import seq2seq
from qkv.objectives.term import Term
from qkv.text.tokeniser import Tokeniser, train_tokeniser
from qkv.train.checkpoint import LAST
from qkv.train.recipe import model_spec
from qkv.train.sections import Data, PairRecipe, Text
from qkv.weights.folder import SOURCE, TARGET, AnyModel, Loaded


@dataclass(frozen=True)
class PairWork:
    """See `qkv.train.work.Work`."""

    recipe: PairRecipe
    pairs: EncodedPairs
    valid: list[Example]
    source: Tokeniser
    target: Tokeniser
    spec: spec.Model

    kinds = ("loss",)
    more_is_better = False
    notes = ()

    @property
    def metric(self) -> str:
        return self.recipe.valid.metric

    def digest(self) -> str:
        return self.pairs.digest()

    def write_down(self, folder: Path) -> None:
        self.source.save(folder / SOURCE)
        self.target.save(folder / TARGET)

    def check(self) -> None:
        self._batches().in_epoch(0)

    def from_place(self, epoch: int, index: int) -> Iterator[tuple[Place, Batch]]:
        return self._batches().from_place(epoch, index)

    def _batches(self) -> Batches:
        return Batches(self.pairs, self.recipe.train.batch_tokens, self.recipe.seed, self.recipe.train.workers)

    def prepare(self, part: Batch, step: int) -> seq2seq.Inputs:  # noqa: ARG002  # the same in every step
        return seq2seq.inputs(part, start=self.spec.start, end=self.spec.end)

    def losses(self, model: AnyModel, part: seq2seq.Inputs) -> tuple[Term, ...]:
        how = self.recipe.train
        total = seq2seq.loss(model, part, smoothing=how.smoothing, own=how.own, agree=how.agree)
        return (Term(total, len(part.labels)),)

    def model(self) -> AnyModel:
        return build(self.spec)

    def score(self, model: AnyModel) -> dict[str, float]:
        """Real decoding and the real metric."""
        how = Decoding(beams=self.recipe.valid.beams, unknown=self.recipe.data.unknown)
        found = evaluate(Loaded(model, self.source, self.target), self.valid, how)
        return {"per": found.per, "wer": found.wer}

    def say(self, model: AnyModel) -> list[str]:  # noqa: ARG002
        return []


def read_part(data: Data, part: str) -> list[Pair]:
    """The pairs of `train`, `valid` or `test`: from their own file, or held out of the training file."""
    path = getattr(data, part)
    if path is not None and not (part == "train" and data.hold_out):
        return _read(data, path)
    if part != "train" and part not in data.hold_out:
        raise InputError(f"the recipe has no '{part}' data; give data.{part}, or a share under data.hold_out")
    return hold_out(_read(data, data.train), data.hold_out)[part]


def _read(data: Data, path: str | list[str]) -> list[Pair]:
    files = [path] if isinstance(path, str) else path
    if len(files) != (2 if data.format == "aligned" else 1):
        wanted = "two files, [source, target]" if data.format == "aligned" else "one file"
        raise InputError(f"data.format {data.format} takes {wanted}, not {len(files)}")
    return read_pairs(
        data.format,
        files[0],
        target_path=files[1] if len(files) > 1 else None,
        stress=data.stress,
        source_field=data.source_field,
        target_field=data.target_field,
    )


def tokenisers(text: Text, pairs: list[Pair]) -> tuple[Tokeniser, Tokeniser]:
    """Each side's tokeniser, trained on the training pairs; one for both where the vocabulary is joint."""
    sources, targets = [p.source for p in pairs], [p.target for p in pairs]
    one, other = text.source, text.target
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
    """Reads the data and trains the tokenisers, or takes those that the run's folder already has."""
    pairs = read_part(recipe.data, "train")
    if all((folder / name).is_file() for name in (LAST, SOURCE, TARGET)):
        source, target = Tokeniser.load(folder / SOURCE), Tokeniser.load(folder / TARGET)
    else:
        source, target = tokenisers(recipe.text, pairs)
    s = model_spec(recipe, source=source.size, target=target.size, start=target.start, end=target.end)
    if recipe.train.own and not isinstance(s.decoder, spec.RecurrentDecoder):
        raise InputError("train.own: only a recurrent decoder can read its own outputs in training; set it to 0")
    valid = group(read_part(recipe.data, "valid"))
    if recipe.valid.unseen:
        seen = {p.source for p in pairs}
        valid = [e for e in valid if e.source not in seen]
    if not valid:
        raise InputError("no validation examples are left; see data.valid, data.hold_out and valid.unseen")
    if recipe.valid.examples is not None and recipe.valid.examples < len(valid):
        valid = [valid[i * len(valid) // recipe.valid.examples] for i in range(recipe.valid.examples)]
    encoded = _encode(recipe, pairs, source, target, s)
    assert s.source is not None
    if recipe.data.too_long == "drop":
        valid = [e for e in valid if len(source.encode(e.source)) < s.source.length]
    how = Decoding(unknown=recipe.data.unknown)  # what cannot be read is said before training, not hours into it
    source_ids(source, [e.source for e in valid], [e.where for e in valid], s.source.length - 1, how)
    return PairWork(recipe, encoded, valid, source, target, s)


def _encode(recipe: PairRecipe, pairs: list[Pair], source: Tokeniser, target: Tokeniser, s: spec.Model) -> EncodedPairs:
    assert s.source is not None
    assert s.target is not None
    sources, targets = source.encode_batch([p.source for p in pairs]), target.encode_batch([p.target for p in pairs])
    limits = s.source.length - 1, s.target.length - 1
    fits = [len(a) <= limits[0] and len(b) <= limits[1] for a, b in zip(sources, targets, strict=True)]
    if not all(fits) and recipe.data.too_long == "refuse":
        i = fits.index(False)
        said = f"{len(sources[i])} and {len(targets[i])} tokens, and the model takes at most {limits[0]}"
        raise InputError(f"{pairs[i].where}: {said}; set a larger model.length, or data.too_long: drop")
    kept = [i for i, fit in enumerate(fits) if fit]
    if not kept:
        raise InputError("every training pair is longer than model.length; set a larger one")
    return EncodedPairs([sources[i] for i in kept], [targets[i] for i in kept])
