"""The contestants of `train_seq2seq.py`: their inputs, and for each a model with its loss on a batch of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.families import transformer
from qkv.nn.construction import build
from qkv.nn.model import EncoderDecoder
from qkv.nn.position import sinusoids
from qkv.nn.ragged import Ragged

PAD, IGNORED, DROPOUT = 0, -100, 0.1


@dataclass(frozen=True)
class Size:
    """The size of a model and the distribution of its input lengths."""

    d_model: int
    heads: int
    layers: int
    d_ff: int
    vocab_size: int
    log_mean: float  # mean of the logarithm of a length
    log_std: float  # standard deviation of that logarithm
    min_length: int
    max_length: int


SIZES = {
    "base": Size(512, 8, 6, 2048, 16000, 3.1, 0.5, 4, 80),
    "words": Size(128, 4, 2, 512, 64, 2.0, 0.3, 4, 12),
}


@dataclass
class Pairs:
    """Sources, and targets with a start token: the decoder reads all but the last and predicts all but the first."""

    sources: list[Tensor]
    targets: list[Tensor]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that encoder and decoder read."""
        return sum(map(len, self.sources)) + self.num_labels

    @property
    def num_labels(self) -> int:
        return sum(len(t) - 1 for t in self.targets)

    def split(self, max_pairs: int, min_count: int = 1, by_length: bool = False) -> list[Pairs]:
        """Return the pairs in at least `min_count` micro-batches of at most `max_pairs` pairs."""
        order = list(range(len(self.sources)))
        if by_length:
            order.sort(key=lambda i: (len(self.targets[i]), len(self.sources[i])))
        count = max(min_count, math.ceil(len(order) / max_pairs))
        return [
            Pairs([self.sources[i] for i in indices], [self.targets[i] for i in indices])
            for indices in (chunk.tolist() for chunk in torch.tensor(order).chunk(count))
        ]


def draw(size: Size, pairs: int, seed: int, device: torch.device) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(pairs, generator=generator)
    sources = torch.exp(noise * size.log_std + size.log_mean).round().clamp(size.min_length, size.max_length).long()
    drift = torch.randint(-3, 4, (pairs,), generator=generator)
    targets = (sources + drift).clamp(size.min_length, size.max_length)

    def tokens(n: int) -> Tensor:
        return torch.randint(4, size.vocab_size, (n,), generator=generator).to(device)

    return Pairs([tokens(n) for n in sources.tolist()], [tokens(n + 1) for n in targets.tolist()])


def step_flops(size: Size, pairs: Pairs) -> float:
    """Return the FLOPs of a step on the real tokens: two per weight and token, backward twice as many."""
    ns, nt = [len(s) for s in pairs.sources], [len(t) - 1 for t in pairs.targets]
    square, forward = size.d_model**2, size.d_model * size.d_ff
    encoder = sum(ns) * (4 * square + 2 * forward) + 2 * size.d_model * sum(n * n for n in ns)
    decoder = sum(nt) * (6 * square + 2 * forward) + sum(ns) * 2 * square
    decoder += 2 * size.d_model * sum(t * (s + t / 2) for s, t in zip(ns, nt, strict=True))
    return 3 * 2 * (size.layers * (encoder + decoder) + sum(nt) * size.d_model * size.vocab_size)


Loss = Callable[[Pairs], Tensor]


def pad(sequences: list[Tensor], fill: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=fill)  # [B, N]


def cached(collate: Callable[[Pairs], tuple[Tensor, ...]]) -> Callable[[Pairs], tuple[Tensor, ...]]:
    """Return a function that collates each batch once: in training, data loader workers do it in parallel."""
    cache: dict[int, tuple[Pairs, tuple[Tensor, ...]]] = {}

    def collate_cached(pairs: Pairs) -> tuple[Tensor, ...]:
        if id(pairs) not in cache:
            cache[id(pairs)] = (pairs, collate(pairs))
        return cache[id(pairs)][1]

    return collate_cached


