"""Tokens to vectors, and images to vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError
from qkv.nn.dropout import dropout
from qkv.nn.norm import build_norm
from qkv.nn.position import LearnedPositions, SinusoidalPositions
from qkv.nn.ragged import BatchLayout, Ragged


class TokenEmbedding(nn.Module):
    """Token embedding, scaled where the paper scales it, plus position."""

    def __init__(self, s: spec.Embedding):
        super().__init__()
        if s.padding_idx is not None and not 0 <= s.padding_idx < s.vocab_size:
            raise InputError(f"the padding token {s.padding_idx} is none of the vocabulary's {s.vocab_size}")
        self.spec = s
        self.tokens = nn.Embedding(s.vocab_size, s.d_model, padding_idx=s.padding_idx)
        self.scale = math.sqrt(s.d_model) if s.scale_by_sqrt_dim else 1.0
        self.position: nn.Module | None = None
        if s.position == "sinusoid":
            self.position = SinusoidalPositions(s.max_length, s.d_model)
        elif s.position == "sinusoid_concat":
            self.position = SinusoidalPositions(s.max_length, s.d_model, concat=True)
        elif s.position == "learned":
            self.position = LearnedPositions(s.max_length, s.d_model, s.position_offset)
        self.segments = nn.Embedding(s.num_segments, s.d_model) if s.num_segments else None
        self.norm = None if s.norm is None else build_norm(s.norm, s.d_model)

    def forward(self, ids: Ragged, segments: Tensor | None = None) -> Ragged:
        """Ids, and the segments they belong to where the model has them (None: the first).  # [T] -> [T, width]"""
        if ids.layout.max_length > self.spec.max_length:
            raise InputError(f"a sequence of {ids.layout.max_length} tokens; this model takes at most {self.spec.max_length}")
        return ids.with_values(self.embed_at(ids.values, ids.layout.positions, segments))

    def embed_at(self, ids: Tensor, positions: Tensor, segments: Tensor | None = None) -> Tensor:
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


class PatchEmbedding(nn.Module):
    """An image cut into squares, each made a vector by one linear map; a learned vector stands first for the whole."""

    def __init__(self, s: spec.PatchEmbedding):
        super().__init__()
        if s.patch_size < 1 or s.image_size < s.patch_size or s.image_size % s.patch_size:
            raise InputError(f"an image of {s.image_size} pixels a side does not divide into patches of {s.patch_size}")
        self.spec = s
        self.projection = nn.Conv2d(s.num_channels, s.d_model, kernel_size=s.patch_size, stride=s.patch_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, s.d_model))
        self.position = nn.Parameter(torch.empty(1, s.max_length, s.d_model))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        for parameter in (self.cls_token, self.position):
            nn.init.trunc_normal_(parameter, std=std)

    def forward(self, images: Tensor | Ragged) -> Ragged:
        """[B, channels, image, image] -> [B * length, width]

        Whoever knows the layout of what comes out may give it with them: a CUDA graph cannot make one.
        """
        layout = images.layout if isinstance(images, Ragged) else None
        images = images.values if isinstance(images, Ragged) else images
        expected_shape = [self.spec.num_channels, self.spec.image_size, self.spec.image_size]
        if layout is not None and (images.dim() != 4 or layout.lengths_list != (self.spec.max_length,) * len(images)):
            raise InputError("this model looks at images; it was given tokens")
        if images.dim() != 4 or list(images.shape[1:]) != expected_shape:
            raise InputError(f"images of {list(images.shape)}; this model takes [batch, {', '.join(map(str, expected_shape))}]")
        if not images.is_floating_point():
            raise InputError(f"images of {images.dtype}; this model takes them as qkv.data.image_processor prepares them")
        patches = self.projection(images.to(self.projection.weight.dtype))  # [B, width, rows, columns]
        patches = patches.flatten(2).transpose(1, 2)  # [B, patches, width]
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.position
        if self.training and self.spec.dropout:
            x = dropout(x, self.spec.dropout)
        return Ragged(x.flatten(0, 1), layout or BatchLayout([self.spec.max_length] * len(images), x.device))
