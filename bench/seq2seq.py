"""The contestants of `train_seq2seq.py`: what they read, and each one's model with its loss on some pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.families import transformer
from qkv.nn.model import EncoderDecoder, build
from qkv.nn.position import sinusoids
from qkv.nn.ragged import Ragged

PAD, IGNORED, DROPOUT = 0, -100, 0.1


@dataclass(frozen=True)
class Size:
    """A model and the lengths of what it reads."""

    width: int
    heads: int
    layers: int
    hidden: int
    vocabulary: int
    middle: float  # of the logarithm of a length
    deviation: float
    shortest: int
    longest: int


SIZES = {
    "base": Size(512, 8, 6, 2048, 16000, 3.1, 0.5, 4, 80),
    "words": Size(128, 4, 2, 512, 64, 2.0, 0.3, 4, 12),
}


@dataclass
class Pairs:
    """Sources, and targets with a start token: the decoder reads all but the last, and says all but the first."""

    sources: list[Tensor]
    targets: list[Tensor]

    @property
    def real(self) -> int:
        """Tokens that encoder and decoder have to read."""
        return sum(map(len, self.sources)) + self.asked

    @property
    def asked(self) -> int:
        return sum(len(t) - 1 for t in self.targets)

    def pieces(self, most: int, least: int = 1, by_length: bool = False) -> list[Pairs]:
        """The same pairs in at least `least` pieces of at most `most` pairs."""
        order = list(range(len(self.sources)))
        if by_length:
            order.sort(key=lambda i: (len(self.targets[i]), len(self.sources[i])))
        count = max(least, math.ceil(len(order) / most))
        return [
            Pairs([self.sources[i] for i in part], [self.targets[i] for i in part])
            for part in (chunk.tolist() for chunk in torch.tensor(order).chunk(count))
        ]


def draw(size: Size, pairs: int, seed: int, device: torch.device) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(pairs, generator=generator)
    sources = torch.exp(noise * size.deviation + size.middle).round().clamp(size.shortest, size.longest).long()
    drift = torch.randint(-3, 4, (pairs,), generator=generator)
    targets = (sources + drift).clamp(size.shortest, size.longest)

    def words(n: int) -> Tensor:
        return torch.randint(4, size.vocabulary, (n,), generator=generator).to(device)

    return Pairs([words(n) for n in sources.tolist()], [words(n + 1) for n in targets.tolist()])


def work(size: Size, pairs: Pairs) -> float:
    """Floating point operations that a step needs on the real tokens: two a weight and token, backward twice that."""
    ns, nt = [len(s) for s in pairs.sources], [len(t) - 1 for t in pairs.targets]
    square, forward = size.width**2, size.width * size.hidden
    encoder = sum(ns) * (4 * square + 2 * forward) + 2 * size.width * sum(n * n for n in ns)
    decoder = sum(nt) * (6 * square + 2 * forward) + sum(ns) * 2 * square
    decoder += 2 * size.width * sum(t * (s + t / 2) for s, t in zip(ns, nt, strict=True))
    return 3 * 2 * (size.layers * (encoder + decoder) + sum(nt) * size.width * size.vocabulary)


Loss = Callable[[Pairs], Tensor]


def padded(sequences: list[Tensor], fill: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=fill)  # [B, N]


def prepared(make: Callable[[Pairs], tuple[Tensor, ...]]) -> Callable[[Pairs], tuple[Tensor, ...]]:
    """Collates each batch once: in a real run a loader's workers do it beside the step."""
    kept: dict[int, tuple[Pairs, tuple[Tensor, ...]]] = {}

    def ready(pairs: Pairs) -> tuple[Tensor, ...]:
        if id(pairs) not in kept:
            kept[id(pairs)] = (pairs, make(pairs))
        return kept[id(pairs)][1]

    return ready


def collate(pairs: Pairs) -> tuple[Tensor, ...]:
    """Source, what the decoder reads, and what it is asked for."""
    reads, asked = [t[:-1] for t in pairs.targets], [t[1:] for t in pairs.targets]
    return padded(pairs.sources, PAD), padded(reads, PAD), padded(asked, IGNORED)


