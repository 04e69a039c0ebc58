"""The only shells: Encoder, Decoder, EncoderDecoder. `build(spec)` makes the one that the spec describes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv import spec
from qkv.errors import InputError
from qkv.nn.attention import Attention
from qkv.nn.embedding import PatchEmbedding, TokenEmbedding
from qkv.nn.heads import Head
from qkv.nn.layer_mix import concat_last_four, make_scalar_mix, num_concat_layers
from qkv.nn.lora import LORA_PARAMETERS, add_lora, merge_lora
from qkv.nn.position import LearnedPositions, RelativePositionBias
from qkv.nn.ragged import PooledToken, Ragged
from qkv.nn.recurrent import RecurrentDecoder, RecurrentEncoder, RecurrentState
from qkv.nn.stack import EncoderOutput, Stack, StackState

HEAD_MODULES = ("head", "aux_head", "scalar_mix")  # what stands on a body


@dataclass
class DecoderState:
    """What a decoder carries from step to step."""

    layer_states: StackState | RecurrentState
    position: int | Tensor  # of the next token: for all rows, or [R]

    def reorder(self, indices: Tensor) -> None:
        """Row i goes on from row indices[i]; both must belong to one sentence."""
        self.layer_states.reorder(indices)


class Model(nn.Module):
    """What all shells share: a spec and the device they live on."""

    backbone_frozen: bool = False  # the body is not trained, and its dropout is off
    head: Head | None
    aux_head: Head | None

    def __init__(self, s: spec.Model):
        super().__init__()
        self.spec = s
        self.scalar_mix = make_scalar_mix(s)

    def tie_weights(self) -> None:
        """Makes one tensor of what the spec says is one; a model that shares nothing has nothing to do."""
        return

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def freeze_backbone(self) -> None:
        """From now on only what stands on the body is trained, and adapters in it where there are some.

        Without adapters no gradient passes the body: it runs as it does in use, and keeps nothing for a backward pass.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_head_or_lora(name))
        self.backbone_frozen = self.spec.lora is None
        self.train(self.training)

    def train(self, mode: bool = True) -> Model:
        super().train(mode)
        for name, child in self.named_children():
            if self.backbone_frozen and name not in HEAD_MODULES:
                child.eval()
        return self

    def _run_backbone(self, stack: nn.Module, x: Ragged, encoder_output: EncoderOutput | None = None, pooled_token: PooledToken | None = None) -> EncoderOutput:
        """What a head reads of the last stack's layers; `pooled_token`: only this token of each sequence where that is cheaper."""
        if self.spec.feature_layers == "last":
            if pooled_token is not None and isinstance(stack, Stack):
                return _as_encoder_output(stack(x, encoder_output, pooled_token=pooled_token))
            return _as_encoder_output(stack(x) if encoder_output is None else stack(x, encoder_output))
        assert isinstance(stack, Stack)
        hidden_states = stack.all_hidden_states(x, encoder_output)
        return EncoderOutput(x.with_values(concat_last_four(hidden_states) if self.scalar_mix is None else self.scalar_mix(hidden_states)))


class Encoder(Model):
    """Tokens, or an image's patches, to vectors, and with a head to logits."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        self.source_embedding = PatchEmbedding(s.source_embedding) if isinstance(s.source_embedding, spec.PatchEmbedding) else _build_embedding(s.source_embedding, "source")
        self.encoder = _build_encoder(s.encoder)
        self.head, self.aux_head = _build_heads(s)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.spec.head is not None and self.spec.head.tie_embeddings:
            assert self.head is not None
            assert self.head.linear is not None
            assert isinstance(self.source_embedding, TokenEmbedding)
            self.head.linear.weight = self.source_embedding.tokens.weight

    def embed(self, source: Ragged | Tensor, segments: Tensor | None = None) -> Ragged:
        """What the first block reads: ids [T] with their segments, or images [B, channels, side, side]."""
        embedded: Ragged = self.source_embedding(source) if segments is None else self.source_embedding(source, segments)
        return embedded

    def encode(self, source: Ragged | Tensor, segments: Tensor | None = None) -> EncoderOutput:
        return self._run_backbone(self.encoder, self.embed(source, segments))

    def forward(
        self, source: Ragged | Tensor, segments: Tensor | None = None, positions: Tensor | None = None, *, return_logits: bool = True
    ) -> Tensor:
        """Hidden [T, width]; with a head, its logits. `positions`: only for these tokens, where it judges each token.

        Not `return_logits`: what the head's last linear layer reads, for who has a cheaper use of it than all its logits.
        """
        if self.head is None:
            return self.encode(source, segments).hidden.values
        hidden = self._run_backbone(self.encoder, self.embed(source, segments), pooled_token=self.head.pooled_token).hidden
        return _apply_head(self.head, hidden, positions, return_logits)

    def forward_with_aux_head(
        self, source: Ragged | Tensor, segments: Tensor | None = None, positions: Tensor | None = None, *, return_logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The logits of a model with two heads, as BERT's pretraining has them; `return_logits` is about the first."""
        return _apply_both_heads(self, self.encode(source, segments).hidden, positions, return_logits)