def collate(pairs: Pairs) -> tuple[Tensor, ...]:
    """Return the padded sources, decoder inputs and labels."""
    decoder_inputs, labels = [t[:-1] for t in pairs.targets], [t[1:] for t in pairs.targets]
    return pad(pairs.sources, PAD), pad(decoder_inputs, PAD), pad(labels, IGNORED)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class TorchModel(nn.Module):
    """`torch.nn.Transformer` with the parts that it lacks: embeddings, positions, output."""

    position_table: Tensor

    def __init__(self, size: Size):
        super().__init__()
        self.tokens = nn.Embedding(size.vocab_size, size.d_model)
        nn.init.normal_(self.tokens.weight, std=size.d_model**-0.5)
        self.register_buffer("position_table", sinusoids(size.max_length + 1, size.d_model), persistent=False)
        self.backbone = nn.Transformer(
            size.d_model, size.heads, size.layers, size.layers, size.d_ff, DROPOUT, batch_first=True
        )
        # its dropout argument also applies to attention weights and hidden units, unlike in the other models
        for module in self.backbone.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0

    def embed(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * math.sqrt(self.tokens.embedding_dim) + self.position_table[: ids.shape[1]]
        return F.dropout(x, DROPOUT, self.training)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        n = target.shape[1]
        causal_mask = torch.ones(n, n, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.backbone(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal_mask,
            tgt_is_causal=True,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return F.linear(hidden, self.tokens.weight)  # [B, N, vocabulary]


def torch_row(size: Size, device: torch.device, compiled: bool) -> tuple[nn.Module, Loss]:
    model = TorchModel(size).to(device).train()
    run, batch = torch.compile(model) if compiled else model, cached(collate)

    def loss(pairs: Pairs) -> Tensor:
        source, decoder_inputs, labels = batch(pairs)
        return summed_loss(run(source, decoder_inputs), labels)

    return model, loss


def marian_row(size: Size, device: torch.device, compiled: bool) -> tuple[nn.Module, Loss]:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.MarianConfig(
        vocab_size=size.vocab_size,
        d_model=size.d_model,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.d_ff,
        decoder_ffn_dim=size.d_ff,
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

    def collate_with_mask(pairs: Pairs) -> tuple[Tensor, ...]:
        source, decoder_inputs, labels = collate(pairs)
        return source, (source != PAD).long(), decoder_inputs, labels

    batch = cached(collate_with_mask)

    def loss(pairs: Pairs) -> Tensor:
        source, mask, decoder_inputs, labels = batch(pairs)
        out = run(input_ids=source, attention_mask=mask, decoder_input_ids=decoder_inputs, use_cache=False)
        return summed_loss(out.logits, labels)

    return model, loss


def our_row(size: Size, device: torch.device, compiled: bool) -> tuple[nn.Module, Loss]:
    config = transformer.Config(
        d_model=size.d_model,
        heads=size.heads,
        layers=size.layers,
        d_ff=size.d_ff,
        dropout=DROPOUT,
        share_embeddings=True,
    )
    model = build(transformer.make_spec(config, source_vocab_size=size.vocab_size, target_vocab_size=size.vocab_size))
    assert isinstance(model, EncoderDecoder)
    model.to(device).train()
    run = torch.compile(model) if compiled else model

    def concatenate(pairs: Pairs) -> tuple[Tensor, ...]:
        decoder_inputs, labels = [t[:-1] for t in pairs.targets], [t[1:] for t in pairs.targets]
        return torch.cat(pairs.sources), torch.cat(decoder_inputs), torch.cat(labels)

    batch = cached(concatenate)

    def loss(pairs: Pairs) -> Tensor:
        source, decoder_inputs, labels = batch(pairs)
        source_lengths, target_lengths = [len(s) for s in pairs.sources], [len(t) - 1 for t in pairs.targets]
        logits = run(  # [T, vocabulary]
            Ragged.from_lengths(source, source_lengths), Ragged.from_lengths(decoder_inputs, target_lengths)
        )
        return F.cross_entropy(logits, labels, reduction="sum")

    return model, loss