def summed_loss(logits: Tensor, asked: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), asked.flatten(), ignore_index=IGNORED, reduction="sum")


class TorchModel(nn.Module):
    """`torch.nn.Transformer` with what it leaves to its user: embeddings, positions, output."""

    table: Tensor

    def __init__(self, size: Size):
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.tokens.weight, std=size.width**-0.5)
        self.register_buffer("table", sinusoids(size.longest + 1, size.width), persistent=False)
        self.body = nn.Transformer(
            size.width, size.heads, size.layers, size.layers, size.hidden, DROPOUT, batch_first=True
        )
        for (
            module
        ) in self.body.modules():  # its one switch also drops attention weights and hidden units: nobody else's does
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0

    def embed(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * math.sqrt(self.tokens.embedding_dim) + self.table[: ids.shape[1]]
        return F.dropout(x, DROPOUT, self.training)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        n = target.shape[1]
        later = torch.ones(n, n, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.body(
            self.embed(source),
            self.embed(target),
            tgt_mask=later,
            tgt_is_causal=True,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return F.linear(hidden, self.tokens.weight)  # [B, N, vocabulary]


def torch_row(size: Size, device: torch.device, compiled: bool) -> tuple[nn.Module, Loss]:
    model = TorchModel(size).to(device).train()
    run, batch = torch.compile(model) if compiled else model, prepared(collate)

    def loss(pairs: Pairs) -> Tensor:
        source, reads, asked = batch(pairs)
        return summed_loss(run(source, reads), asked)

    return model, loss


def marian_row(size: Size, device: torch.device, compiled: bool) -> tuple[nn.Module, Loss]:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.MarianConfig(
        vocab_size=size.vocabulary,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.hidden,
        decoder_ffn_dim=size.hidden,
        activation_function="relu",
        dropout=DROPOUT,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        max_position_embeddings=512,
        pad_token_id=PAD,
        eos_token_id=3,
        decoder_start_token_id=2,
        attn_implementation="sdpa",
    )
    model: Any = transformers.MarianMTModel(config).to(device).train()
    run = torch.compile(model) if compiled else model

    def masked(pairs: Pairs) -> tuple[Tensor, ...]:
        source, reads, asked = collate(pairs)
        return source, (source != PAD).long(), reads, asked

    batch = prepared(masked)

    def loss(pairs: Pairs) -> Tensor:
        source, real, reads, asked = batch(pairs)
        out = run(input_ids=source, attention_mask=real, decoder_input_ids=reads, use_cache=False)
        return summed_loss(out.logits, asked)

    return model, loss


def our_row(size: Size, device: torch.device, compiled: bool) -> tuple[nn.Module, Loss]:
    shape = transformer.Config(
        d_model=size.width, heads=size.heads, layers=size.layers, d_ff=size.hidden, dropout=DROPOUT, share_embeddings=True
    )
    model = build(transformer.make_spec(shape, source_vocab_size=size.vocabulary, target_vocab_size=size.vocabulary))
    assert isinstance(model, EncoderDecoder)
    model.to(device).train()
    run = torch.compile(model) if compiled else model

    def flat(pairs: Pairs) -> tuple[Tensor, ...]:
        reads, asked = [t[:-1] for t in pairs.targets], [t[1:] for t in pairs.targets]
        return torch.cat(pairs.sources), torch.cat(reads), torch.cat(asked)

    batch = prepared(flat)

    def loss(pairs: Pairs) -> Tensor:
        source, reads, asked = batch(pairs)
        lengths = [len(s) for s in pairs.sources], [len(t) - 1 for t in pairs.targets]
        logits = run(Ragged.from_lengths(source, lengths[0]), Ragged.from_lengths(reads, lengths[1]))  # [T, vocabulary]
        return F.cross_entropy(logits, asked, reduction="sum")

    return model, loss
