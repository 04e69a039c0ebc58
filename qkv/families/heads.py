"""Heads as changes of the spec: another head for families without a Hugging Face form, another pooling for all."""

from __future__ import annotations

from typing import Literal, cast

from qkv import spec as s
from qkv.errors import InputError, did_you_mean, quote
from qkv.families import get_family
from qkv.spec.check import is_bidirectional

HEAD_NAMES = ("seq2seq_lm", "sequence", "token", "span", "choice", "backbone")
Pooling = Literal["first", "last", "mean", "concat", "final", "attention"]
_LM_HEADS = ("seq2seq_lm", "lm")
_DECODER_HEADS = ("sequence", "span")  # BART's heads that read the decoder (Lewis et al. 2020, 3)


def with_head(model: s.Model, head: str, labels: tuple[str, ...]) -> s.Model:
    """Return a model's spec with another head on the same backbone.

    A decoder without an encoder stays as it is. An encoder-decoder with one embedding table for both sides keeps its
    decoder for `sequence` and `span`, as BART does: the decoder reads the input again. Any other head reads the encoder
    alone. `backbone` removes the head.
    """
    known = (*HEAD_NAMES, "lm") if model.encoder is None or isinstance(model.encoder, s.BiLM) else HEAD_NAMES
    if head not in known:
        raise InputError(f"head: this family has no {quote(head)}; {did_you_mean(head[:60], known)}")
    if head == "backbone":
        return s.replace(model, head=None, aux_head=None)
    if head in _LM_HEADS:
        return s.replace(model, head=_lm_head(model, head), aux_head=None)
    kind = cast("Literal['sequence', 'token', 'span', 'choice']", head)
    if model.encoder is None or _reads_decoder(model, head):
        decoder = model.decoder
        if isinstance(decoder, s.RecurrentStack):
            heads: dict[str, s.Head] = get_family(model.family).task_heads(
                decoder.output_dim, labels, decoder.output_dropout
            )
            return s.replace(model, head=heads[kind], aux_head=None)
        assert isinstance(decoder, s.TransformerStack)  # `_reads_decoder`
        head_spec = s.classification_head(kind, decoder.d_model, labels, pool="last", dropout=decoder.block.dropout)
        return s.replace(model, head=head_spec, aux_head=None)
    encoder = model.encoder
    is_stack = isinstance(encoder, s.TransformerStack)
    width = encoder.d_model if isinstance(encoder, s.TransformerStack) else encoder.output_dim
    dropout = encoder.block.dropout if isinstance(encoder, s.TransformerStack) else encoder.dropout
    pool = None
    if kind in ("sequence", "choice"):
        pool = _learned_query(width) if is_stack else _recurrent_pool(model)
    return s.replace(
        model,
        target_embedding=None,
        decoder=None,
        share_embeddings=False,
        head=s.classification_head(kind, width, labels, pool=pool, dropout=dropout),
        aux_head=None,
    )


def with_pooling(model: s.Model, pooling: Pooling) -> s.Model:
    """Return a model's spec whose head pools the states of a sequence in another way.

    A head with its own pooling stays as it is. Otherwise the pooled vector goes straight into the linear layer: a dense
    layer between them belongs to the pooling that it was pretrained with.
    """
    head = model.head
    if head is None or head.is_token_level:
        kind = "no head" if head is None else f"a '{head.kind}' head, which reads every token"
        raise InputError(f"finetune.pooling: this model has {kind}; leave it out")
    if pooling_name(head) == pooling:
        return model
    if pooling == "final" and not is_bidirectional(model.encoder):
        reason = f"final reads both directions of a recurrent encoder, which this {model.family} lacks"
        raise InputError(f"finetune.pooling: {reason}; choose last, mean or attention")
    pool: s.Attention | Literal["last", "mean", "concat", "final"] | None = None
    if pooling == "attention":
        stack = model.encoder if model.decoder is None else model.decoder
        num_heads = stack.block.self_attention.heads if isinstance(stack, s.TransformerStack) else 1
        pool = s.Attention(query_dim=head.d_model, heads=num_heads, use_projections=False)
    elif pooling != "first":
        pool = pooling
    labels = head.labels
    new_head = s.classification_head(head.kind, head.d_model, labels, pool=pool, dropout=head.dropout)
    return s.replace(model, head=s.replace(new_head, num_outputs=head.num_outputs, multi_label=head.multi_label))


def pooling_name(head: s.Head) -> Pooling:
    """Return how a head that reads whole sequences pools them."""
    return "attention" if isinstance(head.pool, s.Attention) else head.pool or "first"


def _reads_decoder(model: s.Model, head: str) -> bool:
    """Return whether a head reads the decoder, which then takes the source's tokens: both sides share one table."""
    return model.share_embeddings and isinstance(model.decoder, s.TransformerStack) and head in _DECODER_HEADS


def _lm_head(model: s.Model, head: str) -> s.Head:
    if isinstance(model.encoder, s.BiLM):
        vocab_size = cast("s.Embedding", model.source_embedding).vocab_size
        return s.Head(kind="lm", d_model=model.encoder.d_model, num_outputs=vocab_size, bias=True)
    if model.decoder is None or model.target_embedding is None:
        raise InputError(f"head: this {model.family} is an encoder, and '{head}' needs a decoder")
    if model.head is not None and model.head.kind == "lm":
        return model.head
    vocab_size = model.target_embedding.vocab_size
    if isinstance(model.decoder, s.TransformerStack):
        return s.Head(kind="lm", d_model=model.decoder.d_model, num_outputs=vocab_size, tie_embeddings=True)
    if isinstance(model.decoder, s.RecurrentStack):
        width, is_tied = model.decoder.output_dim, model.decoder.output_dim == model.target_embedding.d_model
        return s.Head(kind="lm", d_model=width, num_outputs=vocab_size, bias=True, tie_embeddings=is_tied)
    return s.Head(kind="lm", d_model=model.decoder.hidden_size, num_outputs=vocab_size, bias=True)


def _learned_query(width: int) -> s.Attention:
    """Return attention with a learned query over all states: texts of a Transformer have no [CLS] token."""
    return s.Attention(query_dim=width, use_projections=False)


def _recurrent_pool(model: s.Model) -> s.Attention | Literal["last", "mean", "concat", "final"]:
    """Return the decoder's attention, to be used with a learned query, or the last state if it has none.

    A bag of words has no order, so that its last word says no more than another one. The last word of ELMo is the end
    of the sentence, whose backward state has read nothing else.
    """
    if isinstance(model.decoder, s.RecurrentDecoder):
        return model.decoder.attention or "last"
    default: Literal["last", "mean"] = "mean" if isinstance(model.encoder, s.BagOfWords | s.BiLM) else "last"
    return model.head.pool if model.head is not None and model.head.pool is not None else default
