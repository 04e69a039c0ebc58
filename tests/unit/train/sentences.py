"""A small synthetic translation task, in which every word has one translation, and tiny pretrained models."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import sentencepiece
import torch

from qkv import ModelBundle, build, families, save
from qkv.families import bart, marian, t5
from qkv.tokenization.hf import load_tokenizers
from qkv.tokenization.tokenizer import Tokenizer, train_tokenizer

WORDS = {"a": "ein", "man": "Mann", "dog": "Hund", "sees": "sieht", "„Café“": "„Kaffee“", "runs": "rennt", "old": "alt"}

RECIPE = """
data: {{format: aligned, train: [{folder}/train.en, {folder}/train.de], valid: [{folder}/valid.en, {folder}/valid.de],
  test: [{folder}/valid.en, {folder}/valid.de]}}
{text}
model: {model}
train: {{max_steps: 6, batch_tokens: 400, log_every: 3, warmup_steps: 2, learning_rate: 0.01}}
validation: {{every_steps: 3, metric: bleu}}
test: {{metrics: [bleu, chrf]}}
seed: 3
"""
TEXT = "tokenizer: {source: {kind: bpe, vocab_size: 300}, joint_vocab: true}"
FRESH = (
    "{family: transformer, size: tiny, d_model: 16, heads: 2, layers: 1, d_ff: 32, max_length: 64, "
    "share_embeddings: true}"
)


def sentence(chance: random.Random) -> list[str]:
    return [chance.choice(list(WORDS)) for _ in range(chance.randint(2, 6))]


def write_files(folder: Path, train: int = 60, valid: int = 8) -> None:
    """Write aligned source and target files."""
    chance = random.Random(7)
    for part, count in (("train", train), ("valid", valid)):
        rows = [sentence(chance) for _ in range(count)]
        (folder / f"{part}.en").write_text("".join(" ".join(row) + ".\n" for row in rows), encoding="utf-8")
        told = (" ".join(WORDS[word] for word in row) for row in rows)
        (folder / f"{part}.de").write_text("".join(f"{line}.\n" for line in told), encoding="utf-8")


def write_summaries(folder: Path) -> None:
    """Write documents in SciTLDR's format, each with several summaries."""
    chance = random.Random(8)
    for part, count in (("train", 20), ("dev", 5), ("test", 5)):
        rows = [[" ".join(sentence(chance)) + "." for _ in range(4)] for _ in range(count)]
        told = [{"source": row, "target": [row[0], row[1]]} for row in rows]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told), encoding="utf-8")


def write_recipe(folder: Path, model: str = FRESH, text: str = TEXT) -> Path:
    """Write files and a recipe; return the path of the recipe."""
    write_files(folder)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, model=model, text=text), encoding="utf-8")
    return path


def pretrained(folder: Path, family: str) -> Path:
    """Write a tiny T5, BART or Marian with its own tokenizers, in place of a pretrained one."""
    source, target = tokenisers(folder, family)
    sizes = {"source_vocab_size": source.vocab_size, "target_vocab_size": target.vocab_size}
    torch.manual_seed(2)
    if family == "t5":
        shape = t5.Config(d_model=16, heads=2, d_kv=8, layers=1, d_ff=24)
        made = t5.make_spec(
            shape, **{side: size + 3 for side, size in sizes.items()}
        )  # more rows than tokens, as in published checkpoints
    elif family == "bart":
        made = bart.make_spec(bart.Config(d_model=16, max_length=48, **HALVES), **sizes)
    else:
        assert target.pad_id is not None
        assert target.eos_id is not None
        made = marian.make_spec(
            marian.Config(d_model=16, max_length=48, **HALVES), **sizes, bos_id=target.pad_id, eos_id=target.eos_id
        )
    save(ModelBundle(build(made), source, target), folder)
    return folder


HALVES = {"heads": 2, "layers": 1, "d_ff": 24, "decoder_heads": 2, "decoder_layers": 1, "decoder_d_ff": 24}


def tokenisers(folder: Path, family: str) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizers of a family, trained on the words; Marian has one per side."""
    lines = [f"{one} {other}." for one, other in WORDS.items()] * 3 + ["translate English to German: summarize:"]
    if family != "marian":
        kind, template, size = (
            ("unigram", t5.TOKENIZER_TEMPLATE, 170) if family == "t5" else ("byte_bpe", bart.TOKENIZER_TEMPLATE, 300)
        )
        both = train_tokenizer(kind, lines, vocab_size=size, template=template)
        return both, both
    names, files = ["</s>", "<unk>"], folder.with_name(f"{folder.name}-files")
    files.mkdir()
    for side, words in (("source", WORDS), ("target", WORDS.values())):
        model = io.BytesIO()
        text = iter([*(f"{word} {word}." for word in words), lines[-1]] * 5)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=text, model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2
        )
        (files / f"{side}.spm").write_bytes(model.getvalue())
        found = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        names += [found.id_to_piece(number) for number in range(3, found.get_piece_size())]
    numbered = {name: number for number, name in enumerate([*dict.fromkeys(names), "<pad>"])}
    (files / "vocab.json").write_text(json.dumps(numbered), encoding="utf-8")
    found = load_tokenizers(files, marian.TOKENIZER_TEMPLATE, families.tokenizer_templates())
    assert found is not None
    return found


def framed(tokeniser: Tokenizer, text: str) -> list[int]:
    return tokeniser.encode_plus(text).ids


def summaries(folder: Path) -> Path:
    """Return a recipe for summarization with a pretrained T5."""
    write_summaries(folder)
    recipe = write_recipe(folder, f"{{init_from: {pretrained(folder / 't5', 't5')}}}", "")
    text = recipe.read_text("utf-8")
    begin, end = text.index("data:"), text.index("model:")
    limits = "on_too_long: truncate, max_source_length: 12, max_target_length: 9"
    data = f"data: {{format: scitldr, train: {folder}, prefix: 'summarize: ', {limits}}}\n"
    recipe.write_text((text[:begin] + data + text[end:]).replace("metric: bleu", "metric: rougeL"), "utf-8")
    return recipe


def mixed(folder: Path, *, weights: tuple[float | None, float | None] = (None, None)) -> Path:
    """Return a recipe that mixes two datasets with prefixes, from a pretrained T5."""
    write_files(folder)
    write_summaries(folder)
    model = pretrained(folder / "t5", "t5")
    recipe = folder / "mix.yaml"
    one, other = ("" if weight is None else f", weight: {weight}" for weight in weights)
    recipe.write_text(
        f"""
data:
  datasets:
    - {{format: aligned, train: [{folder}/train.en, {folder}/train.de], prefix: "translate English to German: ",
       valid: [{folder}/valid.en, {folder}/valid.de], test: [{folder}/valid.en, {folder}/valid.de]{one}}}
    - {{name: tldr, format: scitldr, train: {folder}, prefix: "summarize: "{other}}}
model: {{init_from: {model}}}
train: {{max_steps: 4, batch_tokens: 300, log_every: 2, warmup_steps: 2, learning_rate: 0.01}}
validation: {{every_steps: 2, metric: chrf}}
""",
        "utf-8",
    )
    return recipe
