"""`qkv import` and `qkv export`: conversion of checkpoints from and to the Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.options import ModelName, OutputFolder, check_output_free, check_renamed, load_model
from qkv.errors import InputError
from qkv.files import read_json

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


Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Base model of a PEFT adapter, if it is not the one that the adapter names.",
        rich_help_panel=_MODEL,
    ),
]
Adapter = Annotated[
    bool,
    typer.Option(
        "--adapter", help="Write only the LoRA weights and the head, as a PEFT adapter.", rich_help_panel=_MODEL
    ),
]


def import_checkpoint(
    model: ModelName,
    output: OutputFolder,
    head: Head = None,
    labels: Labels = None,
    base: Base = None,
    merge_lora: MergeLora = False,
) -> None:
    """Convert a Hugging Face checkpoint or a PEFT adapter to the format of qkv.

    Examples:
        qkv import bert-base-uncased --output models/bert
        qkv import bert-base-uncased -o models/nli --head sequence --labels yes,no
        qkv import adapters/nli -o models/nli --base models/bert --merge-lora
    """
    from qkv.checkpoints import load, save
    from qkv.checkpoints.lora import merge_bundle

    check_output_free(output)
    check_renamed("--head", head)
    names = None if labels is None else [name.strip() for name in labels.split(",")]
    bundle = load(model, head=head, labels=names, base=base)
    if merge_lora:
        bundle = merge_bundle(bundle)
    save(bundle, output)
    _print_summary(bundle, output)


def export_checkpoint(
    model: ModelName, output: OutputFolder, merge_lora: MergeLora = False, adapter: Adapter = False
) -> None:
    """Convert a model to a Hugging Face checkpoint, which transformers can load, to a PEFT adapter, or to word vectors.

    An output file that ends in .bin, .txt, .vec or .glove, also with .gz, gets the token embeddings, in the format of
    word2vec or GloVe.

    Examples:
        qkv export runs/sentiment --output exported/sentiment
        qkv export runs/sentiment --output adapters/sentiment --adapter
        qkv export runs/word2vec --output vectors.bin
    """
    from qkv.checkpoints import save
    from qkv.checkpoints.lora import merge_bundle
    from qkv.checkpoints.vector_files import is_vector_file

    if merge_lora and adapter:
        raise InputError("--adapter and --merge-lora exclude each other: a merged model has no adapter")
    if is_vector_file(output):
        _export_vectors(model, output, merge_lora or adapter)
        return
    check_output_free(output)
    bundle = load_model(model, "cpu")
    if merge_lora:
        bundle = merge_bundle(bundle)
    save(bundle, output, format="peft" if adapter else "huggingface")
    _print_summary(bundle, output)
    if adapter:
        print(f"base model: {read_json(output / 'adapter_config.json')['base_model_name_or_path']}")


def _export_vectors(model: str, output: Path, with_adapter: bool) -> None:
    from qkv.checkpoints.vector_files import write_vectors
    from qkv.checkpoints.word_vectors import model_vectors, plain_words

    if with_adapter:
        raise InputError("--adapter and --merge-lora are for models; word vectors have no LoRA weights")
    if output.exists():
        raise InputError(f"{output}: already exists; remove it first, or choose another name")
    words, vectors = plain_words(model_vectors(load_model(model, "cpu"), model))
    write_vectors(output, words, vectors)
    print(f"{output}: {len(words):,} words, {vectors.shape[1]} numbers each")


def _print_summary(bundle: ModelBundle, output: Path) -> None:
    count = sum(parameter.numel() for parameter in bundle.model.parameters())
    print(f"{output}: {bundle.model.spec.family}, {count:,} parameters")
    for description, names in (
        ("newly initialized", bundle.missing_keys),
        ("ignored unexpected keys", bundle.unexpected_keys),
    ):
        if names:
            print(f"{description}: {', '.join(names)}")
