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
from qkv.nn.adapter import OWN, adapt, merge
from qkv.nn.attention import Attention
from qkv.nn.embed import Embed, Patches
from qkv.nn.heads import Head
from qkv.nn.mix import joined, last_four, mix_of
from qkv.nn.position import Learned, Relative
from qkv.nn.ragged import End, Ragged
from qkv.nn.recurrent import Recurrent, RecurrentDecoder, RecurrentState
from qkv.nn.stack import Encoded, Stack, StackState

HEADS = ("head", "beside", "mix")  # what stands on a body


@dataclass
class State:
    """What a decoder carries from step to step."""

    body: StackState | RecurrentState
    position: int | Tensor  # of the next token: for all rows, or [R]

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from row rows[i]; both must belong to one sentence."""
        self.body.reorder(rows)


class Model(nn.Module):
    """What all shells share: a spec and the device they live on."""

    frozen: bool = False  # the body is not trained, and its dropout is off
    head: Head | None
    beside: Head | None

    def __init__(self, s: spec.Model):
        super().__init__()
        self.spec = s
        self.mix = mix_of(s)

    def tie(self) -> None:
        """Makes one tensor of what the spec says is one; a model that shares nothing has nothing to do."""
        return

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def freeze(self) -> None:
        """From now on only what stands on the body is trained, and adapters in it where there are some.

        Without adapters no gradient passes the body: it runs as it does in use, and keeps nothing for a backward pass.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(beside_body(name))
        self.frozen = self.spec.adapters is None
        self.train(self.training)

    def train(self, mode: bool = True) -> Model:
        super().train(mode)
        for name, part in self.named_children():
            if self.frozen and name not in HEADS:
                part.eval()
        return self

    def _hidden(self, stack: nn.Module, x: Ragged, memory: Encoded | None = None, only: End | None = None) -> Encoded:
        """What a head reads of the last stack's layers; `only` this token of each sequence where that is cheaper."""
        if self.spec.read == "last":
            if only is not None and isinstance(stack, Stack):
                return _encoded(stack(x, memory, read=only))
            return _encoded(stack(x) if memory is None else stack(x, memory))
        assert isinstance(stack, Stack)
        layers = stack.layers(x, memory)
        return Encoded(x.like(last_four(layers) if self.mix is None else self.mix(layers)))


class Encoder(Model):
    """Tokens, or an image's patches, to vectors, and with a head to logits."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        self.source = Patches(s.source) if isinstance(s.source, spec.Patches) else _embed(s.source, "source")
        self.encoder = _encoder(s.encoder)
        self.head, self.beside = _heads(s)
        self.tie()

    def tie(self) -> None:
        if self.spec.head is not None and self.spec.head.tied:
            assert self.head is not None
            assert self.head.linear is not None
            assert isinstance(self.source, Embed)
            self.head.linear.weight = self.source.tokens.weight

    def embed(self, source: Ragged | Tensor, segments: Tensor | None = None) -> Ragged:
        """What the first block reads: ids [T] with their segments, or images [B, channels, side, side]."""
        embedded: Ragged = self.source(source) if segments is None else self.source(source, segments)
        return embedded

    def encode(self, source: Ragged | Tensor, segments: Tensor | None = None) -> Encoded:
        return self._hidden(self.encoder, self.embed(source, segments))

    def forward(
        self, source: Ragged | Tensor, segments: Tensor | None = None, at: Tensor | None = None, *, last: bool = True
    ) -> Tensor:
        """Hidden [T, width]; with a head, its logits. `at`: only for these tokens, where it judges each token.

        Not `last`: what the head's last linear layer reads, for who has a cheaper use of it than all its logits.
        """
        if self.head is None:
            return self.encode(source, segments).hidden.values
        hidden = self._hidden(self.encoder, self.embed(source, segments), only=self.head.end).hidden
        return _judged(self.head, hidden, at, last)

    def both(
        self, source: Ragged | Tensor, segments: Tensor | None = None, at: Tensor | None = None, *, last: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The logits of a model with two heads, as BERT's pretraining has them; `last` is about the first."""
        return _both(self, self.encode(source, segments).hidden, at, last)


class _Stepping(Model):
    """A model that writes one token at a time: step(tokens, state) -> logits, state."""

    target: Embed
    decoder: Stack | RecurrentDecoder

    def tie(self) -> None:
        """Makes one tensor of what the spec says is one; again after weights were replaced."""
        if self.spec.head is not None and self.spec.head.tied:
            assert self.head is not None
            assert self.head.linear is not None
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
        position = state.position
        # a row that wrote all it may is carried along until the others are done: it stays within the table
        longest = self.target.spec.length - 1
        places = position.clamp(max=longest) if isinstance(position, Tensor) else torch.full_like(tokens, position)
        x = self.target.at(tokens, places)
        hidden = self.decoder.step(x, state.body)  # type: ignore[arg-type]  # the state is the decoder's own
        return self._said(hidden), State(state.body, position + 1)

    def _said(self, hidden: Tensor) -> Tensor:
        if self.head is None or self.head.spec.kind != "lm":
            raise InputError(f"{self.spec.family}: a model that writes needs a head of kind 'lm'")
        logits: Tensor = self.head(hidden)
        return logits


