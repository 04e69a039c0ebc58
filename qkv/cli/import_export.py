"""The commands that bring models in and out of Hugging Face's format: import, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.options import ModelName, OutputFolder, check_output_free, check_renamed, load_model

MergeLora = Annotated[
    bool,
    typer.Option("--merge-lora", help="Work adapters into the matrices that they sit on: a plain model, of one piece."),
]


def import_checkpoint(
    model: ModelName,
    output: OutputFolder,
    head: Annotated[
        str | None, typer.Option(help="Another head than the checkpoint's own: sequence, token, span, choice, …")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Names of that head's outputs, with commas.")] = None,
    merge_lora: MergeLora = False,
) -> None:
    """A Hugging Face checkpoint into qkv's own format; with --head under another head, whose parameters are fresh."""
    from qkv.checkpoints import load, save
    from qkv.checkpoints.lora import merge_bundle

    check_output_free(output)
    check_renamed("--head", head)
    names = None if labels is None else [name.strip() for name in labels.split(",")]
    bundle = load(model, head=head, labels=names)
    if merge_lora:
        bundle = merge_bundle(bundle)
    save(bundle, output)
    _print_summary(bundle, output)


def export_checkpoint(model: ModelName, output: OutputFolder, merge_lora: MergeLora = False) -> None:
    """A model as a Hugging Face checkpoint, which transformers loads."""
    from qkv.checkpoints import save
    from qkv.checkpoints.lora import merge_bundle

    check_output_free(output)
    bundle = load_model(model, "cpu")
    if merge_lora:
        bundle = merge_bundle(bundle)
    save(bundle, output, format="huggingface")
    _print_summary(bundle, output)


def _print_summary(bundle: Any, output: Path) -> None:
    count = sum(parameter.numel() for parameter in bundle.model.parameters())
    print(f"{output}: {bundle.model.spec.family}, {count:,} parameters")
    for description, names in (("newly initialized, to be trained", bundle.missing_keys), ("unexpected keys, left out", bundle.unexpected_keys)):
        if names:
            print(f"{description}: {', '.join(names)}")
