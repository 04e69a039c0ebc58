"""Commands that train a model and look at one that was trained here: train, eval, look, cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qkv.cli.options import Device, RunFolder, TooLong, check_device, load_model, one_of
from qkv.errors import InputError


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML).")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="train.steps=100 …")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder; by default runs/NAME.")
    ] = None,
    device: Device = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
    find_lr: Annotated[
        bool, typer.Option("--find-lr", help="Train nothing: raise the rate from step to step and suggest one.")
    ] = False,
) -> None:
    """Train what RECIPE describes. Kill it at any moment: the same command goes on, as if it had never stopped."""
    from qkv.train import fit, read_recipe
    from qkv.train.progress import events, say, show

    read = read_recipe(recipe, changes or [])
    folder = output or Path("runs") / read.name
    check_device(device)
    if find_lr:
        _find_rate(read, folder, device)
        return
    records = fit(read, folder, device=device)
    if tensorboard:
        records = events(records, folder)
    if not show(records, read.train.steps):
        say(f"{folder} is already trained; try: qkv predict {folder}")
        return
    say(f"trained: {folder}")


def _find_rate(recipe: Any, folder: Path, device: str | None) -> None:
    from qkv.files import write_text
    from qkv.train.fit import find_rate

    found = find_rate(recipe, device=device)
    picture, table = folder.with_name(f"{folder.name}-rates.png"), folder.with_name(f"{folder.name}-rates.tsv")
    found.plot(picture)
    write_text(table, found.tsv())
    print(f"{picture}: the loss over the rate ({table.name}: as a table)")
    print(f"suggested: train.learning_rate={found.suggestion():.1e}")


def evaluate_command(
    run: RunFolder,
    data: Annotated[
        Path | None, typer.Option("--data", "-d", help="Pairs to score on; by default the recipe's test part.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="The target file, where --data is one of two aligned files.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="aligned, tsv, jsonl or cmudict; of text lines, blank, …; by default as in training."),
    ] = None,
    beams: Annotated[int | None, typer.Option(help="Beam width; by default the recipe's.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="As in predict; by default the recipe's.")] = None,
    free: Annotated[
        bool, typer.Option("--free", help="Also the loss of the references with and without a teacher.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write source, output and references as TSV.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    too_long: TooLong = "refuse",
    unknown: Annotated[str | None, typer.Option(help="As in predict; by default the recipe's.")] = None,
    device: Device = None,
) -> None:
    """Error rates on held-out pairs, where any listed reference counts as right; perplexity of held-out text.

    Of text, --data is a file or folder of documents; its format is as its name ends, else as in training.
    """
    from qkv.data.pair import group
    from qkv.decode import Decoding
    from qkv.evaluate import evaluate, reference_loss
    from qkv.files import write_text
    from qkv.train.pretraining import perplexity
    from qkv.train.sections import TextRecipe

    recipe = _recipe_of(run)
    if isinstance(recipe, TextRecipe):
        if any(given is not None for given in (target, beams, length_penalty, output, unknown)) or free:
            said = "of the options only --data and --format go with that"
            raise InputError(f"a model of text is scored by its perplexity; {said}")
        if data is None and format is not None:
            raise InputError("--format goes with --data")
        found = perplexity(load_model(run, device), recipe, None if data is None else [str(data)], format)
        _print_perplexity(found, as_json)
        return
    examples = group(_pairs(recipe, data, target, format))
    how = Decoding(
        beams=recipe.test.beams if beams is None else beams,
        length_penalty=recipe.test.length_penalty if length_penalty is None else length_penalty,
        too_long=one_of("--too-long", too_long, "refuse", "truncate"),
        unknown=one_of("--unknown", unknown or recipe.data.unknown, "refuse", "replace"),
    )
    loaded = load_model(run, device)
    scores = evaluate(loaded, examples, how)
    values: dict[str, float] = {"per": scores.per, "wer": scores.wer, "examples": scores.examples}
    if free:
        values["loss"] = reference_loss(loaded, examples)
        values["loss_free_running"] = reference_loss(loaded, examples, free=True)
    if output is not None:
        rows = zip(examples, scores.predictions, strict=True)
        write_text(output, "".join("\t".join([e.source, p, *e.references]) + "\n" for e, p in rows))
    _print_scores(values, as_json)


def look(
    run: RunFolder,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Inputs, a panel each.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .svg or .pdf.")] = Path("map.png"),
    target: Annotated[list[str] | None, typer.Option(help="Outputs to align with, instead of the model's own.")] = None,
    layer: Annotated[
        str | None, typer.Option(help="Which attention, such as decoder.1.cross; by default the last.")
    ] = None,
    heads: Annotated[str, typer.Option(help="mean, each, or numbers such as 0,2.")] = "mean",
    device: Device = None,
) -> None:
    """The alignment plot: input across, output down, a panel a head or their mean."""
    from qkv.look.alignment import plot_alignment, plot_alignments
    from qkv.look.words import alignments

    if target is not None and len(target) != len(texts):
        raise InputError(f"{len(texts)} texts and {len(target)} targets; give one --target for each text")
    chosen = _heads(heads)
    found = alignments(load_model(run, device), texts, target, layer)
    if len(found) == 1:
        one = found[0]
        plot_alignment(one.weights, one.source, one.target, output, title=texts[0], heads=chosen)
    else:
        if chosen != "mean":
            raise InputError("--heads shows the heads of one text; give one TEXT, or leave it at mean")
        items = [(a.weights.mean(0), a.source, a.target, text) for a, text in zip(found, texts, strict=True)]
        plot_alignments(items, output)
    print(f"{output}: attention of {found[0].layer}")


def cost(
    what: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run's folder.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As in train.")] = None,
    source_length: Annotated[
        int | None, typer.Option("--source-length", "-m", help="M; by default the data's mean.")
    ] = None,
    target_length: Annotated[
        int | None, typer.Option("--target-length", "-n", help="N; by default the data's mean.")
    ] = None,
    vocabulary: Annotated[
        str | None, typer.Option(help="Sizes such as 30,40 where a recipe's data is not at hand.")
    ] = None,
) -> None:
    """Parameters by part, FLOPs a token and a run, memory, and the three attentions' costs."""
    from qkv.look.bill import render
    from qkv.look.cost import cost as count
    from qkv.train.measure import Measured, measure

    measured: Measured = measure(what, changes or [], vocabulary)
    recipe = measured.recipe
    print(
        render(
            count(
                measured.spec,
                source_length=measured.source_length if source_length is None else source_length,
                target_length=measured.target_length if target_length is None else target_length,
                batch_tokens=recipe.train.batch_tokens if recipe else None,
                steps=recipe.train.steps if recipe else None,
            )
        )
    )


