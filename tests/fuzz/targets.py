"""What is damaged and what is done with it: tiny models, tokenizers, recipes, runs, texts and data of every format."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

sys.path.extend(str(Path(__file__).parents[1] / "unit" / name) for name in ("train", "tokenization", "tasks"))
import reviews
import tokenizer_folders
import words
from task_models import CASES, looking
from tokenizer_folders import spm

import qkv
from qkv import families
from qkv.data.corpora.corpus import Corpus
from qkv.data.formats import read
from qkv.data.image_processor import ImageProcessor
from qkv.generation.config import GenerationConfig
from qkv.nn.construction import build_on_meta
from qkv.recipe import read_recipe
from qkv.recipe.model_section import model_config
from qkv.tasks.predictor import Predictor
from qkv.tokenization.hf import load_tokenizer, load_tokenizers
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer
from qkv.train.fit import fit
from tests.fuzz.samples import write_samples

ROOT = Path(__file__).parents[2]
TEXTS = ["the cat was good", "a dog"]
Operation = Callable[[Path], object]


@dataclass(frozen=True)
class Target:
    """A folder of valid files, and what is done with its damaged copy, whose path is the working directory."""

    name: str
    folder: Path
    operation: Operation
    suffixes: tuple[str, ...] = ()  # of the files that are damaged; none: all

    def is_editable(self, path: Path) -> bool:
        return not self.suffixes or path.name.endswith(self.suffixes)


# ---- operations -----------------------------------------------------------------------------------------------------


def use_model(folder: Path, inputs: list[Any] | None = None) -> None:
    config = GenerationConfig(max_new_tokens=5, on_too_long="truncate", on_unknown="replace")
    predictor = Predictor.load(folder / "model", "cpu", config)
    predictor(inputs or TEXTS)


def use_masked(folder: Path) -> None:
    use_model(folder, ["the [MASK] was good"])


def use_image(folder: Path) -> None:
    use_model(folder, [folder / "a.png"])


def embed_image(folder: Path) -> None:
    ImageProcessor.load(folder / "preprocessor_config.json").preprocess(folder / "a.png")


def use_tokenizers(folder: Path) -> None:
    tokenizers = load_tokenizers(folder, None, families.tokenizer_templates())
    for tokenizer in dict.fromkeys(tokenizers or ()):
        _use_tokenizer(tokenizer)


def use_tokenizer_file(folder: Path) -> None:
    _use_tokenizer(load_tokenizer(folder / "any.json", families.tokenizer_templates()))


def _use_tokenizer(tokenizer: Tokenizer) -> None:
    for text in ("the cats sat, unhappily! é 😀 \u202e", "x" * 300, "", "a [MASK] </s> b"):
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
    tokenizer.encode_plus_batch([*TEXTS, ("a", "b")], parse_special_tokens=True)
    tokenizer.encode_pretokenized(["the", "cat"])
    tokenizer.display_tokens("the cat")


def use_recipe(folder: Path) -> None:
    recipe = read_recipe(next(iter(sorted(folder.glob("*.yaml"))), folder / "missing.yaml"))
    model = getattr(recipe, "model", None)
    family = getattr(model, "family", None)
    if family is None:
        return
    module, config = families.get_family(family), model_config(recipe, "recipe")
    defaults = module.make_spec.__kwdefaults__ or {}
    sizes = {side: 100 for side in ("source_vocab_size", "target_vocab_size") if side in defaults}
    build_on_meta(module.make_spec(config, **sizes))


def resume_run(folder: Path) -> None:
    for _ in fit(read_recipe(folder / "run" / "recipe.yaml"), folder / "run", device="cpu"):
        pass


def use_corpus(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        return
    format = "jsonl" if ".jsonl" in files[0].name else "line_per_document"
    lines = [document.text for document in Corpus([str(files[0])], format=format)]
    train_tokenizer("bpe", lines, vocab_size=300)


def reader_of(name: str, target: str, columns: dict[str, Any]) -> Operation:
    def read_format(folder: Path) -> None:
        # in the order of the hash of the folder's name both policies would be used; skipping hides no error
        read(name, Path(target), split="train", columns=columns, skip_bad=len(list(folder.iterdir())) % 2 == 0)

    return read_format


# ---- folders --------------------------------------------------------------------------------------------------------


def _save(bundle: qkv.ModelBundle, folder: Path, format: Any = "huggingface") -> None:
    qkv.save(bundle, folder / "model", format)


def _headed(native: Path, head: str | None) -> qkv.ModelBundle:
    labels = ("bad", "good") if head in ("sequence", "token") else None
    return qkv.load(native, head=head, labels=labels)


def _write_checkpoints(root: Path) -> None:
    heads = {"bert": ("masked_lm", "sequence", "token", "span"), "roberta": ("sequence",), "gpt2": ("causal_lm",)}
    heads |= {"t5": ("seq2seq_lm",), "bart": ("seq2seq_lm",)}
    for family, names in heads.items():
        native = root / "native" / family / "model"
        reviews.write_model(family, native)
        for name in names:
            folder = root / "checkpoint" / f"{family}-{name}"
            try:
                _save(_headed(native, name), folder)
            except qkv.InputError:
                _save(qkv.load(native), folder)
    case = CASES["image_classification"]
    task = case.make()
    folder = root / "checkpoint" / "vit"
    _save(looking(task, task.labels(case.examples)), folder)
    Image.new("L", (8, 8), 90).save(folder / "a.png")
    for name in ("bert-sequence", "gpt2-causal_lm"):
        folder = root / "bin" / name
        shutil.copytree(root / "checkpoint" / name, folder)
        weights = folder / "model" / "model.safetensors"
        torch.save(load_file(weights), folder / "model" / "pytorch_model.bin")
        weights.unlink()


def _write_runs(root: Path) -> None:
    for family in ("transformer", "rnn"):
        folder = root / "progress" / family
        folder.mkdir(parents=True)
        words.write_task(folder, family)
        recipe_file = folder / f"{family}.yaml"
        recipe_file.write_text(recipe_file.read_text().replace(f"{folder}/", ""))
        _in_folder(folder, lambda recipe_file=recipe_file: _interrupt(recipe_file))
        finished = root / "native" / family
        shutil.copytree(folder, finished)
        _in_folder(finished, lambda: [*fit(read_recipe("run/recipe.yaml"), "run", device="cpu")])
        (finished / "run").rename(finished / "model")
    folder = root / "lora" / "bert"
    folder.mkdir(parents=True)
    shutil.copytree(root / "native" / "bert" / "model", folder / "base")
    reviews.write_reviews(folder / "mine.csv", 20)
    (folder / "recipe.yaml").write_text(reviews.recipe_text(Path("base"), Path("mine.csv")))
    lora = "finetune.lora={rank: 2, target_modules: [q, v]}"
    _in_folder(folder, lambda: [*fit(read_recipe("recipe.yaml", [lora]), "model", device="cpu")])


def _write_adapter(root: Path) -> None:
    """Write a LoRA run as an adapter of PEFT, with its base model inside of it."""
    folder = root / "lora" / "peft"
    folder.mkdir()
    _in_folder(root / "lora" / "bert", lambda: qkv.save(qkv.load("model"), folder / "model", "peft"))
    path = folder / "model" / "adapter_config.json"
    path.write_text(path.read_text().replace(str(folder / "model"), "model"))  # relative to the folder of a case
    assert str(root) not in path.read_text()


def _interrupt(recipe_file: Path) -> None:
    """Train until there is a checkpoint to resume from, shortly before the end."""
    records = fit(read_recipe(recipe_file.name), "run", device="cpu")
    for record in records:
        if (Path("run") / "last.safetensors").is_file() and getattr(record, "step", 0) >= 8:
            break
    records.close()  # type: ignore[attr-defined]


def _in_folder(folder: Path, action: Callable[[], object]) -> None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        action()
    finally:
        os.chdir(before)


def _write_tokenizers(root: Path) -> None:
    folders = {name: root / "tokenizer" / name for name in ("vocab-txt", "merges", "pieces", "marian", *FILES)}
    for folder in folders.values():
        folder.mkdir(parents=True)
    tokenizer_folders.bert(folders["vocab-txt"], do_lower_case=True, tokenizer_class="BertTokenizer")
    tokenizer_folders.bpe(folders["merges"], ["<|endoftext|>"])
    tokenizer_folders.pieces(folders["pieces"])
    tokenizer_folders.put(folders["pieces"], tokenizer_config={"tokenizer_class": "T5Tokenizer"})
    letters = [("▁", -3.0, 1), ("▁the", -2.0, 1), *((letter, -5.0, 1) for letter in "thecasx")]
    for name in ("source.spm", "target.spm"):
        (folders["marian"] / name).write_bytes(spm(*letters))
    pieces = ["</s>", "<unk>", *(piece for piece, _, _ in letters), "<pad>"]
    tokenizer_folders.put(folders["marian"], vocab={piece: number for number, piece in enumerate(pieces)})
    lines = ["the cats sat on the mat", "unhappily they were good"] * 5
    for family in FILES:
        template = families.get_family(family).TOKENIZER_TEMPLATE
        tokenizer = train_tokenizer(template.kind, lines, vocab_size=330, template=template)
        tokenizer.save(folders[family] / "any.json")
        plain = json.loads((folders[family] / "any.json").read_text())["tokenizer"]
        folder = root / "tokenizer" / f"{family}-plain"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(plain))
    for kind in ("character", "whitespace", "bpe"):
        folder = root / "tokenizer" / kind
        folder.mkdir()
        train_tokenizer(kind, lines, vocab_size=300).save(folder / "any.json")


FILES = ("bert", "gpt2", "t5")  # families whose trained tokenizers are files


def _write_texts(root: Path) -> None:
    text = "the cat sat\na dog was here\n\nmore text é\n" * 4
    contents = {"plain/a.txt": text.encode(), "gzip/a.txt.gz": gzip.compress(text.encode())}
    contents["jsonl/a.jsonl"] = "".join(json.dumps({"text": line}) + "\n" for line in text.splitlines()).encode()
    for name, content in contents.items():
        path = root / "text" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)


def build_corpus(root: Path) -> None:
    """Write the valid folders of all classes."""
    torch.manual_seed(0)
    _write_checkpoints(root)
    _write_runs(root)
    _write_adapter(root)
    _write_tokenizers(root)
    _write_texts(root)
    shutil.copytree(root / "checkpoint" / "vit" / "model", root / "processor" / "vit")
    for path in (root / "processor" / "vit").iterdir():
        if path.suffix != ".json" or path.name == "config.json":
            path.unlink()
    Image.new("L", (9, 8), 90).save(root / "processor" / "vit" / "a.png")
    for path in (ROOT / "qkv" / "recipe" / "library").glob("*.yaml"):
        (root / "recipe" / path.stem).mkdir(parents=True)
        shutil.copy(path, root / "recipe" / path.stem)
    (root / "data.json").write_text(json.dumps(write_samples(root / "data")))


def list_targets(root: Path) -> dict[str, list[Target]]:
    """Return the targets of each class."""
    samples = json.loads((root / "data.json").read_text())
    question = lambda folder: use_model(folder, [("who?", "the cat was good")])  # noqa: E731
    operations: dict[str, Operation] = {"checkpoint/vit": use_image, "checkpoint/bert-span": question}
    operations |= {"checkpoint/bert-masked_lm": use_masked, "native/bert": use_masked}
    operations["native/roberta"] = lambda folder: use_model(folder, ["the <mask> was good"])

    def each(name: str, operation: Operation, suffixes: tuple[str, ...] = ()) -> list[Target]:
        folders = sorted((root / name).iterdir())
        return [
            Target(f"{name}/{folder.name}", folder, operations.get(f"{name}/{folder.name}", operation), suffixes)
            for folder in folders
        ]

    tokenizers = each("tokenizer", use_tokenizers)
    tokenizers = [
        Target(one.name, one.folder, use_tokenizer_file if (one.folder / "any.json").is_file() else use_tokenizers)
        for one in tokenizers
    ]
    data = [
        Target(f"data/{name}", root / "data" / name.replace(":", "_"), reader_of(name, target, columns))
        for name, (target, columns) in samples.items()
    ]
    return {
        "checkpoint": each("checkpoint", use_model),
        "native": [one for one in each("native", use_model) if (one.folder / "model").is_dir()],
        "bin": each("bin", use_model, (".bin",)),
        "lora": each("lora", use_model),
        "tokenizer": tokenizers,
        "processor": each("processor", embed_image),
        "recipe": each("recipe", use_recipe),
        "progress": each("progress", resume_run, ("last.safetensors", "recipe.yaml", "log.jsonl", "spec.json")),
        "text": each("text", use_corpus),
        "data": data,
    }


# how often a class is drawn; resuming a run takes a hundred times as long as reading a table
WEIGHTS = {"checkpoint": 24, "native": 10, "bin": 6, "lora": 6, "tokenizer": 18, "processor": 6, "recipe": 10}
WEIGHTS |= {"progress": 1, "text": 4, "data": 15}
