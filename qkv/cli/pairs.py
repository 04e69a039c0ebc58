"""How `qkv eval` scores a run that learned from pairs: error rates of symbols, or figures of texts with intervals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.options import load_model, one_of
from qkv.cli.tables import number, show, span
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.evaluate import Scores

RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class AskedPairs:
    """What the command line says; None: as the recipe has it."""

    data: Path | None = None
    target: Path | None = None
    format: str | None = None
    beams: int | None = None
    length_penalty: float | None = None
    too_long: str | None = None
    unknown: str | None = None
    free: bool = False
    resamples: int | None = None


def prefix_of(model: str) -> str:
    """What stood before each source that a run learned from; nothing of any other model, and of several sets."""
    from qkv.cli.tasks import recipe_of
    from qkv.train.sections import PairRecipe

    if not (Path(model) / "recipe.yaml").is_file():
        return ""
    recipe = recipe_of(Path(model))
    return recipe.data.prefix if isinstance(recipe, PairRecipe) else ""


def prefixed(given: Any, prefix: str) -> Any:
    """A text with its prefix, unless somebody has already written it."""
    return given if not isinstance(given, str) or given.startswith(prefix) else prefix + given


def evaluate_pairs(
    run: Path, recipe: Any, asked: AskedPairs, output: Path | None, as_json: bool, device: str | None
) -> None:
    """Prints the figures of each set of pairs, and writes what was predicted."""
    from qkv.evaluate import evaluate, reference_loss
    from qkv.files import write_text
    from qkv.train.pairs import held_out, metrics_of

    if asked.resamples is not None and asked.resamples < 0:
        raise InputError("--bootstrap is 0 or more")
    how, data = _decoding(recipe, asked), _data(recipe, asked)
    loaded = load_model(run, device)
    rows, found = [], {}
    for name, examples in held_out(recipe, "test", loaded.source, loaded.model.spec, data).items():
        resamples = RESAMPLES if asked.resamples is None else asked.resamples
        scores = evaluate(loaded, examples, how, metrics_of(recipe), resamples=resamples)
        losses = {}
        if asked.free:
            losses = {"loss": reference_loss(loaded, examples)}
            losses["loss_free_running"] = reference_loss(loaded, examples, free=True)
        found[name] = scores, losses
        rows += [[e.source, p, *e.references] for e, p in zip(examples, scores.predictions, strict=True)]
    if output is not None:
        write_text(output, "".join("\t".join(" ".join(cell.split()) for cell in row) + "\n" for row in rows))
    if as_json:
        told = {name: _plain(*one) for name, one in found.items()}
        print(json.dumps(told if len(told) > 1 else next(iter(told.values())), ensure_ascii=False))
        return
    for place, (name, one) in enumerate(found.items()):
        if len(found) > 1:
            print(f"{chr(10) if place else ''}{name}")
        _print(*one)


def _data(recipe: Any, asked: AskedPairs) -> Any:
    """The recipe's, or a file of its form; where it learned several sets, with the prefixes in the file."""
    from qkv.train.sections import Data

    data = recipe.data
    if asked.data is None:
        if asked.target is not None or asked.format is not None:
            raise InputError("--target and --format go with --data")
        return data
    kind = asked.format or next(iter(data.sets.values())).format
    one_of("--format", kind, *_formats())
    files = str(asked.data) if asked.target is None else [str(asked.data), str(asked.target)]
    if not data.mix:
        return dataclasses.replace(data, format=kind, test=files)
    limits = {name: getattr(data, name) for name in ("source_length", "target_length", "too_long", "unknown")}
    return Data(format=kind, train=files, test=files, **limits)  # type: ignore[arg-type]  # it is one of those


def _formats() -> tuple[str, ...]:
    from qkv.data.readers import FORMATS

    return (*FORMATS, "parallel", "summaries", "scitldr")


def _decoding(recipe: Any, asked: AskedPairs) -> Any:
    from qkv.decode import Decoding

    usual = "truncate" if recipe.data.too_long == "truncate" else "refuse"
    return Decoding(
        beams=recipe.test.beams if asked.beams is None else asked.beams,
        length_penalty=recipe.test.length_penalty if asked.length_penalty is None else asked.length_penalty,
        too_long=one_of("--too-long", asked.too_long or usual, "refuse", "truncate"),
        unknown=one_of("--unknown", asked.unknown or recipe.data.unknown, "refuse", "replace"),
        limit=recipe.data.target_length,
    )


def _plain(scores: Scores, losses: dict[str, float]) -> dict[str, Any]:
    told: dict[str, Any] = scores.values | {"examples": scores.examples} | losses
    intervals = {f.name: [f.interval.low, f.interval.high] for f in scores.figures if f.interval is not None}
    signatures = {f.name: f.signature for f in scores.figures if f.signature}
    return told | ({"intervals": intervals} if intervals else {}) | ({"signatures": signatures} if signatures else {})


def _print(scores: Scores, losses: dict[str, float]) -> None:
    values, texts = scores.values, [f for f in scores.figures if f.name not in ("per", "wer")]
    print(f"examples            {scores.examples:>8,}")
    if "per" in values:
        print(f"token error rate    {values['per']:>8.2%}   (phoneme error rate, where tokens are phonemes)")
    if "wer" in values:
        print(f"sequence error rate {values['wer']:>8.2%}   (word error rate, where a sequence is a word)")
    if losses:
        print(f"loss, with teacher  {losses['loss']:>8.4f}   (mean negative log-probability a token)")
        print(f"loss, free-running  {losses['loss_free_running']:>8.4f}")
    if not texts:
        return
    between = any(figure.interval for figure in texts)
    rows = [[f.name, number(f.value, f.digits)] for f in texts]
    if between:
        spans = [span(f.interval.low, f.interval.high, f.digits) if f.interval else "" for f in texts]
        rows = [[*row, told] for row, told in zip(rows, spans, strict=True)]
    print()
    show(["figure", "value", *(["95 % interval"] if between else [])], rows)
    print()
    for signature, names in _signed(texts).items():
        print(f"{', '.join(names)}: {signature}")


def _signed(figures: list[Any]) -> dict[str, list[str]]:
    """Each signature with the figures that it belongs to."""
    found: dict[str, list[str]] = {}
    for figure in figures:
        if figure.signature:
            found.setdefault(figure.signature, []).append(figure.name)
    return found
