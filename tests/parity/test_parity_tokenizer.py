"""Tokenisers of checkpoint folders give transformers' ids, segments, spans and texts, from the same files and back."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers, trainers

from qkv import families
from qkv.tokenization.hf import load_tokenizers, save_tokenizers
from qkv.tokenization.tokenizer import Tokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

# transformers would like sacremoses, whose punctuation it then never uses
pytestmark = pytest.mark.filterwarnings("ignore:Recommended")

ENGLISH = "the a cat dogs house garden night running walked slowly under café naïve 2024 17 Berlin Zürich don't it's"
GERMAN = "der die Katze Hunde Haus Garten Nacht läuft ging langsam unter Straße 2024 17 Berlin Zürich schön"
WORDS, FOREIGN = ENGLISH.split(" "), GERMAN.split(" ")

TEXTS = [
    "",
    " ",
    "the cat",
    "The CAT walked slowly, under the garden-house.",
    "  two  spaces\tand a tab\nand a line ",
    "Ünïcödé naïve café Zürich ÀÉÎ",
    "decomposed: cafe\u0301 nai\u0308ve",
    "漢字 and 日本語 mixed漢in",
    "emoji 🙂 👩‍👩‍👧 flags 🇫🇷",
    "x" * 250,
    "supercalifragilistic" * 8,
    "2024 17 3.14159 1,000,000 ½ ①",
    "ﬁne ﬂow Ⅳ ％ full　width",
    "control\x07 zero\u200bwidth nbsp\xa0here",
    "don't it's we'll DON'T I'M",
    "▁the ▁ cat",
    "a##b ##ing </w> the</w>",
    "don ' t . stop , now !",
]
PAIRS = [("the cat", "a dog walked"), ("Who?", "Berlin, Zürich 漢字."), ("", "the"), ("the", ""), ("", "")]
MARKED = {
    "bert": "the [MASK] walked [SEP] [CLS] [PAD] a [mask]",
    "roberta": "the <mask> walked </s> a<mask>.<s> <pad>",
    "gpt2": "the cat<|endoftext|> a dog <|endoftext|>",
    "gpt": "the <unk> cat",
    "t5": "the <extra_id_0> walked <extra_id_17> a</s> <pad>cat <unk>",
    "xlnet": "the <mask> walked <sep> a<mask>.</s> <pad>cat <cls> ``naïve''",
    "marian": "the </s> cat <pad>walked",
}
FORMS = ["files", "saved"]


def corpus(words: list[str]) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choice(words) for _ in range(draw.randint(3, 9))) for _ in range(300)]


def put(folder: Path, **tables: object) -> None:
    for name, table in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(table), encoding="utf-8")


def wordpieces(folder: Path, **options: object) -> None:
    letters = sorted({letter for line in corpus(WORDS) for letter in line.lower() if letter != " "})
    known = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *map(str.lower, WORDS)]
    known += [
        "漢",
        "cafe",
        "!",
        *letters,
        *(f"##{letter}" for letter in letters),
        "##ing",
        "##ed",
        "walk",
        ".",
        ",",
        "'",
        "e",
        "##́",
    ]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(known)) + "\n", encoding="utf-8")
    put(folder, config={"model_type": "bert"})
    if options:
        put(folder, tokenizer_config=options)


def merges(folder: Path, specials: list[str], model_type: str, *, suffix: str | None = None) -> None:
    tokenizer = HFTokenizer(models.BPE(end_of_word_suffix=suffix, unk_token="<unk>") if suffix else models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer() if suffix else pre_tokenizers.ByteLevel(False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=[] if suffix else sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        **({"end_of_word_suffix": suffix} if suffix else {}),
    )
    tokenizer.train_from_iterator([line.lower() if suffix else line for line in corpus(WORDS)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    put(folder, vocab=model["vocab"], config={"model_type": model_type})
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def pieces(lines: list[str], **options: object) -> bytes:
    model = io.BytesIO()
    train = sentencepiece.SentencePieceTrainer.train
    size = {"vocab_size": 120, "hard_vocab_limit": False}
    train(sentence_iterator=iter(lines), model_writer=model, minloglevel=2, num_threads=1, **size, **options)
    return model.getvalue()


def t5(folder: Path) -> None:
    content = pieces(corpus(WORDS), model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (folder / "spiece.model").write_bytes(content)
    put(folder, config={"model_type": "t5"})


def xlnet(folder: Path, **options: object) -> None:
    symbols = {"control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"], "user_defined_symbols": ["<eop>"]}
    content = pieces(corpus(WORDS), model_type="unigram", unk_id=0, bos_id=1, eos_id=2, pad_id=-1, **symbols)
    (folder / "spiece.model").write_bytes(content)
    put(folder, config={"model_type": "xlnet"}, tokenizer_config={"tokenizer_class": "XLNetTokenizer", **options})


def marian(folder: Path, kind: str = "unigram") -> None:
    names = ["</s>", "<unk>", ">>fra<<", ">>deu<<"]
    for side, words in (("source", WORDS), ("target", FOREIGN)):
        content = pieces(corpus(words), model_type=kind)
        (folder / f"{side}.spm").write_bytes(content)
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        # Not every piece has an id: a vocabulary is made from what a corpus holds.
        names += [model.id_to_piece(number) for number in range(3, model.get_piece_size()) if number % 11]
    names = [*dict.fromkeys(names), "<pad>"]
    put(folder, vocab={name: number for number, name in enumerate(names)}, config={"model_type": "marian"})


ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
MASK = {"content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": True}
MAKERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "bert": ("bert", wordpieces),
    "bert-cased": ("bert", lambda folder: wordpieces(folder, do_lower_case=False)),
    "bert-accents": ("bert", lambda folder: wordpieces(folder, strip_accents=False, tokenize_chinese_chars=False)),
    "roberta": ("roberta", lambda folder: merges(folder, ROBERTA, "roberta")),
    "bart": ("roberta", lambda folder: merges(folder, ROBERTA, "bart")),
    "gpt2": ("gpt2", lambda folder: merges(folder, ["<|endoftext|>"], "gpt2")),
    "gpt": ("gpt", lambda folder: merges(folder, ["<unk>"], "openai-gpt", suffix="</w>")),
    "t5": ("t5", t5),
    "xlnet": ("xlnet", xlnet),
    "xlnet-uncased": ("xlnet", lambda folder: xlnet(folder, do_lower_case=True)),
    "marian": ("marian", marian),
    "marian-bpe": ("marian", lambda folder: marian(folder, "bpe")),
}


class Both:
    """One folder, read here and there."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.kind, self.folder = name, MAKERS[name][0], folder
        self.source, self.target = read(name, folder)
        self.reference = reference(folder)
        self.fast = bool(self.reference.is_fast)