class Decoder(_Stepping):
    """A language model: each token sees those before it."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        if not isinstance(s.decoder, spec.Stack):
            raise InputError(f"{s.family}: a decoder without an encoder must be a stack")
        self.target = _embed(s.target, "target")
        self.decoder: Stack = Stack(s.decoder)
        self.head, self.beside = _heads(s)
        self.tie()

    def encode(self, tokens: Ragged) -> Encoded:
        """Hidden states, each of which knows the tokens up to its own."""
        return self._hidden(self.decoder, self.target(tokens))

    def forward(self, tokens: Ragged, at: Tensor | None = None, *, last: bool = True) -> Tensor:
        """Hidden [T, width]; with a head, its logits, or what its `last` layer reads. `at`: only for these tokens."""
        if self.head is None:
            return self.encode(tokens).hidden.values
        hidden = self._hidden(self.decoder, self.target(tokens), only=self.head.end).hidden
        return _judged(self.head, hidden, at, last)

    def both(self, tokens: Ragged, at: Tensor | None = None, *, last: bool = True) -> tuple[Tensor, Tensor]:
        """The logits of a model with two heads, as GPT's fine-tuning has them; `last` is about the first."""
        return _both(self, self.encode(tokens).hidden, at, last)

    def and_hidden(self, tokens: Ragged, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The head's logits, and the hidden states [T, width] for whoever asks them for the next token too."""
        assert self.head is not None
        hidden = self.encode(tokens).hidden
        return _judged(self.head, hidden, at, True), hidden.values

    def read(self, prompts: Ragged, rows: int, limit: int) -> tuple[Tensor, State]:
        """Takes in a prompt a sentence: the next token's logits for each of its `rows`, with room for `limit` more."""
        state = self.begin(None, len(prompts) * rows, prompts.layout.longest + limit)
        assert isinstance(state.body, StackState)
        hidden = _encoded(self.decoder(self.target(prompts), None, state.body)).hidden.values
        last = hidden[prompts.layout.offsets[1:].long() - 1]  # [B, width]
        places = prompts.layout.lengths.repeat_interleave(rows)
        return self._said(last.repeat_interleave(rows, 0)), State(state.body, places)


class EncoderDecoder(_Stepping):
    """A sequence goes in, another comes out."""

    def __init__(self, s: spec.Model):
        super().__init__(s)
        assert s.decoder is not None  # else build had chosen another shell
        if isinstance(s.source, spec.Patches):
            raise InputError(f"{s.family}: an encoder-decoder that reads images is not there yet")
        if s.shared and s.source is not None and s.target is not None and s.source.vocabulary != s.target.vocabulary:
            sizes = f"{s.source.vocabulary} and {s.target.vocabulary} tokens"
            raise InputError(
                f"model.shared: source and target have {sizes}; one table needs one vocabulary (text.joint)"
            )
        self.source = _embed(s.source, "source")
        self.encoder = _encoder(s.encoder)
        self.target = _embed(s.target, "target")
        self.decoder = Stack(s.decoder) if isinstance(s.decoder, spec.Stack) else RecurrentDecoder(s.decoder)
        self.head, self.beside = _heads(s)
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
        return self._hidden(self.decoder, x, memory).hidden.values

    def forward(self, source: Ragged, target: Ragged, own: float = 0.0, *, last: bool = True) -> Tensor:
        """Logits for the token after each target token, or those of another head; without one, hidden [Tt, width].

        Not `last`: what the head's last linear layer reads.
        """
        hidden = self.decode(self.encode(source), target, own)
        return hidden if self.head is None else _judged(self.head, target.like(hidden), None, last)

    def _say(self, hidden: Tensor, position: int) -> Tensor:
        said = self._said(hidden).argmax(-1)
        return self.target.at(said, torch.full_like(said, position))


def build(s: spec.Model) -> Encoder | Decoder | EncoderDecoder:
    """The module that a spec describes, freshly initialised."""
    shell: Any = Encoder if s.decoder is None else Decoder if s.encoder is None else EncoderDecoder
    model: Encoder | Decoder | EncoderDecoder = shell(s)
    if s.adapters is not None:
        adapt(model, s.adapters)
    initialise(s, model.modules())
    return model


def altered(model: Model, read: spec.Read, adapters: spec.Adapters | None) -> None:
    """Lets a model's head read other layers, and puts adapters on the model or merges those that it has.

    A head that then reads more vectors or fewer than it did begins afresh.
    """
    if model.spec.adapters is not None:
        merge(model)
    if adapters is not None:
        adapt(model, adapters)
    model.spec = spec.replace(model.spec, read=read, adapters=adapters)
    model.mix = mix_of(model.spec)
    head, count = model.spec.head, joined(model.spec)
    if head is not None and head.joined != count:
        model.spec = spec.replace(model.spec, head=spec.replace(head, joined=count))
        model.head = _heads(model.spec)[0]
        assert model.head is not None
        initialise(model.spec, model.head.train(model.training).modules())


def beside_body(name: str) -> bool:
    """Whether a parameter is no part of the body as it was pretrained: a head's, or an adapter's."""
    first, _, last = name.partition(".")
    return first in HEADS or last.rpartition(".")[2] in OWN


def hollow(s: spec.Model) -> Encoder | Decoder | EncoderDecoder:
    """A model with shapes and no memory: nothing is drawn at random only to be thrown away."""
    with torch.device("meta"), _Undrawn():
        return build(s)


class _Undrawn(TorchFunctionMode):
    """Leaves tensors without memory alone: changing them in place does nothing, and takes torch a while."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.startswith("_") and name != "requires_grad_":
            changed = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(changed, Tensor) and changed.is_meta:
                return changed
        return func(*args, **(kwargs or {}))


def initialise(s: spec.Model, modules: Iterable[nn.Module]) -> None:
    """Draws modules' own parameters afresh: by the family's spread, or as the Transformer's authors did; cells keep
    torch's."""
    modules = list(modules)
    for module in modules:
        if isinstance(module, nn.Linear | nn.Conv2d):
            _draw(module.weight, s.spread)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Learned | Relative):
            nn.init.normal_(module.weight, std=s.spread or 0.02)
        elif isinstance(module, Patches):
            module.reset_parameters(s.spread or 0.02)
    for module in modules:
        if isinstance(module, nn.Embedding):  # after the matrices: a tied output matrix is an embedding
            nn.init.normal_(module.weight, std=s.spread or module.embedding_dim**-0.5)
        elif isinstance(module, Attention) and module.q is not None and module.score.kind == "dot" and not s.spread:
            with torch.no_grad():  # small queries instead of divided scores, as T5 begins (Raffel et al. 2020)
                module.q.weight.mul_(module.spec.query_size**-0.5)
        elif isinstance(module, Stack) and module.spec.scaled_start:
            _shrink(module)