class _Autoregressive(Model):
    """A model that writes one token at a time: step(tokens, state) -> logits, state."""

    target_embedding: TokenEmbedding
    decoder: Stack | RecurrentDecoder

    def tie_weights(self) -> None:
        """Makes one tensor of what the spec says is one; again after weights were replaced."""
        if self.spec.head is not None and self.spec.head.tie_embeddings:
            assert self.head is not None
            assert self.head.linear is not None
            self.head.linear.weight = self.target_embedding.tokens.weight

    def init_state(self, encoder_output: EncoderOutput | None, num_rows: int, max_length: int) -> DecoderState:
        """Room for `num_rows` outputs of at most `max_length` tokens; the rows of one sentence lie side by side."""
        if isinstance(self.decoder, RecurrentDecoder):
            assert encoder_output is not None
            return DecoderState(self.decoder.init_state(encoder_output, num_rows), 0)
        like = encoder_output.hidden.values if encoder_output is not None else self.target_embedding.tokens.weight
        return DecoderState(self.decoder.init_state(encoder_output, num_rows, max_length, like), 0)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The next token's logits, given one more token a row.  # [R] -> [R, vocabulary]"""
        position = state.position
        # a row that wrote all it may is carried along until the others are done: it stays within the table
        max_position = self.target_embedding.spec.max_length - 1
        positions = position.clamp(max=max_position) if isinstance(position, Tensor) else torch.full_like(tokens, position)
        x = self.target_embedding.embed_at(tokens, positions)
        hidden = self.decoder.step(x, state.layer_states)  # type: ignore[arg-type]  # the state is the decoder's own
        return self._lm_logits(hidden), DecoderState(state.layer_states, position + 1)

    def _lm_logits(self, hidden: Tensor) -> Tensor:
        if self.head is None or self.head.spec.kind != "lm":
            raise InputError(f"{self.spec.family}: a model that writes needs a head of kind 'lm'")
        logits: Tensor = self.head(hidden)
        return logits


