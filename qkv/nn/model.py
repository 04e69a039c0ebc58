"""The model shells Encoder, Decoder and EncoderDecoder, which share one interface, and `build`, which chooses one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.bag_of_words import BagOfWords
from qkv.nn.bilm import BiLM
from qkv.nn.embedding import TokenEmbedding
from qkv.nn.frontend import FrontEnd, RawInput, build_front_end, build_token_embedding
from qkv.nn.memory import Memory
from qkv.nn.ragged import Ragged
from qkv.nn.recurrent import RecurrentDecoder, RecurrentEncoder
from qkv.nn.recurrent_stack import RecurrentStack
from qkv.nn.segment_recurrence import empty_memory, run_with_memory
from qkv.nn.shell import HEAD_MODULES, DecoderState, Model, as_encoder_output, build_heads, is_head_or_lora
from qkv.nn.stack import EncoderOutput, Stack, StackState

__all__ = [
    "HEAD_MODULES",
    "Decoder",
    "DecoderState",
    "Encoder",
    "EncoderDecoder",
    "Model",
    "is_head_or_lora",
]

_DEFAULT_NEW_TOKENS = 64  # default length of the continuation of a prompt


class Encoder(Model):
    """Encoder-only model: hidden states of tokens or patches, and logits with a head."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        self.source_embedding = build_front_end(s.source_embedding)
        self.encoder = _build_encoder(s.encoder)
        self.head, self.aux_head = build_heads(s)
        self.tie_weights()

    @property
    def front_end(self) -> FrontEnd:
        return self.source_embedding

    @property
    def input_stack(self) -> Stack | RecurrentEncoder | BagOfWords | BiLM:
        return self.encoder

    def hidden_states(self, source: RawInput, token_type_ids: Tensor | None = None) -> EncoderOutput:
        return self._run_backbone(self.encoder, self.embed_inputs(source, token_type_ids))

    def logits(self, source: RawInput, positions: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        output: Tensor = self(source, token_type_ids, positions)  # called as a module, so that its hooks run (FSDP)
        return output

    def forward(
        self,
        source: RawInput,
        token_type_ids: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        return_logits: bool = True,
    ) -> Tensor:
        """Return the head's logits, or hidden states [T, width] if the model has no head.

        Args:
            source: token ids [T], or images [B, channels, side, side].
            token_type_ids: the segment of each token [T], for models with segments.
            positions: for token-level heads, indices of the tokens whose logits are returned; None: all.
            return_logits: False returns the input of the head's last linear layer instead, for fused losses.
        """
        if self.head is None:
            return self.hidden_states(source, token_type_ids).hidden.to_tokens().values
        x = self.embed_inputs(source, token_type_ids)
        hidden = self._run_backbone(self.encoder, x, pooled_token=self.head.pooled_token).hidden
        return self._apply_head(hidden, positions, return_logits)


class _Autoregressive(Model):
    """Shell with a decoder, which generates one token per step."""

    target_embedding: TokenEmbedding
    decoder: Stack | RecurrentDecoder | RecurrentStack

    def _output_embedding_weight(self) -> Tensor:
        return self.target_embedding.token_weight

    def init_state(self, encoder_output: EncoderOutput | None, num_rows: int, max_length: int) -> DecoderState:
        """Return the state before the first token, with space for `max_length` tokens in each of `num_rows` rows.

        Rows of the same source are adjacent.
        """
        like = encoder_output.hidden.values if encoder_output is not None else self.target_embedding.token_weight
        position = torch.zeros(num_rows, dtype=torch.long, device=like.device)
        return DecoderState(self.decoder.init_state(encoder_output, num_rows, max_length, like), position)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        # a finished row runs along until it leaves the batch, so its position is clamped to the table
        positions = state.position.clamp(max=self.target_embedding.max_length - 1)
        x = self.target_embedding.embed_at(tokens, positions)
        hidden = self.decoder.step(x, state.layer_states)  # type: ignore[arg-type]  # the state comes from this decoder
        return self._lm_logits(hidden), DecoderState(state.layer_states, state.position + 1)

    def _lm_logits(self, hidden: Tensor) -> Tensor:
        if self.head is None or self.head.spec.kind != "lm":
            raise InputError(f"{self.spec.family}: generation needs a head of kind 'lm'")
        logits: Tensor = self.head(hidden)
        return logits


class Decoder(_Autoregressive):
    """Decoder-only model (GPT, LSTM language model): the output of a token depends on it and on preceding tokens."""

    continues_input = True

    def __init__(self, s: spec.Model):
        super().__init__(s)
        assert isinstance(s.decoder, spec.TransformerStack | spec.RecurrentStack)  # see `check_model`
        self.target_embedding = build_token_embedding(s.target_embedding)
        self.decoder: Stack | RecurrentStack
        self.decoder = Stack(s.decoder) if isinstance(s.decoder, spec.TransformerStack) else RecurrentStack(s.decoder)
        self.head, self.aux_head = build_heads(s)
        self.tie_weights()

    @property
    def front_end(self) -> FrontEnd:
        return self.target_embedding

    @property
    def input_stack(self) -> Stack | RecurrentStack:
        return self.decoder

    def hidden_states(self, source: RawInput, token_type_ids: Tensor | None = None) -> EncoderOutput:
        return self._run_backbone(self.decoder, self.embed_inputs(source, token_type_ids))

    def logits(self, source: RawInput, positions: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        _refuse_token_types(token_type_ids)
        output: Tensor = self(source, positions)  # called as a module, so that its hooks run (FSDP)
        return output

    def forward(self, tokens: Ragged, positions: Tensor | None = None, *, return_logits: bool = True) -> Tensor:
        """Return the head's logits, or hidden states [T, width] if the model has no head.

        Args:
            tokens: token ids [T].
            positions: for token-level heads, indices of the tokens whose logits are returned; None: all.
            return_logits: False returns the input of the head's last linear layer instead, for fused losses.
        """
        if self.head is None:
            return self.hidden_states(tokens).hidden.values
        hidden = self._run_backbone(self.decoder, self.embed_inputs(tokens), pooled_token=self.head.pooled_token).hidden
        return self._apply_head(hidden, positions, return_logits)

    def initial_memory(self, num_streams: int) -> Memory:
        if isinstance(self.decoder, RecurrentStack):
            return self.decoder.initial_memory(num_streams)
        if not self.decoder.spec.memory_length:
            raise self._no_memory()
        return empty_memory(self.decoder.spec, num_streams, next(self.parameters()))

    def forward_with_memory(
        self, source: Ragged, memory: Memory, positions: Tensor | None = None, *, return_logits: bool = True
    ) -> tuple[Tensor, Memory]:
        output = self.hidden_with_memory(source, memory)
        assert output.memory is not None
        if self.head is None:
            return output.hidden.values, output.memory
        return self._apply_head(output.hidden, positions, return_logits), output.memory

    def hidden_with_memory(self, source: Ragged, memory: Memory) -> EncoderOutput:
        """Return the hidden states of a segment of each text, with the memory after it."""
        memory.check_streams(len(source))
        x = self.embed_inputs(source)
        if isinstance(self.decoder, RecurrentStack):
            return as_encoder_output(self.decoder(x, memory))
        if not self.decoder.spec.memory_length:
            raise self._no_memory()
        return run_with_memory(self.decoder, x, memory)

    def max_new_tokens(self, source_lengths: Sequence[int], requested: int | None = None) -> list[int]:
        if isinstance(self.decoder, RecurrentStack):  # its state does not grow
            return [requested or _DEFAULT_NEW_TOKENS for _ in source_lengths]
        max_length = self.max_input_length
        if max(source_lengths) >= max_length:
            raise InputError(
                f"a prompt of {max(source_lengths)} tokens leaves no room; this model takes {max_length} in all"
            )
        return [min(max_length - n, requested or _DEFAULT_NEW_TOKENS) for n in source_lengths]

    def prefill(
        self,
        source: RawInput | EncoderOutput,
        rows_per_source: int,
        max_new_tokens: int,
        *,
        watch_attention: bool = False,
    ) -> tuple[Tensor, DecoderState]:
        if watch_attention:
            raise InputError(f"this {self.spec.family} has no attention over a source, so it has no alignments")
        assert not isinstance(source, EncoderOutput)  # there is no encoder
        x = self.embed_inputs(source)
        if isinstance(self.decoder, RecurrentStack):
            return self._prefill_recurrent(self.decoder, x, rows_per_source)
        state = self.init_state(None, len(x) * rows_per_source, x.layout.max_length + max_new_tokens)
        assert isinstance(state.layer_states, StackState)
        hidden = as_encoder_output(self.decoder(x, None, state.layer_states)).hidden.values
        last_hidden = hidden[x.layout.cu_seqlens[1:].long() - 1]  # [B, width]
        positions = x.layout.lengths.repeat_interleave(rows_per_source)
        return self._lm_logits(last_hidden.repeat_interleave(rows_per_source, 0)), DecoderState(
            state.layer_states, positions
        )

    def _prefill_recurrent(self, stack: RecurrentStack, x: Ragged, rows_per_source: int) -> tuple[Tensor, DecoderState]:
        output = as_encoder_output(stack(x))
        assert output.memory is not None
        rows = torch.arange(len(x), device=x.values.device).repeat_interleave(rows_per_source)
        last_hidden = output.hidden.values[x.layout.cu_seqlens[1:].long() - 1]  # [B, output]
        state = stack.decoding_state(output.memory.select(rows))
        return self._lm_logits(last_hidden[rows]), DecoderState(state, x.layout.lengths[rows])


class EncoderDecoder(_Autoregressive):
    """Sequence-to-sequence model: the decoder attends to the encoded source, which any front end may read."""

    is_encoder_decoder = True

    def __init__(self, s: spec.Model):
        super().__init__(s)
        assert isinstance(s.decoder, spec.TransformerStack | spec.RecurrentDecoder)  # see `check_model`
        self.source_embedding = build_front_end(s.source_embedding)
        self.encoder = _build_encoder(s.encoder)
        self.target_embedding = build_token_embedding(s.target_embedding)
        self.decoder = Stack(s.decoder) if isinstance(s.decoder, spec.TransformerStack) else RecurrentDecoder(s.decoder)
        self.head, self.aux_head = build_heads(s)
        self.tie_weights()

    @property
    def front_end(self) -> FrontEnd:
        return self.source_embedding

    @property
    def input_stack(self) -> Stack | RecurrentEncoder | BagOfWords | BiLM:
        return self.encoder

    def tie_weights(self) -> None:
        if self.spec.share_embeddings:  # checkpoints hold the name that is registered first: the source's
            tokens = self.target_embedding.tokens
            assert isinstance(tokens, nn.Embedding)
            assert isinstance(self.source_embedding.token_weight, nn.Parameter)
            tokens.weight = self.source_embedding.token_weight
        super().tie_weights()

    def encode(self, source: RawInput) -> EncoderOutput:
        """Encode the source once; any number of outputs can be decoded from it."""
        return as_encoder_output(self.encoder(self.embed_inputs(source)))

    def decode(self, encoder_output: EncoderOutput, target: Ragged, scheduled_sampling: float = 0.0) -> Tensor:
        """Return the hidden state of every target token.  # [T, width]

        `scheduled_sampling` is the probability with which a recurrent decoder reads its own prediction instead of the
        target token.
        """
        x = self.target_embedding(target)
        if isinstance(self.decoder, RecurrentDecoder):
            return as_encoder_output(
                self.decoder(x, encoder_output, self._embed_argmax, scheduled_sampling)
            ).hidden.values
        if scheduled_sampling:
            raise InputError("scheduled_sampling needs a recurrent decoder")
        return self._run_backbone(self.decoder, x, encoder_output).hidden.values

    def hidden_states(self, source: RawInput, token_type_ids: Tensor | None = None) -> EncoderOutput:
        _refuse_token_types(token_type_ids)
        target = self._shifted_source(source)
        return EncoderOutput(target.with_values(self.decode(self.encode(source), target)))

    def logits(self, source: RawInput, positions: Tensor | None = None, token_type_ids: Tensor | None = None) -> Tensor:
        _refuse_token_types(token_type_ids)
        output: Tensor = self(source, self._shifted_source(source))  # called as a module, so that its hooks run (FSDP)
        return output if positions is None else output[positions]

    def forward(
        self, source: RawInput, target: Ragged, scheduled_sampling: float = 0.0, *, return_logits: bool = True
    ) -> Tensor:
        """Return the head's logits for every target token, or hidden states [T, width] if the model has no head.

        Args:
            source: token ids [T], or images [B, channels, side, side].
            target: the decoder's input: token ids [T] that begin with BOS (teacher forcing).
            scheduled_sampling: see `decode`.
            return_logits: False returns the input of the head's last linear layer instead, for fused losses.
        """
        hidden = self.decode(self.encode(source), target, scheduled_sampling)
        return hidden if self.head is None else self._apply_head(target.with_values(hidden), None, return_logits)

    def max_new_tokens(self, source_lengths: Sequence[int], requested: int | None = None) -> list[int]:
        return [min(self.target_embedding.max_length, requested or 2 * n + 16) for n in source_lengths]

    def prefill(
        self,
        source: RawInput | EncoderOutput,
        rows_per_source: int,
        max_new_tokens: int,
        *,
        watch_attention: bool = False,
    ) -> tuple[Tensor, DecoderState]:
        encoder_output = source if isinstance(source, EncoderOutput) else self.encode(source)
        num_rows = len(encoder_output.hidden) * rows_per_source
        bos_tokens = torch.full((num_rows,), self.spec.bos_id, device=encoder_output.hidden.values.device)
        state = self.init_state(encoder_output, num_rows, max_new_tokens)
        if watch_attention:
            state.watch_attention()
        return self.step(bos_tokens, state)

    def _shifted_source(self, source: RawInput) -> Ragged:
        if not isinstance(source, Ragged) or self.front_end.token_weight is None:
            raise InputError(
                f"{self.spec.family}: a decoder cannot read this source as its input; give it target tokens"
            )
        return source.shift_right(self.spec.bos_id)

    def _embed_argmax(self, hidden: Tensor, position: int) -> Tensor:
        tokens = self._lm_logits(hidden).argmax(-1)
        return self.target_embedding.embed_at(tokens, torch.full_like(tokens, position))


def _refuse_token_types(token_type_ids: Tensor | None) -> None:
    if token_type_ids is not None:
        raise InputError("this model has no segment embeddings; leave out token_type_ids")


def _build_encoder(
    s: spec.TransformerStack | spec.RecurrentEncoder | spec.BagOfWords | spec.BiLM | None,
) -> Stack | RecurrentEncoder | BagOfWords | BiLM:
    if s is None:
        raise InputError("the model has neither an encoder nor a decoder")
    if isinstance(s, spec.BagOfWords):
        return BagOfWords(s)
    if isinstance(s, spec.BiLM):
        return BiLM(s)
    return Stack(s) if isinstance(s, spec.TransformerStack) else RecurrentEncoder(s)
