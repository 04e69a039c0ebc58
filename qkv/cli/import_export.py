"""`qkv import` and `qkv export`: conversion of checkpoints from and to the Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.options import ModelName, OutputFolder, check_output_free, check_renamed, load_model

if TYPE_CHECKING:
    from qkv.checkpoints import ModelBundle

_MODEL = "Model"
MergeLora = Annotated[
    bool,
    typer.Option("--merge-lora", help="Merge LoRA adapters into the weights that they adapt.", rich_help_panel=_MODEL),
]
Head = Annotated[
    str | None,
    typer.Option(
        metavar="HEAD",
        help="Replace the head by a newly initialized one, such as sequence, token, span or choice.",
        rich_help_panel=_MODEL,
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="LABELS",
        help="Name the outputs of the new head, separated by commas.",
        rich_help_panel=_MODEL,
    ),
]


def import_checkpoint(
    model: ModelName,
    output: OutputFolder,
    head: Head = None,
    labels: Labels = None,
    merge_lora: MergeLora = False,
) -> None:
    """Convert a Hugging Face checkpoint to the format of qkv.

    Examples:
        qkv import bert-base-uncased --output models/bert
        qkv import bert-base-uncased -o models/nli --head sequence --labels yes,no
    """
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
    """Convert a model to a Hugging Face checkpoint, which transformers can load.

    Example:
        qkv export runs/sentiment --output exported/sentiment
    """
    from qkv.checkpoints import save
    from qkv.checkpoints.lora import merge_bundle

    check_output_free(output)
    bundle = load_model(model, "cpu")
    if merge_lora:
        bundle = merge_bundle(bundle)
    save(bundle, output, format="huggingface")
    _print_summary(bundle, output)


def _print_summary(bundle: ModelBundle, output: Path) -> None:
    count = sum(parameter.numel() for parameter in bundle.model.parameters())
    print(f"{output}: {bundle.model.spec.family}, {count:,} parameters")
    for description, names in (
        ("newly initialized", bundle.missing_keys),
        ("ignored unexpected keys", bundle.unexpected_keys),
    ):
        if names:
            print(f"{description}: {', '.join(names)}")
