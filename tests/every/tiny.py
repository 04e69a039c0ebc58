"""Tiny models of every registered family and of every variant that its Config names. No family is named here."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkv import spec
from qkv.families import get_family, head_names, names
from qkv.families.heads import Pooling, pooling_name, with_pooling
from qkv.nn import Decoder, Encoder, EncoderDecoder, Ragged, build
from qkv.nn.two_stream import TwoStreamEncoder

VOCABULARY = 13
SMALL = {
    "d_model": 12,
    "d_ff": 24,
    "hidden_size": 24,
    "heads": 2,
    "layers": 2,
    "max_length": 16,
    "image_size": 6,
    "patch_size": 2,
}  # by the end of a field's name


@dataclass(frozen=True)
class Case:
    """A family with one field of its config set to one of its choices, or with one of its heads."""

    name: str
    shape: Any
    head: str | None = None  # None: the family's first head
    pooling: Pooling | None = None  # None: that of the head

    def spec(self) -> spec.Model:
        module = get_family(self.name)
        wanted = inspect.signature(module.make_spec).parameters
        sizes = {key: VOCABULARY for key in ("source_vocab_size", "target_vocab_size") if key in wanted}
        chosen = {} if self.head is None else {"head": self.head}
        made: spec.Model = module.make_spec(self.shape, **sizes, **chosen)
        return made if self.pooling is None else with_pooling(made, self.pooling)

    def model(self) -> Encoder | Decoder | EncoderDecoder:
        """Return the model in double precision, with random biases and gains, because zeros and ones hide errors."""
        torch.manual_seed(1)
        model = build(self.spec()).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def _shrunk(shape: Any) -> Any:
    small = {}
    for field in fields(shape):
        is_number = isinstance(getattr(shape, field.name), int) and not isinstance(getattr(shape, field.name), bool)
        for ending, size in SMALL.items():
            if is_number and field.name.endswith(ending):
                small[field.name] = size
    return replace(shape, **small)


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # a registered name is allowed too
        return tuple(choice for option in typing.get_args(hint) for choice in _choices(option))
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) is typing.Union:  # built-in names, or any other that is registered
        return tuple(choice for option in typing.get_args(hint) for choice in _choices(option) if option is not bool)
    return (False, True) if hint is bool else ()


def _cases() -> Iterator[tuple[str, Case]]:
    for name in names():
        module = get_family(name)
        shape = _shrunk(next(iter(module.PRESETS.values())))
        yield name, Case(name, shape)
        for key, hint in typing.get_type_hints(module.Config).items():
            for choice in _choices(hint):
                if choice != getattr(shape, key):
                    yield f"{name}-{key}={choice}", Case(name, replace(shape, **{key: choice}))
        for head in head_names(module):
            case = Case(name, shape, head)
            if not _has_unused_pool(case.spec()):
                yield f"{name}-head={head}", case
            if head == "sequence":
                yield from _pooled_cases(case)


def _pooled_cases(case: Case) -> Iterator[tuple[str, Case]]:
    head = case.spec().head
    assert head is not None
    poolings: tuple[Pooling, ...] = ("mean", "attention")
    if isinstance(case.spec().encoder, spec.RecurrentEncoder):
        poolings += ("final",)
    for pooling in poolings:
        if pooling != pooling_name(head):
            yield f"{case.name}-pooling={pooling}", replace(case, pooling=pooling)


def _has_unused_pool(s: spec.Model) -> bool:
    """Return whether a token-level head has a pool, as in recurrent models; the weights of the pool get no gradient."""
    return s.head is not None and s.head.pool is not None and s.head.is_token_level


CASES = dict(_cases())


def with_decoder() -> dict[str, Case]:
    """Return the cases with a decoder."""

    def writes(s: spec.Model) -> bool:
        return s.decoder is not None and s.head is not None and s.head.kind == "lm" and s.aux_head is None

    return {name: case for name, case in CASES.items() if writes(case.spec())}


def with_stack() -> dict[str, Case]:
    """Return the cases whose attention over whole sequences can use several kernels."""

    def stacked(s: spec.Model) -> bool:
        return isinstance(s.encoder, spec.TransformerStack) or isinstance(s.decoder, spec.TransformerStack)

    return {name: case for name, case in CASES.items() if stacked(case.spec())}


@dataclass(frozen=True)
class Batch:
    """Pairs of sequences; a model without an encoder or decoder reads one of the two."""

    sources: list[Tensor]
    targets: list[Tensor]

    @staticmethod
    def random(sources: list[int], targets: list[int]) -> Batch:
        ids = partial(torch.randint, 0, VOCABULARY, generator=torch.Generator().manual_seed(3))
        return Batch([ids((n,)) for n in sources], [ids((n,)) for n in targets])

    def take(self, rows: list[int]) -> Batch:
        return Batch([self.sources[i] for i in rows], [self.targets[i] for i in rows])

    def __len__(self) -> int:
        return len(self.sources)


def image(ids: Tensor, s: spec.PatchEmbedding) -> Tensor:
    """Return the image that a vision model reads for a sequence: random pixels seeded by its ids."""
    seed = sum(int(token) * VOCABULARY**place for place, token in enumerate(ids)) + len(ids)
    return torch.randn(
        s.num_channels, s.image_size, s.image_size, generator=torch.Generator().manual_seed(seed)
    ).double()


def outputs(model: Any, batch: Batch) -> list[Tensor]:
    """Return the model's output, split into one tensor per sequence."""
    if isinstance(model.spec.source_embedding, spec.PatchEmbedding):
        out = model(torch.stack([image(ids, model.spec.source_embedding) for ids in batch.sources]))
        return list(out if model.spec.head is not None else out.unflatten(0, (len(batch), -1)))
    source, target = Ragged.pack(batch.sources), Ragged.pack(batch.targets)
    read = source if isinstance(model, Encoder) else target  # the layout of the outputs
    num_types = getattr(model.spec.source_embedding, "num_segments", 0) or 2  # 0: segments are relative
    types = {"token_type_ids": read.layout.positions % num_types} if model.spec.has_token_types else {}
    if model.spec.aux_head is not None:  # both heads in one tensor, so that every test covers the second one
        each, once = model.forward_with_aux_head(read, **types)
        return [torch.cat([a.flatten(), b]) for a, b in zip(read.with_values(each).sequences(), once, strict=True)]
    out = model(source, target) if isinstance(model, EncoderDecoder) else model(read, **types)
    if isinstance(model, TwoStreamEncoder) and model.is_language_model:  # both streams, as both heads above
        both = zip(read.with_values(out).sequences(), predicted_again(model, batch), strict=True)
        return [torch.cat([content, query]) for content, query in both]
    once_each = model.spec.head is not None and not model.spec.head.is_token_level
    return list(out) if once_each else read.with_values(out).sequences()


def predicted_again(model: TwoStreamEncoder, batch: Batch) -> list[Tensor]:
    """Return the logits of the query stream for each sequence, which follows itself and is predicted backward."""
    source = Ragged.pack([torch.cat([ids, ids]) for ids in batch.sources])
    lengths = source.layout.lengths.repeat_interleave(source.layout.lengths) // 2  # [T]
    positions = source.layout.positions
    order = torch.where(positions < lengths, 0, 2 * lengths - positions)
    targets = Ragged.from_lengths(order.nonzero().flatten(), [len(ids) for ids in batch.sources])
    return targets.with_values(model(source, positions % 2, targets, order=order)).sequences()


def begin(model: Any, batch: Batch, rows: int, limit: int) -> Any:
    memory = model.encode(Ragged.pack(batch.sources)) if isinstance(model, EncoderDecoder) else None
    return model.init_state(memory, num_rows=rows, max_length=limit)