def read(name: str, folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """As a model of the family would be loaded with it."""
    found = load_tokenizers(
        folder, families.get_family(name.split("-")[0]).TOKENIZER_TEMPLATE, families.tokenizer_templates()
    )
    assert found is not None
    return found


def reference(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Each tokeniser as its bare vocabulary files, and as transformers saves it."""
    made = {}
    for name, (kind, make) in MAKERS.items():
        bare, saved = (tmp_path_factory.mktemp(f"{name}-{form}") for form in FORMS)
        make(bare)
        if kind == "roberta":
            put(bare, special_tokens_map={"mask_token": MASK})
        reference(bare).save_pretrained(saved)
        shutil.copy(bare / "config.json", saved)
        made[name, "files"], made[name, "saved"] = bare, saved
    return made


@pytest.fixture(scope="module", params=[(name, form) for name in MAKERS for form in FORMS], ids="-".join)
def both(request: pytest.FixtureRequest, folders: dict[tuple[str, str], Path]) -> Both:
    return Both(request.param[0], folders[request.param])


@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_a_text_are_equal(both: Both, text: str) -> None:
    assert both.source.encode(text) == both.reference(text, add_special_tokens=False).input_ids
    assert both.source.encode_plus(text).ids == both.reference(text).input_ids


@pytest.mark.parametrize("pair", PAIRS)
def test_ids_and_segments_of_a_pair_are_equal(both: Both, pair: tuple[str, str]) -> None:
    # a batch, because a lone empty pair is no pair in transformers
    theirs = both.reference([pair[0]], [pair[1]], return_token_type_ids=both.fast)
    ours = both.source.encode_plus(*pair)
    assert ours.ids == theirs.input_ids[0]
    assert both.source.encode_plus_batch([pair, pair[0]]) == [ours, both.source.encode_plus(pair[0])]
    if both.fast:
        assert ours.token_type_ids == theirs.token_type_ids[0]


def test_spans_words_and_parts_are_equal(both: Both) -> None:
    if not both.fast:
        pytest.skip("transformers has no spans for Marian")
    inputs = [*((text, "the dog") for text in TEXTS), *PAIRS]
    theirs = both.reference(*map(list, zip(*inputs, strict=True)), return_offsets_mapping=True)
    for number, ours in enumerate(both.source.encode_plus_batch(inputs)):
        assert ours.offsets == theirs.offset_mapping[number]
        assert ours.word_ids == theirs.word_ids(number)
        assert ours.sequence_ids == theirs.sequence_ids(number)


def test_special_tokens_in_a_text_are_recognised_on_request(both: Both) -> None:
    text = MARKED[both.kind]
    assert both.source.encode_plus(text, parse_special_tokens=True).ids == both.reference(text).input_ids
    assert both.source.encode_plus(text, text, parse_special_tokens=True).ids == both.reference(text, text).input_ids


def test_special_tokens_in_a_text_are_characters_by_default(both: Both) -> None:
    text = MARKED[both.kind]
    ids = both.source.encode(text)
    assert not set(ids) & {number for role, number in both.source.special_ids.items() if role != "unk"}
    if both.kind not in ("t5", "xlnet"):  # transformers recognises them in a unigram vocabulary, whatever it is told
        assert ids == both.reference(text, add_special_tokens=False, split_special_tokens=True).input_ids


def test_given_words_are_read_as_transformers_reads_them(both: Both) -> None:
    words, pair = ["The", "walked", "漢字", "", "don't", "Zürich,"], ["a", "dog"]
    spaced = {"add_prefix_space": True} if both.kind in ("gpt2", "roberta") else {}
    theirs = transformers.AutoTokenizer.from_pretrained(both.folder, **spaced)
    for given in ((words, None), (words, pair)):
        found = theirs(*given, is_split_into_words=True)
        ours = both.source.encode_pretokenized(*given)
        assert ours.ids == found.input_ids
        if both.fast:
            assert ours.word_ids == found.word_ids()
            assert ours.sequence_ids == found.sequence_ids()


def test_decoded_text_is_equal(both: Both) -> None:
    for ids in (both.source.encode_plus(text).ids for text in TEXTS):
        assert both.source.decode(ids) == both.reference.decode(ids, skip_special_tokens=True)


def test_roles_are_the_special_tokens_of_transformers(both: Both) -> None:
    ours, theirs = both.source, both.reference
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert (ours.pad_id, ours.mask_id) == (theirs.pad_token_id, theirs.mask_token_id)
    assert (ours.cls_id, ours.sep_id) == (theirs.cls_token_id, theirs.sep_token_id)
    assert ours.unk_id == (None if both.kind == "gpt2" else theirs.unk_token_id)
    assert ours.vocab_size == len(theirs)


def test_a_folder_whose_family_nobody_names_is_read_alike(both: Both) -> None:
    found = load_tokenizers(both.folder, None, families.tokenizer_templates())
    assert found is not None
    assert (found[0].special_ids, found[0].vocab_size) == (both.source.special_ids, both.source.vocab_size)
    for text in (*TEXTS, MARKED[both.kind]):
        assert found[0].encode_plus(text, "the") == both.source.encode_plus(text, "the")
        assert found[0].encode_plus(text, parse_special_tokens=True) == both.source.encode_plus(
            text, parse_special_tokens=True
        )


def test_what_is_written_is_what_transformers_reads(both: Both, tmp_path: Path) -> None:
    save_tokenizers(tmp_path, both.source, both.target)
    for name, content in both.source.files.items():
        assert (tmp_path / name).read_bytes() == content == (both.folder / name).read_bytes()
    without_config = reference(tmp_path)
    shutil.copy(both.folder / "config.json", tmp_path)
    with_config = reference(tmp_path)
    for theirs in (without_config, with_config):
        for text in (*TEXTS, MARKED[both.kind]):
            assert theirs(text).input_ids == both.reference(text).input_ids
        assert theirs(["the"], ["cat"]).input_ids == both.reference(["the"], ["cat"]).input_ids
    assert with_config("the").keys() == both.reference("the").keys()
    assert set(with_config.all_special_ids) == set(both.reference.all_special_ids)


def test_saved_and_pickled_tokenisers_are_the_same(both: Both, tmp_path: Path) -> None:
    both.source.save(tmp_path / "one.json")
    for copy in (Tokenizer.load(tmp_path / "one.json"), pickle.loads(pickle.dumps(both.source))):
        assert (copy.special_ids, copy.files, copy.vocab_size) == (
            both.source.special_ids,
            both.source.files,
            both.source.vocab_size,
        )
        for text in (*TEXTS, MARKED[both.kind]):
            assert copy.encode_plus(text, "the") == both.source.encode_plus(text, "the")
            assert copy.encode_plus(text, parse_special_tokens=True) == both.source.encode_plus(
                text, parse_special_tokens=True
            )
        assert copy.decode(copy.encode("the cat")) == both.source.decode(both.source.encode("the cat"))


@pytest.fixture(scope="module", params=["marian", "marian-bpe"])
def translator(request: pytest.FixtureRequest, folders: dict[tuple[str, str], Path]) -> Both:
    return Both(request.param, folders[request.param, "files"])


@pytest.mark.parametrize("text", [*TEXTS, "die Katze läuft langsam, schön."])
def test_marian_targets_are_cut_and_joined_by_the_targets_model(translator: Both, text: str) -> None:
    ids = translator.target.encode_plus(text).ids
    assert ids == translator.reference(text_target=text).input_ids
    joined = translator.reference.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
    assert translator.target.decode(ids) == joined


@pytest.mark.parametrize("text", [">>fra<< the cat", ">>deu<<the", ">>xyz<< the", "the >>fra<< a", ">>fra the", ">><<"])
def test_marian_reads_the_target_language_before_a_source(translator: Both, text: str) -> None:
    ours = translator.source.encode_plus(text)
    assert ours.ids == translator.reference(text).input_ids
    assert translator.source.encode(text) == ours.ids[:-1]
    assert (translator.source.token_to_id(">>fra<<") in ours.ids) == text.startswith(">>fra<<")


def test_a_marian_pair_survives_its_two_files_and_is_written_back(translator: Both, tmp_path: Path) -> None:
    for side in ("source", "target"):
        getattr(translator, side).save(tmp_path / f"{side}.json")
    copies = [Tokenizer.load(tmp_path / f"{side}.json") for side in ("source", "target")]
    save_tokenizers(tmp_path / "folder", *copies)
    again = reference(tmp_path / "folder")
    text = "die Katze 漢字 läuft"
    assert again(text_target=text).input_ids == translator.reference(text_target=text).input_ids
    assert copies[1].encode_plus(text) == translator.target.encode_plus(text)


def test_marian_with_a_vocabulary_for_each_side_uses_both(folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    shutil.copytree(folders["marian", "files"], tmp_path, dirs_exist_ok=True)
    table = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    turned = {name: len(table) - 1 - number for name, number in table.items()}
    put(tmp_path, target_vocab=turned, tokenizer_config={"tokenizer_class": "MarianTokenizer", "separate_vocabs": True})
    both = Both("marian", tmp_path)
    for text in ("the cat", "die Katze läuft"):
        assert both.source.encode(text) == both.reference(text, add_special_tokens=False).input_ids
        assert both.target.encode(text) == both.reference(text_target=text, add_special_tokens=False).input_ids
    save_tokenizers(tmp_path / "out", both.source, both.target)
    assert (tmp_path / "out" / "target_vocab.json").read_bytes() == (tmp_path / "target_vocab.json").read_bytes()


@pytest.mark.parametrize("text", [*TEXTS, MARKED["t5"].replace("<unk>", "")])
def test_t5_cuts_as_sentencepiece_does(folders: dict[tuple[str, str], Path], text: str) -> None:
    folder = folders["t5", "files"]
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    ours = Both("t5", folder).source
    assert ours.encode(text) == model.encode(text.replace("▁", " "))


def extended(folder: Path) -> None:
    """A word and a padding token after GPT-2's vocabulary, as transformers 4 wrote them."""
    MAKERS["gpt2"][1](folder)
    size = len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    end = "<|endoftext|>"
    put(folder, added_tokens={"[PAD]": size, "newword": size + 1})
    put(folder, special_tokens_map={"pad_token": "[PAD]", "bos_token": end, "eos_token": {**MASK, "content": end}})


def decoder(folder: Path) -> None:
    """The same in the newer form."""
    extended(folder)
    table = json.loads((folder / "added_tokens.json").read_text(encoding="utf-8"))
    added = {number: {"content": name, "special": name == "[PAD]"} for name, number in table.items()}
    named = {"pad_token": "[PAD]", "tokenizer_class": "GPT2Tokenizer"}
    put(folder, tokenizer_config={"added_tokens_decoder": added, **named})


@pytest.mark.parametrize("form", ["legacy", "decoder", "saved"])
def test_added_tokens_have_the_ids_that_the_folder_gives_them(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (decoder if form == "decoder" else extended)(folder)
    if form == "saved":
        reference(folder).save_pretrained(tmp_path / "saved")
        folder = tmp_path / "saved"
    ours, theirs = read("gpt2", folder)[0], reference(folder)
    for text in ("a newword newwords [PAD]", *TEXTS):
        assert ours.encode_plus(text, parse_special_tokens=True).ids == theirs(text).input_ids
    assert ours.encode("newword") == [ours.vocab_size - 1]
    assert (ours.pad_id, ours.eos_id, ours.vocab_size) == (theirs.pad_token_id, theirs.eos_token_id, len(theirs))


@pytest.mark.parametrize(
    ("name", "option"), [("bert", {"do_lower_case": False}), ("bart", {"add_prefix_space": True}), ("gpt2", {})]
)
def test_an_option_of_the_class_wins_over_tokenizer_json(
    name: str, option: dict[str, bool], folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[name, "saved"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    put(tmp_path, tokenizer_config={**config, **option})
    both = Both(name, tmp_path)
    for text in TEXTS:
        assert both.source.encode_plus(text).ids == both.reference(text).input_ids
