"""The only shells: Encoder, Decoder, EncoderDecoder. `build(spec)` makes the one that the spec describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.embed import Embed
from qkv.nn.heads import LanguageModelHead, SequenceHead
from qkv.nn.position import Learned
from qkv.nn.ragged import Ragged
from qkv.nn.recurrent import Recurrent, RecurrentDecoder, RecurrentState
from qkv.nn.stack import Encoded, Stack, StackState


@dataclass
class State:
    """What a decoder carries from step to step."""

    body: StackState | RecurrentState
    position: int

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from row rows[i]; both must belong to one sentence."""
        self.body.reorder(rows)


class Model(nn.Module):
    """What all shells share: a spec and the device they live on."""

    def __init__(self, s: spec.Model):
        super().__init__()
        self.spec = s

    def tie(self) -> None:
        """Makes one tensor of what the spec says is one; a model that shares nothing has nothing to do."""
        return

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class Encoder(Model):
    """Tokens to vectors, and with a head to logits."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        self.source = _embed(s.source, "source")
        self.encoder = _encoder(s.encoder)
        self.head = _head(s.head)

    def encode(self, source: Ragged) -> Encoded:
        return _encoded(self.encoder(self.source(source)))

    def forward(self, source: Ragged) -> Tensor:
        """Hidden [T, width]; with a head, logits: [B, labels] for a sequence, [T, vocabulary] for a language model."""
        hidden = self.encode(source).hidden
        if self.head is None:
            return hidden.values
        logits: Tensor = self.head(hidden if isinstance(self.head, SequenceHead) else hidden.values)
        return logits


class _Stepping(Model):
    """A model that writes one token at a time: step(tokens, state) -> logits, state."""

    target: Embed
    decoder: Stack | RecurrentDecoder
    head: LanguageModelHead

    def tie(self) -> None:
        """Makes one tensor of what the spec says is one; again after weights were replaced."""
        if self.spec.head is not None and self.spec.head.tied:
            self.head.linear.weight = self.target.tokens.weight

    def begin(self, memory: Encoded | None, rows: int, limit: int) -> State:
        """Room for `rows` outputs of at most `limit` tokens; the rows of one sentence lie side by side."""
        if isinstance(self.decoder, RecurrentDecoder):
            assert memory is not None
            return State(self.decoder.start(memory, rows), 0)
        like = memory.hidden.values if memory is not None else self.target.tokens.weight
        return State(self.decoder.start(memory, rows, limit, like), 0)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """The next token's logits, given one more token a row.  # [R] -> [R, vocabulary]"""
        x = self.target.at(tokens, torch.full_like(tokens, state.position))
        hidden = self.decoder.step(x, state.body)  # type: ignore[arg-type]  # the state is the decoder's own
        return self.head(hidden), State(state.body, state.position + 1)


class Decoder(_Stepping):
    """A language model: each token sees those before it."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        if not isinstance(s.decoder, spec.Stack):
            raise InputError(f"{s.family}: a decoder without an encoder must be a stack")
        self.target = _embed(s.target, "target")
        self.decoder = Stack(s.decoder)
        self.head = _language_model_head(s)
        self.tie()

    def forward(self, tokens: Ragged) -> Tensor:
        """Logits for the token after each.  # [T] -> [T, vocabulary]"""
        logits: Tensor = self.head(_encoded(self.decoder(self.target(tokens))).hidden.values)
        return logits


class EncoderDecoder(_Stepping):
    """A sequence goes in, another comes out."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        assert s.decoder is not None  # else build had chosen another shell
        if s.shared and s.source is not None and s.target is not None and s.source.vocabulary != s.target.vocabulary:
            sizes = f"{s.source.vocabulary} and {s.target.vocabulary} tokens"
            raise InputError(
                f"model.shared: source and target have {sizes}; one table needs one vocabulary (text.joint)"
            )
        self.source = _embed(s.source, "source")
        self.encoder = _encoder(s.encoder)
        self.target = _embed(s.target, "target")
        self.decoder = Stack(s.decoder) if isinstance(s.decoder, spec.Stack) else RecurrentDecoder(s.decoder)
        self.head = _language_model_head(s)
        self.tie()

    def tie(self) -> None:
        if self.spec.shared:  # the name that comes first is the one that checkpoints hold
            self.target.tokens.weight = self.source.tokens.weight
        super().tie()

    def encode(self, source: Ragged) -> Encoded:
        """Computed once a source, whatever is decoded from it."""
        return _encoded(self.encoder(self.source(source)))

    def decode(self, memory: Encoded, target: Ragged, own: float = 0.0) -> Tensor:
        """Hidden for every target token; `own`: how often a recurrent decoder is fed its own output.  # [T, width]"""
        x = self.target(target)
        if isinstance(self.decoder, RecurrentDecoder):
            return _encoded(self.decoder(x, memory, self._say, own)).hidden.values
        if own:
            raise InputError("feeding a decoder its own outputs in training needs a recurrent decoder")
        return _encoded(self.decoder(x, memory)).hidden.values

    def forward(self, source: Ragged, target: Ragged, own: float = 0.0) -> Tensor:
        """Logits for the token after each target token.  # [Ts], [Tt] -> [Tt, vocabulary]"""
        logits: Tensor = self.head(self.decode(self.encode(source), target, own))
        return logits

    def _say(self, hidden: Tensor, position: int) -> Tensor:
        said = self.head(hidden).argmax(-1)
        return self.target.at(said, torch.full_like(said, position))


def build(s: spec.Model) -> Encoder | Decoder | EncoderDecoder:
    """The module that a spec describes, freshly initialised."""
    shell: Any = Encoder if s.decoder is None else Decoder if s.encoder is None else EncoderDecoder
    model: Encoder | Decoder | EncoderDecoder = shell(s)
    model.apply(_initialise)
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # after the matrices: a tied output matrix is an embedding
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    return model


def _embed(s: spec.Embed | None, side: str) -> Embed:
    if s is None:
        raise InputError(f"the model has a part that reads the {side} and no {side} embedding")
    return Embed(s)


def _encoder(s: spec.Stack | spec.Recurrent | None) -> Stack | Recurrent:
    if s is None:
        raise InputError("the model has neither an encoder nor a decoder")
    return Stack(s) if isinstance(s, spec.Stack) else Recurrent(s)


def _encoded(out: Any) -> Encoded:
    assert isinstance(out, Encoded)  # nn.Module calls are untyped
    return out


def _head(s: spec.Head | None) -> LanguageModelHead | SequenceHead | None:
    if s is None:
        return None
    return SequenceHead(s) if s.kind == "sequence" else LanguageModelHead(s)


def _language_model_head(s: spec.Model) -> LanguageModelHead:
    if s.head is None or s.head.kind != "lm":
        raise InputError(f"{s.family}: a model that writes needs a head of kind 'lm'")
    tied = s.target if s.head.tied else None
    if tied is not None and (tied.vocabulary, tied.width) != (s.head.outputs, s.head.width):
        raise InputError(f"{s.family}: a head tied to the target embedding needs its vocabulary and its width")
    return LanguageModelHead(s.head)


def _initialise(module: nn.Module) -> None:
    """Glorot for matrices, width^-1/2 for embeddings, as the Transformer's authors did; cells keep torch's."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Learned):
        nn.init.normal_(module.weight, std=0.02)
