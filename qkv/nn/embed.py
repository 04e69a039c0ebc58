"""Tokens to vectors, and images to vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.dropout import dropout
from qkv.nn.norm import norm
from qkv.nn.position import Learned, Sinusoid
from qkv.nn.ragged import Layout, Ragged


class Embed(nn.Module):
    """Token embedding, scaled where the paper scales it, plus position."""

    def __init__(self, s: spec.Embed):
        super().__init__()
        if s.padding is not None and not 0 <= s.padding < s.vocabulary:
            raise InputError(f"the padding token {s.padding} is none of the vocabulary's {s.vocabulary}")
        self.spec = s
        self.tokens = nn.Embedding(s.vocabulary, s.width, padding_idx=s.padding)
        self.scale = math.sqrt(s.width) if s.scale else 1.0
        self.position: nn.Module | None = None
        if s.position == "sinusoid":
            self.position = Sinusoid(s.length, s.width)
        elif s.position == "halves":
            self.position = Sinusoid(s.length, s.width, in_halves=True)
        elif s.position == "learned":
            self.position = Learned(s.length, s.width, s.offset)
        self.segments = nn.Embedding(s.segments, s.width) if s.segments else None
        self.norm = None if s.norm is None else norm(s.norm, s.width)

    def forward(self, ids: Ragged, segments: Tensor | None = None) -> Ragged:
        """Ids, and the segments they belong to where the model has them (None: the first).  # [T] -> [T, width]"""
        if ids.layout.longest > self.spec.length:
            raise InputError(f"a sequence of {ids.layout.longest} tokens; this model takes at most {self.spec.length}")
        return ids.like(self.at(ids.values, ids.layout.positions, segments))

    def at(self, ids: Tensor, positions: Tensor, segments: Tensor | None = None) -> Tensor:
        """Tokens at given places, as a step of decoding needs them.  # [R], [R] -> [R, width]"""
        x: Tensor = self.tokens(ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        elif segments is not None:
            raise InputError("this model has no segments; give the tokens alone")
        if self.position is not None:
            x = x + self.position(positions)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x


class Patches(nn.Module):
    """An image cut into squares, each made a vector by one linear map; a learned vector stands first for the whole."""

    def __init__(self, s: spec.Patches):
        super().__init__()
        if s.patch < 1 or s.image < s.patch or s.image % s.patch:
            raise InputError(f"an image of {s.image} pixels a side does not divide into patches of {s.patch}")
        self.spec = s
        self.projection = nn.Conv2d(s.channels, s.width, kernel_size=s.patch, stride=s.patch)
        self.whole = nn.Parameter(torch.empty(1, 1, s.width))
        self.position = nn.Parameter(torch.empty(1, s.length, s.width))
        self.reset_parameters()

    def reset_parameters(self, spread: float = 0.02) -> None:
        for parameter in (self.whole, self.position):
            nn.init.trunc_normal_(parameter, std=spread)

    def forward(self, images: Tensor | Ragged) -> Ragged:
        """[B, channels, image, image] -> [B * length, width]

        Whoever knows the layout of what comes out may give it with them: a CUDA graph cannot make one.
        """
        layout = images.layout if isinstance(images, Ragged) else None
        images = images.values if isinstance(images, Ragged) else images
        wanted = [self.spec.channels, self.spec.image, self.spec.image]
        if layout is not None and (images.dim() != 4 or layout.sizes != (self.spec.length,) * len(images)):
            raise InputError("this model looks at images; it was given tokens")
        if images.dim() != 4 or list(images.shape[1:]) != wanted:
            raise InputError(f"images of {list(images.shape)}; this model takes [batch, {', '.join(map(str, wanted))}]")
        if not images.is_floating_point():
            raise InputError(f"images of {images.dtype}; this model takes them as qkv.data.images prepares them")
        patches = self.projection(images.to(self.projection.weight.dtype))  # [B, width, rows, columns]
        patches = patches.flatten(2).transpose(1, 2)  # [B, patches, width]
        x = torch.cat([self.whole.expand(len(images), -1, -1), patches], 1) + self.position
        if self.training and self.spec.dropout:
            x = dropout(x, self.spec.dropout)
        return Ragged(x.flatten(0, 1), layout or Layout([self.spec.length] * len(images), x.device))