def _recipe_of(run: Path) -> Any:
    from qkv.train import read_recipe

    if not run.is_dir():
        raise InputError(f"{run}: no such folder; train a model first (qkv train RECIPE), or check the path")
    return read_recipe(run / "recipe.yaml")


def _pairs(recipe: Any, data: Path | None, target: Path | None, format: str | None) -> Any:
    import dataclasses

    from qkv.data.readers import FORMATS
    from qkv.train.pairs import read_part

    if data is None and (target is not None or format is not None):
        raise InputError("--target and --format go with --data")
    if data is None:
        return read_part(recipe.data, "test")
    kind = one_of("--format", format or recipe.data.format, *FORMATS)
    files = str(data) if target is None else [str(data), str(target)]
    return read_part(dataclasses.replace(recipe.data, format=kind, test=files), "test")


def _heads(text: str) -> Literal["mean", "each"] | list[int]:
    if text in ("mean", "each"):
        return text  # type: ignore[return-value]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--heads is mean, each, or numbers such as 0,2, not '{text}'") from None


def _print_perplexity(values: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    print(f"tokens      {int(values['tokens']):>10,}")
    print(f"perplexity  {values['perplexity']:>10,.3f}   (of the tokens that are asked for; loss {values['loss']:.4f})")
    if "next_sentence_loss" in values:
        print(f"next-sentence loss {values['next_sentence_loss']:.4f}")


def _print_scores(values: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    print(f"examples            {int(values['examples']):>8,}")
    print(f"token error rate    {values['per']:>8.2%}   (phoneme error rate, where tokens are phonemes)")
    print(f"sequence error rate {values['wer']:>8.2%}   (word error rate, where a sequence is a word)")
    if "loss" in values:
        print(f"loss, with teacher  {values['loss']:>8.4f}   (mean negative log-probability a token)")
        print(f"loss, free-running  {values['loss_free_running']:>8.4f}")
