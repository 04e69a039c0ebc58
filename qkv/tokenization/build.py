"""A vocabulary made into a tokeniser that cuts text as its family does, whether it was read from files or learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from qkv.tokenization.template import Template, expand_template, template_roles

CONTINUATION_PREFIX, END_OF_WORD_SUFFIX = "##", "</w>"


def build_wordpiece(
    vocabulary: Mapping[str, int], unk_token: str, *, lowercase: bool, strip_accents: bool | None = None, handle_chinese_chars: bool = True
) -> Tokenizer:
    """BERT (Devlin et al., 2019): words and punctuation, then the longest known piece from the left.

    `strip_accents`: None is as `lowercase`; `handle_chinese_chars`: those characters are words of their own.
    """
    tokenizer = Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unk_token))
    tokenizer.normalizer = build_bert_normalizer(lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=handle_chinese_chars)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    return tokenizer


def build_bert_normalizer(*, lowercase: bool, strip_accents: bool | None = None, handle_chinese_chars: bool = True) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=handle_chinese_chars, strip_accents=strip_accents, lowercase=lowercase
    )


def build_byte_bpe(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], *, add_prefix_space: bool = False, lowercase: bool = False
) -> Tokenizer:
    """GPT-2 (Radford et al., 2019): bytes merged inside words that keep the space before them.

    `add_prefix_space` puts one before a text's first word too.
    """
    model = models.BPE(dict(vocabulary), list(merges), continuing_subword_prefix="", end_of_word_suffix="")
    tokenizer = Tokenizer(model)
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_word_bpe(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], unk_token: str, *, lowercase: bool = True
) -> Tokenizer:
    """GPT (Radford et al., 2018): letters merged inside words, of which the last one carries the word's end."""
    model = models.BPE(dict(vocabulary), list(merges), unk_token=unk_token, end_of_word_suffix=END_OF_WORD_SUFFIX)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = build_bert_normalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix=END_OF_WORD_SUFFIX)
    return tokenizer


def build_unigram(vocab_scores: Sequence[tuple[str, float]], unk_id: int, normalizer: normalizers.Normalizer | None) -> Tokenizer:
    """T5 (Raffel et al., 2020): a unigram language model's best cut (Kudo, 2018) of words that keep their space."""
    tokenizer = Tokenizer(models.Unigram(list(vocab_scores), unk_id=unk_id, byte_fallback=False))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def set_post_processor(
    tokenizer: Tokenizer, template: Template, role_tokens: Mapping[str, str], *, add_prefix_space: bool = False, trim_offsets: bool = True
) -> None:
    """Makes a tokeniser put around texts what the template puts there, under the names that its vocabulary has.

    `trim_offsets`: the space before a byte-level word is no part of what its token stands for.
    """
    roles = template_roles(template)
    if not roles:
        return
    template_processor = processors.TemplateProcessing(
        single=expand_template(template, template.single, role_tokens),
        pair=expand_template(template, template.pair, role_tokens),
        special_tokens=[(role_tokens[role], tokenizer.token_to_id(role_tokens[role])) for role in roles],
    )
    if template.kind == "byte_bpe":
        byte_level = processors.ByteLevel(add_prefix_space=add_prefix_space, trim_offsets=trim_offsets)
        tokenizer.post_processor = processors.Sequence([byte_level, template_processor])
    else:
        tokenizer.post_processor = template_processor
