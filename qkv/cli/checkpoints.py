"""Commands about checkpoints: the families that there are, and models in and out of Hugging Face's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.options import Json, ModelName, load_model
from qkv.errors import InputError

Output = Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")]
MergeLora = Annotated[
    bool, typer.Option("--merge", help="Work adapters into the matrices that they sit on: a plain model, of one piece.")
]


def list_families(as_json: Json = False) -> None:
    """The families: their sizes with parameters, the heads they have, the paper they come from."""
    import json

    from qkv.analysis.family_table import family_rows, render_family_table

    rows = family_rows()
    print(json.dumps(rows, indent=2) if as_json else render_family_table(rows))


def import_checkpoint(
    model: ModelName,
    output: Output,
    head: Annotated[
        str | None, typer.Option(help="Another head than the checkpoint's own: sequence, token, span, choice, …")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Names of that head's outputs, with commas.")] = None,
    merge: MergeLora = False,
) -> None:
    """A Hugging Face checkpoint into qkv's own format; with --head under another head, whose parameters are fresh."""
    from qkv.checkpoints import load, save
    from qkv.checkpoints.lora import merge_bundle

    check_output_free(output)
    names = None if labels is None else [name.strip() for name in labels.split(",")]
    loaded = load(model, head=head, labels=names)
    if merge:
        loaded = merge_bundle(loaded)
    save(loaded, output)
    _print_summary(loaded, output)


def export_checkpoint(model: ModelName, output: Output, merge: MergeLora = False) -> None:
    """A model as a Hugging Face checkpoint, which transformers loads."""
    from qkv.checkpoints import save
    from qkv.checkpoints.lora import merge_bundle

    check_output_free(output)
    loaded = load_model(model, "cpu")
    if merge:
        loaded = merge_bundle(loaded)
    save(loaded, output, format="huggingface")
    _print_summary(loaded, output)


def check_output_free(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: is there already; choose another folder, or remove it first")


def _print_summary(loaded: Any, output: Path) -> None:
    count = sum(parameter.numel() for parameter in loaded.model.parameters())
    print(f"{output}: {loaded.model.spec.family}, {count:,} parameters")
    for description, names in (("fresh, to be trained", loaded.fresh), ("left out of the checkpoint", loaded.unused)):
        if names:
            print(f"{description}: {', '.join(names)}")