class Decoder(_Autoregressive):
    """A language model: each token sees those before it."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        if not isinstance(s.decoder, spec.TransformerStack):
            raise InputError(f"{s.family}: a decoder without an encoder must be a stack")
        self.target_embedding = _build_embedding(s.target_embedding, "target")
        self.decoder: Stack = Stack(s.decoder)
        self.head, self.aux_head = _build_heads(s)
        self.tie_weights()

    def encode(self, tokens: Ragged) -> EncoderOutput:
        """Hidden states, each of which knows the tokens up to its own."""
        return self._run_backbone(self.decoder, self.target_embedding(tokens))

    def forward(self, tokens: Ragged, positions: Tensor | None = None, *, return_logits: bool = True) -> Tensor:
        """Hidden [T, width]; with a head, its logits, or what its last layer reads (not `return_logits`). `positions`: only for these tokens."""
        if self.head is None:
            return self.encode(tokens).hidden.values
        hidden = self._run_backbone(self.decoder, self.target_embedding(tokens), pooled_token=self.head.pooled_token).hidden
        return _apply_head(self.head, hidden, positions, return_logits)

    def forward_with_aux_head(self, tokens: Ragged, positions: Tensor | None = None, *, return_logits: bool = True) -> tuple[Tensor, Tensor]:
        """The logits of a model with two heads, as GPT's fine-tuning has them; `return_logits` is about the first."""
        return _apply_both_heads(self, self.encode(tokens).hidden, positions, return_logits)

    def forward_with_hidden_states(self, tokens: Ragged, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The head's logits, and the hidden states [T, width] for whoever asks them for the next token too."""
        assert self.head is not None
        hidden = self.encode(tokens).hidden
        return _apply_head(self.head, hidden, positions, True), hidden.values

    def prefill(self, prompts: Ragged, rows_per_prompt: int, max_new_tokens: int) -> tuple[Tensor, DecoderState]:
        """Takes in a prompt a sentence: the next token's logits for each of its rows, with room for `max_new_tokens` more."""
        state = self.init_state(None, len(prompts) * rows_per_prompt, prompts.layout.max_length + max_new_tokens)
        assert isinstance(state.layer_states, StackState)
        hidden = _as_encoder_output(self.decoder(self.target_embedding(prompts), None, state.layer_states)).hidden.values
        last_hidden = hidden[prompts.layout.cu_seqlens[1:].long() - 1]  # [B, width]
        positions = prompts.layout.lengths.repeat_interleave(rows_per_prompt)
        return self._lm_logits(last_hidden.repeat_interleave(rows_per_prompt, 0)), DecoderState(state.layer_states, positions)


class EncoderDecoder(_Autoregressive):
    """A sequence goes in, another comes out."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        assert s.decoder is not None  # else build had chosen another shell
        if isinstance(s.source_embedding, spec.PatchEmbedding):
            raise InputError(f"{s.family}: an encoder-decoder that reads images is not there yet")
        if s.share_embeddings and s.source_embedding is not None and s.target_embedding is not None and s.source_embedding.vocab_size != s.target_embedding.vocab_size:
            vocab_sizes = f"{s.source_embedding.vocab_size} and {s.target_embedding.vocab_size} tokens"
            raise InputError(
                f"model.share_embeddings: source and target have {vocab_sizes}; one table needs one vocabulary (tokenizer.joint_vocab)"
            )
        self.source_embedding = _build_embedding(s.source_embedding, "source")
        self.encoder = _build_encoder(s.encoder)
        self.target_embedding = _build_embedding(s.target_embedding, "target")
        self.decoder = Stack(s.decoder) if isinstance(s.decoder, spec.TransformerStack) else RecurrentDecoder(s.decoder)
        self.head, self.aux_head = _build_heads(s)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.spec.share_embeddings:  # the name that comes first is the one that checkpoints hold
            self.target_embedding.tokens.weight = self.source_embedding.tokens.weight
        super().tie_weights()

    def encode(self, source: Ragged) -> EncoderOutput:
        """Computed once a source, whatever is decoded from it."""
        return _as_encoder_output(self.encoder(self.source_embedding(source)))

    def decode(self, encoder_output: EncoderOutput, target: Ragged, scheduled_sampling: float = 0.0) -> Tensor:
        """Hidden for every target token; `scheduled_sampling`: how often a recurrent decoder is fed its own output.  # [T, width]"""
        x = self.target_embedding(target)
        if isinstance(self.decoder, RecurrentDecoder):
            return _as_encoder_output(self.decoder(x, encoder_output, self._embed_argmax, scheduled_sampling)).hidden.values
        if scheduled_sampling:
            raise InputError("feeding a decoder its own outputs in training needs a recurrent decoder")
        return self._run_backbone(self.decoder, x, encoder_output).hidden.values

    def forward(self, source: Ragged, target: Ragged, scheduled_sampling: float = 0.0, *, return_logits: bool = True) -> Tensor:
        """Logits for the token after each target token, or those of another head; without one, hidden [Tt, width].

        Not `return_logits`: what the head's last linear layer reads.
        """
        hidden = self.decode(self.encode(source), target, scheduled_sampling)
        return hidden if self.head is None else _apply_head(self.head, target.with_values(hidden), None, return_logits)

    def _embed_argmax(self, hidden: Tensor, position: int) -> Tensor:
        tokens = self._lm_logits(hidden).argmax(-1)
        return self.target_embedding.embed_at(tokens, torch.full_like(tokens, position))


def build(s: spec.Model) -> Encoder | Decoder | EncoderDecoder:
    """The module that a spec describes, freshly initialised."""
    model_class: Any = Encoder if s.decoder is None else Decoder if s.encoder is None else EncoderDecoder
    model: Encoder | Decoder | EncoderDecoder = model_class(s)
    if s.lora is not None:
        add_lora(model, s.lora)
    init_weights(s, model.modules())
    return model


def set_features_and_lora(model: Model, feature_layers: spec.FeatureLayers, lora: spec.LoraConfig | None) -> None:
    """Lets a model's head read other layers, and puts adapters on the model or merges those that it has.

    A head that then reads more vectors or fewer than it did begins afresh.
    """
    if model.spec.lora is not None:
        merge_lora(model)
    if lora is not None:
        add_lora(model, lora)
    model.spec = spec.replace(model.spec, feature_layers=feature_layers, lora=lora)
    model.scalar_mix = make_scalar_mix(model.spec)
    head, num_layers = model.spec.head, num_concat_layers(model.spec)
    if head is not None and head.num_concat_layers != num_layers:
        model.spec = spec.replace(model.spec, head=spec.replace(head, num_concat_layers=num_layers))
        model.head = _build_heads(model.spec)[0]
        assert model.head is not None
        init_weights(model.spec, model.head.train(model.training).modules())


def is_head_or_lora(name: str) -> bool:
    """Whether a parameter is no part of the body as it was pretrained: a head's, or an adapter's."""
    root, _, rest = name.partition(".")
    return root in HEAD_MODULES or rest.rpartition(".")[2] in LORA_PARAMETERS


def build_on_meta(s: spec.Model) -> Encoder | Decoder | EncoderDecoder:
    """A model with shapes and no memory: nothing is drawn at random only to be thrown away."""
    with torch.device("meta"), _SkipInitOnMeta():
        return build(s)


class _SkipInitOnMeta(TorchFunctionMode):
    """Leaves tensors without memory alone: changing them in place does nothing, and takes torch a while."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.startswith("_") and name != "requires_grad_":
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


def init_weights(s: spec.Model, modules: Iterable[nn.Module]) -> None:
    """Draws modules' own parameters afresh: by the family's spread, or as the Transformer's authors did; cells keep
    torch's."""
    modules = list(modules)
    for module in modules:
        if isinstance(module, nn.Linear | nn.Conv2d):
            _init_matrix(module.weight, s.init_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, LearnedPositions | RelativePositionBias):
            nn.init.normal_(module.weight, std=s.init_std or 0.02)
        elif isinstance(module, PatchEmbedding):
            module.reset_parameters(s.init_std or 0.02)
    for module in modules:
        if isinstance(module, nn.Embedding):  # after the matrices: a tied output matrix is an embedding
            nn.init.normal_(module.weight, std=s.init_std or module.embedding_dim**-0.5)
        elif isinstance(module, Attention) and module.q is not None and module.score.kind == "dot" and not s.init_std:
            with torch.no_grad():  # small queries instead of divided scores, as T5 begins (Raffel et al. 2020)
                module.q.weight.mul_(module.spec.q_head_dim**-0.5)
        elif isinstance(module, Stack) and module.spec.scaled_residual_init:
            _scale_residual_init(module)


def _init_matrix(weight: Tensor, std: float | None) -> None:
    if std is None:
        nn.init.xavier_uniform_(weight)
    else:
        nn.init.normal_(weight, std=std)


def _scale_residual_init(stack: Stack) -> None:
    """Sums of N fresh terms spread as one does: the last matrix of each sublayer is divided by sqrt(N)."""
    suffixes = ("self_attention.o.weight", "cross_attention.o.weight", "feedforward.down.weight")
    residual_weights = [weight for name, weight in stack.named_parameters() if name.endswith(suffixes)]
    with torch.no_grad():
        for weight in residual_weights:
            weight.mul_(len(residual_weights) ** -0.5)


def _build_embedding(s: spec.Embedding | None, side: str) -> TokenEmbedding:
    if s is None:
        raise InputError(f"the model has a part that reads the {side} and no {side} embedding")
    return TokenEmbedding(s)


def _build_encoder(s: spec.TransformerStack | spec.RecurrentEncoder | None) -> Stack | RecurrentEncoder:
    if s is None:
        raise InputError("the model has neither an encoder nor a decoder")
    return Stack(s) if isinstance(s, spec.TransformerStack) else RecurrentEncoder(s)


def _as_encoder_output(out: Any) -> EncoderOutput:
    assert isinstance(out, EncoderOutput)  # nn.Module calls are untyped
    return out


def _build_heads(s: spec.Model) -> tuple[Head | None, Head | None]:
    embedding = s.target_embedding if s.decoder is not None else s.source_embedding
    tied_shape = (embedding.vocab_size, embedding.d_model) if isinstance(embedding, spec.Embedding) else None
    if s.head is not None and s.head.tie_embeddings and tied_shape != (s.head.num_outputs, s.head.d_model):
        raise InputError(f"{s.family}: a tied head needs the vocabulary and the width of the embedding")
    if s.head is None and s.aux_head is not None:
        raise InputError(f"{s.family}: a head stands beside none; make it the head")
    if s.head is not None and s.head.num_concat_layers != num_concat_layers(s):  # one that an earlier release wrote read their mean
        raise InputError(f"{s.family}: its head does not read {s.feature_layers} of its layers side by side; train it again")
    return (None if s.head is None else Head(s.head)), (None if s.aux_head is None else Head(s.aux_head))


def _apply_head(head: Head, hidden: Ragged, positions: Tensor | None, return_logits: bool) -> Tensor:
    if positions is not None and not head.spec.is_token_level:
        raise InputError(f"a head of kind '{head.spec.kind}' judges whole sequences, not single tokens")
    selected = hidden if positions is None else hidden.values[positions]
    output: Tensor = head(selected) if return_logits else head.compute_features(selected)
    return output


def _apply_both_heads(model: Encoder | Decoder, hidden: Ragged, positions: Tensor | None, return_logits: bool) -> tuple[Tensor, Tensor]:
    if model.head is None or model.aux_head is None:
        raise InputError(f"{model.spec.family}: this model has not two heads")
    aux_logits: Tensor = model.aux_head(hidden)
    return _apply_head(model.head, hidden, positions, return_logits), aux_logits
