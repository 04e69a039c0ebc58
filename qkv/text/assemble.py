"""A vocabulary made into a tokeniser that cuts text as its family does, whether it was read from files or learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from qkv.text.template import Template, framing_roles, spelled

CONTINUED, WORD_END = "##", "</w>"


def wordpiece(
    vocabulary: Mapping[str, int], unknown: str, *, lowercase: bool, accents: bool | None = None, chinese: bool = True
) -> Tokenizer:
    """BERT (Devlin et al., 2019): words and punctuation, then the longest known piece from the left.

    `accents` stripped: None is as `lowercase`; `chinese` characters are words of their own.
    """
    tokenizer = Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unknown))
    tokenizer.normalizer = bert_normaliser(lowercase=lowercase, accents=accents, chinese=chinese)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUED)
    return tokenizer


def bert_normaliser(*, lowercase: bool, accents: bool | None = None, chinese: bool = True) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=accents, lowercase=lowercase
    )


def byte_bpe(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], *, space: bool = False, lowercase: bool = False
) -> Tokenizer:
    """GPT-2 (Radford et al., 2019): bytes merged inside words that keep the space before them.

    `space` puts one before a text's first word too.
    """
    model = models.BPE(dict(vocabulary), list(merges), continuing_subword_prefix="", end_of_word_suffix="")
    tokenizer = Tokenizer(model)
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_bpe(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], unknown: str, *, lowercase: bool = True
) -> Tokenizer:
    """GPT (Radford et al., 2018): letters merged inside words, of which the last one carries the word's end."""
    model = models.BPE(dict(vocabulary), list(merges), unk_token=unknown, end_of_word_suffix=WORD_END)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = bert_normaliser(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix=WORD_END)
    return tokenizer


def unigram(scores: Sequence[tuple[str, float]], unknown: int, normaliser: normalizers.Normalizer | None) -> Tokenizer:
    """T5 (Raffel et al., 2020): a unigram language model's best cut (Kudo, 2018) of words that keep their space."""
    tokenizer = Tokenizer(models.Unigram(list(scores), unk_id=unknown, byte_fallback=False))
    if normaliser is not None:
        tokenizer.normalizer = normaliser
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def frame(
    tokenizer: Tokenizer, template: Template, names: Mapping[str, str], *, space: bool = False, trim: bool = True
) -> None:
    """Makes a tokeniser put around texts what the template puts there, under the names that its vocabulary has.

    `trim`: the space before a byte-level word is no part of what its token stands for.
    """
    roles = framing_roles(template)
    if not roles:
        return
    added = processors.TemplateProcessing(
        single=spelled(template, template.single, names),
        pair=spelled(template, template.pair, names),
        special_tokens=[(names[role], tokenizer.token_to_id(names[role])) for role in roles],
    )
    if template.kind == "byte_bpe":
        bare = processors.ByteLevel(add_prefix_space=space, trim_offsets=trim)
        tokenizer.post_processor = processors.Sequence([bare, added])
    else:
        tokenizer.post_processor = added