def _draw(weight: Tensor, spread: float | None) -> None:
    if spread is None:
        nn.init.xavier_uniform_(weight)
    else:
        nn.init.normal_(weight, std=spread)


def _shrink(stack: Stack) -> None:
    """Sums of N fresh terms spread as one does: the last matrix of each sublayer is divided by sqrt(N)."""
    last = ("attention.o.weight", "cross.o.weight", "feedforward.down.weight")
    writing = [weight for name, weight in stack.named_parameters() if name.endswith(last)]
    with torch.no_grad():
        for weight in writing:
            weight.mul_(len(writing) ** -0.5)


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


def _heads(s: spec.Model) -> tuple[Head | None, Head | None]:
    table = s.target if s.decoder is not None else s.source
    sizes = (table.vocabulary, table.width) if isinstance(table, spec.Embed) else None
    if s.head is not None and s.head.tied and sizes != (s.head.outputs, s.head.width):
        raise InputError(f"{s.family}: a tied head needs the vocabulary and the width of the embedding")
    if s.head is None and s.beside is not None:
        raise InputError(f"{s.family}: a head stands beside none; make it the head")
    if s.head is not None and s.head.joined != joined(s):  # one that an earlier release wrote read their mean
        raise InputError(f"{s.family}: its head does not read {s.read} of its layers side by side; train it again")
    return (None if s.head is None else Head(s.head)), (None if s.beside is None else Head(s.beside))


def _judged(head: Head, hidden: Ragged, at: Tensor | None, last: bool) -> Tensor:
    if at is not None and not head.spec.at_each_token:
        raise InputError(f"a head of kind '{head.spec.kind}' judges whole sequences, not single tokens")
    chosen = hidden if at is None else hidden.values[at]
    judged: Tensor = head(chosen) if last else head.rows(chosen)
    return judged


def _both(model: Encoder | Decoder, hidden: Ragged, at: Tensor | None, last: bool) -> tuple[Tensor, Tensor]:
    if model.head is None or model.beside is None:
        raise InputError(f"{model.spec.family}: this model has not two heads")
    beside: Tensor = model.beside(hidden)
    return _judged(model.head, hidden, at, last), beside
