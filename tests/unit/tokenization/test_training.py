"""Vocabularies of families, learned: their special tokens and ids, order does not matter, what is refused.

That transformers gives the same ids is in tests/parity/test_parity_tokenizer.py.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator

import pytest

from qkv import families
from qkv.errors import InputError
from qkv.families import bart, bert, gpt2, marian, roberta, t5
from qkv.tokenization.template import Template, special_tokens_around_vocab
from qkv.tokenization.tokenizer import SPECIAL_TOKENS, Tokenizer, train_tokenizer

pytest.importorskip("sentencepiece")

FAMILIES = ["bert", "roberta", "bart", "gpt", "gpt2", "t5"]
KINDS = ["wordpiece", "byte_bpe", "word_bpe", "unigram"]
TEXT = "the a cat dogs house garden night running walked slowly under café naïve 2024 Zürich don't THE Cat"
WORDS = TEXT.split(" ")
SIZES = {"wordpiece": 200, "byte_bpe": 340, "word_bpe": 200, "unigram": 200}


def corpus() -> list[str]:
    """Many words of equal frequency, so that ties have to be broken."""
    draw = random.Random(0)
    made = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 7))) for _ in range(60)]
    return [*made, *WORDS] + [" ".join(draw.choice(WORDS) for _ in range(6)) for _ in range(100)]


def for_family(name: str, lines: list[str] | None = None, **options: object) -> Tokenizer:
    template: Template = families.get_family(name).TOKENIZER_TEMPLATE
    size = SIZES[template.kind]
    return train_tokenizer(template.kind, lines or corpus(), **{"vocab_size": size, "template": template, **options})


def names(tokeniser: Tokenizer, *ids: int) -> list[str | None]:
    return [tokeniser.backend.id_to_token(number % tokeniser.vocab_size) for number in ids]


def saved(tokeniser: Tokenizer) -> dict[str, object]:
    return json.loads(tokeniser._to_json())


def test_special_tokens_have_the_ids_that_the_family_has() -> None:
    assert names(for_family("bert"), 0, 1, 2, 3, 4) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    for name in ("roberta", "bart"):
        assert names(for_family(name), 0, 1, 2, 3, -1) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert names(for_family("gpt2"), -1) == ["<|endoftext|>"]
    assert names(for_family("gpt"), 0) == ["<unk>"]
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(100))]
    assert names(for_family("t5"), 0, 1, 2, *range(-100, 0)) == ["<pad>", "</s>", "<unk>", *sentinels]


def test_roles_are_the_familys() -> None:
    assert for_family("bert").special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    roberta_roles = for_family("roberta").special_ids
    assert roberta_roles == {"cls": 0, "bos": 0, "pad": 1, "sep": 2, "eos": 2, "unk": 3, "mask": 339}
    assert for_family("gpt2").special_ids == {"bos": 339, "eos": 339}
    assert for_family("t5").special_ids == {"pad": 0, "eos": 1, "unk": 2}


@pytest.mark.parametrize(
    ("name", "single", "pair"),
    [
        ("bert", "[CLS] 0 [SEP]", "[CLS] 0 [SEP] 1 [SEP]"),
        ("roberta", "<s> 0 </s>", "<s> 0 </s> </s> 1 </s>"),
        ("bart", "<s> 0 </s>", "<s> 0 </s> </s> 1 </s>"),
        ("gpt", "0", "0 1"),
        ("gpt2", "0", "0 1"),
        ("t5", "0 </s>", "0 </s> 1 </s>"),
    ],
)
def test_texts_are_framed_as_the_family_frames_them(name: str, single: str, pair: str) -> None:
    tokeniser = for_family(name)
    for given, wanted in ((("a",), single), (("a", "a"), pair)):
        framed = tokeniser.encode_plus(*given)
        parts = zip(framed.ids, framed.sequence_ids, strict=True)
        said = [tokeniser.backend.id_to_token(number) if part is None else str(part) for number, part in parts]
        assert said == wanted.split()


def test_only_bert_gives_the_second_text_a_segment_of_its_own() -> None:
    assert for_family("bert").encode_plus("a", "a").token_type_ids == [0, 0, 0, 1, 1]
    assert set(for_family("roberta").encode_plus("a", "a").token_type_ids) == {0}
    assert set(for_family("t5").encode_plus("a", "a").token_type_ids) == {0}


def test_templates_number_the_special_tokens_as_the_families_specs_do() -> None:
    for name, sizes in (("bart", 50265), ("gpt2", 50257), ("t5", 32100), ("marian", 58101)):
        family = families.get_family(name)
        before, behind = special_tokens_around_vocab(family.TOKENIZER_TEMPLATE)
        ids = {
            token: number for number, token in enumerate([*before, *[None] * (sizes - len(before + behind)), *behind])
        }
        spec = family.make_spec(next(iter(family.PRESETS.values())))
        assert spec.eos_id == ids[family.TOKENIZER_TEMPLATE.special_tokens["eos"]]
        pad = spec.source_embedding.padding_idx if spec.source_embedding is not None else None
        assert pad is None or pad == ids[family.TOKENIZER_TEMPLATE.special_tokens["pad"]]
    before, _ = special_tokens_around_vocab(roberta.TOKENIZER_TEMPLATE)
    assert roberta.Config().position_offset == before.index("<pad>") + 1


def test_roberta_and_bart_share_one_template() -> None:
    assert bart.TOKENIZER_TEMPLATE is roberta.TOKENIZER_TEMPLATE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trained_tokeniser_does_not_depend_on_the_order_of_lines_nor_on_the_run(name: str) -> None:
    lines = corpus()
    first = saved(for_family(name, lines))
    for seed in range(3):
        random.Random(seed).shuffle(lines)
        assert saved(for_family(name, lines)) == first


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_family_the_special_tokens_are_the_usual_four_and_nothing_is_added(kind: str) -> None:
    tokeniser = train_tokenizer(kind, corpus(), vocab_size=SIZES[kind])
    assert tokeniser.is_native
    assert names(tokeniser, 0, 1, 2, 3) == list(SPECIAL_TOKENS)
    assert tokeniser.encode_plus("the cat").ids == tokeniser.encode("the cat")


def test_byte_bpe_without_a_family_is_what_bpe_is() -> None:
    one, other = (train_tokenizer(kind, corpus(), vocab_size=340) for kind in ("bpe", "byte_bpe"))
    for text in ("the cat", "Zürich 漢字 🙂"):
        assert one.encode(text) == other.encode(text)


@pytest.mark.parametrize("name", ["bert", "gpt", "gpt2", "roberta"])
def test_the_size_counts_every_token(name: str) -> None:
    template = families.get_family(name).TOKENIZER_TEMPLATE
    assert for_family(name).vocab_size == SIZES[template.kind]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_size_is_never_passed(name: str) -> None:
    assert for_family(name, vocab_size=1000).vocab_size <= 1000
    assert for_family(name).vocab_size <= 340


def test_the_sentinels_are_within_the_size() -> None:
    tokeniser = for_family("t5", vocab_size=180)
    assert tokeniser.vocab_size <= 180
    assert tokeniser.token_to_id("<extra_id_0>") == tokeniser.vocab_size - 1


@pytest.mark.parametrize("name", FAMILIES)
def test_frequent_words_are_few_pieces_and_come_back(name: str) -> None:
    tokeniser = for_family(name)
    ids = tokeniser.encode("the garden")
    assert len(ids) <= 5
    assert tokeniser.decode(ids) == "the garden"
    assert tokeniser.first_unknown("the garden") is None


def test_a_lower_cased_family_may_be_trained_cased_and_the_other_way_round() -> None:
    assert for_family("bert").encode("THE cat") == for_family("bert").encode("the CAT")
    cased = for_family("bert", lowercase=False)
    assert cased.encode("THE") != cased.encode("the")
    for name in ("gpt2", "t5"):
        assert for_family(name).encode("Cat") != for_family(name).encode("cat")
        small = for_family(name, lowercase=True)
        assert small.encode("THE Cat") == small.encode("the cat")


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_in_the_training_text_stay_text(name: str) -> None:
    template = families.get_family(name).TOKENIZER_TEMPLATE
    spelled = [*template.special_tokens.values(), "<extra_id_0>"]
    lines = [f"a{token}b {token} {token}{token}" for token in spelled] * 40 + corpus()
    tokeniser = for_family(name, lines, vocab_size=400)
    before, behind = special_tokens_around_vocab(template)
    assert [tokeniser.token_to_id(token) for token in before] == list(range(len(before)))
    assert [tokeniser.token_to_id(token) for token in behind] == list(
        range(tokeniser.vocab_size - len(behind), tokeniser.vocab_size)
    )
    structure = {number for role, number in tokeniser.special_ids.items() if role != "unk"}
    assert not structure & set(tokeniser.encode(" ".join(lines[:8])))
    vocabulary = [tokeniser.backend.id_to_token(number) for number in range(tokeniser.vocab_size)]
    assert len(set(vocabulary)) == tokeniser.vocab_size


def test_robertas_trained_mask_takes_the_space_before_it() -> None:
    tokeniser = for_family("roberta")
    assert (
        len(tokeniser.encode_plus("a <mask>", parse_special_tokens=True).ids)
        == len(tokeniser.encode_plus("a<mask>", parse_special_tokens=True).ids)
        == 4
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_lines_are_read_once_and_one_at_a_time(name: str) -> None:
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for line in corpus():
            read += 1
            yield line

    given = lines()
    for_family(name, given)  # type: ignore[arg-type]
    assert read == len(corpus())
    assert next(given, None) is None


@pytest.mark.parametrize("kind", ["wordpiece", "word_bpe"])
def test_a_text_of_many_scripts_keeps_its_thousand_most_frequent_letters(kind: str) -> None:
    rare = [chr(0x4E00 + number) for number in range(1500)]
    tokeniser = train_tokenizer(kind, [*rare, *rare[700:], "the cat"], vocab_size=2200)
    # 800 and the t twice; then of those that come once, by number: a, c, e, h and 195 more
    assert tokeniser.first_unknown(f"the cat {' '.join(rare[:195])} {' '.join(rare[700:])}") is None
    assert all(tokeniser.first_unknown(letter) == letter for letter in rare[195:700])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("lines", [[], ["", "  "], ["\n"]])
def test_an_empty_corpus_is_refused_in_one_line(name: str, lines: list[str]) -> None:
    template = families.get_family(name).TOKENIZER_TEMPLATE
    with pytest.raises(InputError, match="no text to train") as problem:
        train_tokenizer(template.kind, lines, vocab_size=500, template=template)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("template", "size", "complaint"),
    [
        (bert.TOKENIZER_TEMPLATE, 5, "of size 5 is too small; set the size to 6 or more"),
        (
            bert.TOKENIZER_TEMPLATE,
            20,
            r"of size 20 is too small for the letters of this text; set the size to \d+ or more",
        ),
        (roberta.TOKENIZER_TEMPLATE, 260, "set the size to 261 or more"),
        (gpt2.TOKENIZER_TEMPLATE, 256, "set the size to 257 or more"),
        (t5.TOKENIZER_TEMPLATE, 100, "set the size to 104 or more"),
        (
            t5.TOKENIZER_TEMPLATE,
            110,
            r"of size 110 is too small for the letters of this text; set the size to \d+ or more",
        ),
        (bert.TOKENIZER_TEMPLATE, None, "needs a vocabulary size"),
    ],
)
def test_a_size_that_is_too_small_is_refused_with_one_that_is_enough(
    template: Template, size: int | None, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint) as problem:
        train_tokenizer(template.kind, corpus(), vocab_size=size, template=template)
    assert "\n" not in str(problem.value)
    if "letters of this text" in str(problem.value):
        least = int(str(problem.value).split("set the size to ")[1].split(" ")[0])
        assert train_tokenizer(template.kind, corpus(), vocab_size=least, template=template).vocab_size == least


def test_another_kind_than_the_familys_and_marians_two_are_refused() -> None:
    with pytest.raises(InputError, match="whose kind is 'wordpiece'"):
        train_tokenizer("unigram", ["a"], vocab_size=300, template=bert.TOKENIZER_TEMPLATE)
    with pytest.raises(InputError, match="which qkv cannot train"):
        train_tokenizer("sentencepiece_pair", ["a"], vocab_size=300, template=marian.TOKENIZER_TEMPLATE)
    with pytest.raises(InputError, match="'wordpeace' is unknown; did you mean 'wordpiece'"):
        train_tokenizer("wordpeace", ["a"], vocab_size=300)


def test_a_broken_line_is_named() -> None:
    with pytest.raises(InputError, match=r"line 2 of the training text: .*character 2"):
        for_family("bert", ["a", "b\ud800"])


def test_unigram_without_sentencepiece_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(InputError, match=r"pip install 'qkv\[sentencepiece\]'"):
        for_family("t5")
