"""Build `tokenizers` objects from vocabularies, which were read from files or trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from qkv.tokenization.template import Template, expand_template, template_roles

CONTINUATION_PREFIX, END_OF_WORD_SUFFIX = "##", "</w>"


def build_wordpiece(
    vocabulary: Mapping[str, int],
    unk_token: str,
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    handle_chinese_chars: bool = True,
) -> Tokenizer:
    """Return BERT's tokenizer (Devlin et al., 2019): words and punctuation, then the longest known piece from the left.

    Args:
        vocabulary: id of each piece.
        unk_token: the token of unknown words.
        lowercase: lowercase texts.
        strip_accents: remove accents; None: if `lowercase` is set.
        handle_chinese_chars: treat each Chinese character as a word.
    """
    tokenizer = Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unk_token))
    tokenizer.normalizer = build_bert_normalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=handle_chinese_chars
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    return tokenizer


def build_bert_normalizer(
    *, lowercase: bool, strip_accents: bool | None = None, handle_chinese_chars: bool = True
) -> normalizers.Normalizer:
    """Return BERT's text normalization."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=handle_chinese_chars, strip_accents=strip_accents, lowercase=lowercase
    )


def build_byte_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    add_prefix_space: bool = False,
    lowercase: bool = False,
) -> Tokenizer:
    """Return GPT-2's tokenizer (Radford et al., 2019): bytes merged inside words, each with the space before it.

    Args:
        vocabulary: id of each token.
        merges: the merges in the order of their priority.
        add_prefix_space: put a space before the first word of a text too.
        lowercase: lowercase texts.
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
    """Return GPT's tokenizer (Radford et al., 2018): letters merged inside words, the last one marked."""
    model = models.BPE(dict(vocabulary), list(merges), unk_token=unk_token, end_of_word_suffix=END_OF_WORD_SUFFIX)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = build_bert_normalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix=END_OF_WORD_SUFFIX)
    return tokenizer


def build_words(vocabulary: Mapping[str, int], unk_token: str, *, lowercase: bool) -> Tokenizer:
    """Return a tokenizer without subwords: words and punctuation as in BERT's, each with an id or unknown."""
    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=unk_token))
    tokenizer.normalizer = build_bert_normalizer(lowercase=lowercase, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # joins with spaces; no word contains one, so that its prefix never matches
    tokenizer.decoder = decoders.WordPiece(prefix=" ", cleanup=True)
    return tokenizer


def build_unigram(
    vocab_scores: Sequence[tuple[str, float]], unk_id: int, normalizer: normalizers.Normalizer | None
) -> Tokenizer:
    """Return T5's tokenizer (Raffel et al., 2020): the most likely pieces under a unigram model (Kudo, 2018)."""
    tokenizer = Tokenizer(models.Unigram(list(vocab_scores), unk_id=unk_id, byte_fallback=False))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def build_unigram_normalizer(
    template: Template, character_map: normalizers.Normalizer | None, *, lowercase: bool = False
) -> normalizers.Normalizer | None:
    """Return the text normalization of a template: SentencePiece's, after that of XLNet if accents are removed.

    Args:
        template: the template.
        character_map: the normalization of the SentencePiece model; None: it has none.
        lowercase: lowercase texts before they are normalized; only for templates that remove accents.
    """
    if not template.strip_accents:
        return character_map
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase()] if lowercase else []
    return normalizers.Sequence([*steps, *([] if character_map is None else [character_map])])


def set_post_processor(
    tokenizer: Tokenizer,
    template: Template,
    role_tokens: Mapping[str, str],
    *,
    add_prefix_space: bool = False,
    trim_offsets: bool = True,
) -> None:
    """Make a tokenizer add the special tokens of a template to texts.

    Args:
        tokenizer: the tokenizer, changed in place.
        template: the template.
        role_tokens: names of the special tokens in this vocabulary, by role.
        add_prefix_space: put a space before the first word (byte-level BPE).
        trim_offsets: exclude the space before a word from the offsets of its token (byte-level BPE).
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
