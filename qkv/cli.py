"""The command line: train, predict, eval, look, cost. A mistake of the user's is one line and exit code 2."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qkv.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention models: train them, use them, score them, watch them attend.",
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A trained run's folder.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]
Beams = Annotated[int, typer.Option(help="Beam width; 1 is greedy.")]
Penalty = Annotated[float, typer.Option(help="Beams are ranked by log-probability / length^penalty.")]
Limit = Annotated[int | None, typer.Option(help="Longest output in tokens; by default twice the input and 16 more.")]
TooLong = Annotated[str, typer.Option(help="An input over the model's length: refuse or truncate.")]
Unknown = Annotated[str, typer.Option(help="A token that was never seen in training: refuse or replace.")]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML).")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="train.steps=100 …")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder; by default runs/NAME.")
    ] = None,
    device: Device = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
) -> None:
    """Train what RECIPE describes. Kill it at any moment: the same command goes on, as if it had never stopped."""
    from qkv.train import fit, read_recipe
    from qkv.train.progress import events, show

    read = read_recipe(recipe, changes or [])
    folder = output or Path("runs") / read.name
    _check_device(device)
    records = fit(read, folder, device=device)
    if tensorboard:
        records = events(records, folder)
    if not show(records, read.train.steps):
        print(f"{folder} is already trained; try: qkv predict {folder}")
        return
    print(f"trained: {folder}")


@app.command()
def predict(
    run: RunFolder,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Inputs; - reads them from stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="One input a line.")] = None,
    best: Annotated[int, typer.Option(help="How many outputs an input gets (n-best).")] = 1,
    scores: Annotated[bool, typer.Option("--scores", help="Print log-probabilities too.")] = False,
    beams: Beams = 1,
    length_penalty: Penalty = 1.0,
    sample: Annotated[bool, typer.Option("--sample", help="Draw outputs instead of searching for the best.")] = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    limit: Limit = None,
    too_long: TooLong = "refuse",
    unknown: Unknown = "refuse",
    device: Device = None,
) -> None:
    """Outputs for TEXT, a file or stdin, one a line; with none of these, asks for them at a prompt."""
    from qkv.decode import Decoding, Prediction
    from qkv.decode import predict as outputs

    how = Decoding(
        beams=max(beams, 1 if sample else best) if beams == 1 else beams,
        length_penalty=length_penalty,
        best=best,
        sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        limit=limit,
        too_long=_one_of("--too-long", too_long, "refuse", "truncate"),
        unknown=_one_of("--unknown", unknown, "refuse", "replace"),
    )

    def lines(text: str, found: list[Prediction]) -> list[str]:
        if best == 1 and not scores:
            return [p.text for p in found]
        return [f"{text}\t{p.score:.4f}\t{p.text}" for p in found]

    inputs = _inputs(texts or [], file)
    loaded = _load(run, device)
    if inputs is None:
        _prompt(lambda text: lines(text, outputs(loaded, [text], how)[0]))
        return
    found = outputs(loaded, [text for text, _ in inputs], how, [where for _, where in inputs])
    for (text, _), predictions in zip(inputs, found, strict=True):
        print("\n".join(lines(text, predictions)))


@app.command("eval")
def evaluate_command(
    run: RunFolder,
    data: Annotated[
        Path | None, typer.Option("--data", "-d", help="Pairs to score on; by default the recipe's test part.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="The target file, where --data is one of two aligned files.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="aligned, tsv, jsonl or cmudict; by default as in training.")
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
    """Error rates on held-out pairs; any listed reference counts as right."""
    from qkv.data.pair import group
    from qkv.decode import Decoding
    from qkv.evaluate import evaluate, reference_loss
    from qkv.files import write_text

    recipe = _recipe_of(run)
    examples = group(_pairs(recipe, data, target, format))
    how = Decoding(
        beams=recipe.test.beams if beams is None else beams,
        length_penalty=recipe.test.length_penalty if length_penalty is None else length_penalty,
        too_long=_one_of("--too-long", too_long, "refuse", "truncate"),
        unknown=_one_of("--unknown", unknown or recipe.data.unknown, "refuse", "replace"),
    )
    loaded = _load(run, device)
    scores = evaluate(loaded, examples, how)
    values: dict[str, float] = {"per": scores.per, "wer": scores.wer, "examples": scores.examples}
    if free:
        values["loss"] = reference_loss(loaded, examples)
        values["loss_free_running"] = reference_loss(loaded, examples, free=True)
    if output is not None:
        rows = zip(examples, scores.predictions, strict=True)
        write_text(output, "".join("\t".join([e.source, p, *e.references]) + "\n" for e, p in rows))
    _print_scores(values, as_json)


@app.command()
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
    found = alignments(_load(run, device), texts, target, layer)
    if len(found) == 1:
        one = found[0]
        plot_alignment(one.weights, one.source, one.target, output, title=texts[0], heads=chosen)
    else:
        if chosen != "mean":
            raise InputError("--heads shows the heads of one text; give one TEXT, or leave it at mean")
        items = [(a.weights.mean(0), a.source, a.target, text) for a, text in zip(found, texts, strict=True)]
        plot_alignments(items, output)
    print(f"{output}: attention of {found[0].layer}")


@app.command()
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


def _one_of(option: str, value: str, *known: str) -> Any:
    if value not in known:
        raise InputError(f"{option} is {' or '.join(known)}, not '{value}'")
    return value


def _check_device(device: str | None) -> None:
    import torch

    if device is None:
        return
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"--device is cpu or cuda, not '{device}'")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no GPU that torch can use; leave the option out")


def _load(run: Path, device: str | None) -> Any:
    import torch

    from qkv.weights import load

    _check_device(device)
    return load(run, device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _recipe_of(run: Path) -> Any:
    from qkv.train import read_recipe

    if not run.is_dir():
        raise InputError(f"{run}: no such folder; train a model first (qkv train RECIPE), or check the path")
    return read_recipe(run / "recipe.yaml")


def _pairs(recipe: Any, data: Path | None, target: Path | None, format: str | None) -> Any:
    import dataclasses

    from qkv.data.readers import FORMATS
    from qkv.train.task import read_part

    if data is None and (target is not None or format is not None):
        raise InputError("--target and --format go with --data")
    if data is None:
        return read_part(recipe.data, "test")
    kind = _one_of("--format", format or recipe.data.format, *FORMATS)
    files = str(data) if target is None else [str(data), str(target)]
    return read_part(dataclasses.replace(recipe.data, format=kind, test=files), "test")


def _inputs(texts: list[str], file: Path | None) -> list[tuple[str, str]] | None:
    """Each input with its place; None: ask at a prompt."""
    from qkv.data.readers import read_sources

    if file is not None and texts:
        raise InputError("give TEXT or --file, not both")
    if file is not None:
        return read_sources(str(file))
    if texts == ["-"] or (not texts and not sys.stdin.isatty()):
        lines = sys.stdin.read().removesuffix("\n").split("\n")
        return [(line.removesuffix("\r"), f"stdin:{number}") for number, line in enumerate(lines, 1)]
    return [(text, f"'{text}'") for text in texts] if texts else None


def _prompt(answer: Any) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives the prompt history and editing
    print("Type a text and press Enter; an empty line ends.")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            return
        try:
            print("\n".join(answer(text)))
        except InputError as error:  # a slip at the prompt does not end the session
            print(error)


def _heads(text: str) -> Literal["mean", "each"] | list[int]:
    if text in ("mean", "each"):
        return text  # type: ignore[return-value]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--heads is mean, each, or numbers such as 0,2, not '{text}'") from None


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


_INTERRUPTED = 130  # what shells give for Ctrl-C
_STOPPED = "qkv: stopped; a training run goes on from its last checkpoint when the same command is given again"


def main() -> None:
    """The entry point: says a user's mistake in one line."""
    try:
        code = app(standalone_mode=False) or 0
        _end(_STOPPED if code == _INTERRUPTED else "", code)  # typer makes a return value of Ctrl-C
    except InputError as error:
        _end(f"qkv: {error}", 2)
    except (typer.Abort, KeyboardInterrupt):
        _end(_STOPPED, _INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has gone
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        said = error.format_message()  # an option or command that does not exist; nothing: the help was shown
        _end(f"qkv: {said} (see qkv --help)" if said else "", 2)


def _end(message: str, code: int) -> None:
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
