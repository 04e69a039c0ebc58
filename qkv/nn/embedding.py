"""Embeddings: tokens to vectors, and image patches to vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import InputError, describe_value
from qkv.nn.adaptive import AdaptiveEmbedding
from qkv.nn.dropout import dropout
from qkv.nn.norm import build_norm
from qkv.nn.position import LearnedPositions, SinusoidalPositions
from qkv.nn.ragged import BatchLayout, Ragged


class TokenEmbedding(nn.Module):
    """Sum of token, segment and position embeddings, with optional scaling, normalization and dropout."""

    def __init__(self, s: spec.Embedding):
        super().__init__()
        if s.padding_idx is not None and not 0 <= s.padding_idx < s.vocab_size:
            raise InputError(f"padding_idx: {s.padding_idx} is no token of a vocabulary of {s.vocab_size}")
        self.spec = s
        self.tokens = (
            nn.Embedding(s.vocab_size, s.d_model, padding_idx=s.padding_idx)
            if s.clusters is None
            else AdaptiveEmbedding(s)
        )
        self.scale = math.sqrt(s.d_model) if s.scale_by_sqrt_dim else 1.0
        self.position: nn.Module | None = None
        if s.position == "sinusoid":
            self.position = SinusoidalPositions(s.max_length, s.d_model)
        elif s.position == "sinusoid_concat":
            self.position = SinusoidalPositions(s.max_length, s.d_model, concat=True)
        elif s.position == "learned":
            self.position = LearnedPositions(s.max_length, s.d_model, s.position_offset)
        self.segments = nn.Embedding(s.num_segments, s.d_model) if s.num_segments else None
        self.query_vector = nn.Parameter(torch.empty(s.d_model)) if s.query_vector else None
        self.norm = None if s.norm is None else build_norm(s.norm, s.d_model)

    def init_weights(self, std: float | None) -> None:
        """Draw the query vector; embedding matrices are initialized separately."""
        if self.query_vector is not None:
            nn.init.normal_(self.query_vector, std=std or 0.02)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens per sequence."""
        return self.spec.max_length

    @property
    def token_weight(self) -> Tensor:
        """Embedding matrix of the tokens, which an output layer or another embedding may share."""
        return self.tokens.weight

    def forward(self, ids: Ragged, token_type_ids: Tensor | None = None) -> Ragged:
        """Embed token ids; `token_type_ids` None: every token belongs to the first segment.  # [T] -> [T, width]"""
        check_token_ids(ids, self.max_length)
        return ids.with_values(self.embed_at(ids.values, ids.layout.positions, token_type_ids))

    def embed_at(self, ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Embed tokens at explicit positions, as a decoding step needs it.  # [R], [R] -> [R, width]"""
        x: Tensor = self.tokens(ids)
        if self.training and self.spec.word_dropout:
            mask = dropout(x.new_ones(self.spec.vocab_size, 1), self.spec.word_dropout)  # [vocabulary, 1]
            x = x * mask[ids]
        if self.scale != 1.0:
            x = x * self.scale
        if self.segments is not None:
            x = x + (self.segments.weight[0] if token_type_ids is None else self.segments(token_type_ids))
        elif token_type_ids is not None:
            raise InputError("this model has no segment embeddings; leave out token_type_ids")
        if self.position is not None:
            x = x + self.position(positions)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x


def check_token_ids(ids: Ragged, max_length: int) -> None:
    """Refuse a batch that is not packed, and sequences that are too long."""
    if not isinstance(ids, Ragged) or ids.values.dim() != 1 or ids.values.is_floating_point():
        raise _not_token_ids(ids)
    if ids.layout.max_length > max_length:
        raise InputError(f"a sequence of {ids.layout.max_length} tokens; this model takes at most {max_length}")


def _not_token_ids(ids: object) -> InputError:
    """Return the error for a batch that is not packed, such as the padded tensors [B, N] of other libraries."""
    if isinstance(ids, Ragged):
        return InputError(f"the model reads token ids [T], not values {list(ids.values.shape)} of {ids.values.dtype}")
    batch = f"a tensor {list(ids.shape)}" if isinstance(ids, Tensor) else describe_value(ids)
    remedy = "qkv.Ragged.from_padded(ids, attention_mask), or give texts to the bundle of qkv.load"
    return InputError(f"the model reads a packed batch of token ids, not {batch}; use {remedy}")


class PatchEmbedding(nn.Module):
    """Linear projection of the square patches of an image, after a learned [CLS] vector (Dosovitskiy et al. 2021)."""

    token_weight: None = None  # an image has no vocabulary, so there is no matrix to share

    def __init__(self, s: spec.PatchEmbedding):
        super().__init__()
        if s.patch_size < 1 or s.image_size < s.patch_size or s.image_size % s.patch_size:
            raise InputError(
                f"an image with sides of {s.image_size} pixels does not divide into patches of {s.patch_size}"
            )
        self.spec = s
        self.projection = nn.Conv2d(s.num_channels, s.d_model, kernel_size=s.patch_size, stride=s.patch_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, s.d_model))
        self.position = nn.Parameter(torch.empty(1, s.max_length, s.d_model))
        self.init_weights(None)

    def init_weights(self, std: float | None) -> None:
        """Draw the [CLS] vector and the positions; the projection is initialized like any other matrix."""
        for parameter in (self.cls_token, self.position):
            nn.init.trunc_normal_(parameter, std=std or 0.02)

    @property
    def max_length(self) -> int:
        """Number of vectors per image: its patches and [CLS]."""
        return self.spec.max_length

    def forward(self, images: Tensor | Ragged, token_type_ids: Tensor | None = None) -> Ragged:
        """[B, channels, side, side] -> [B * length, width]

        Images may come as a `Ragged` with the layout of the output, because a layout cannot be created while a CUDA
        graph is recorded.
        """
        if token_type_ids is not None:
            raise InputError("this model reads images, which have no token_type_ids; leave them out")
        layout = images.layout if isinstance(images, Ragged) else None
        images = images.values if isinstance(images, Ragged) else images
        expected_shape = [self.spec.num_channels, self.spec.image_size, self.spec.image_size]
        if layout is not None and (images.dim() != 4 or layout.lengths_list != (self.spec.max_length,) * len(images)):
            raise InputError("this model reads images; it was given tokens")
        if images.dim() != 4 or list(images.shape[1:]) != expected_shape:
            raise InputError(
                f"images of shape {list(images.shape)}; this model takes [batch, {', '.join(map(str, expected_shape))}]"
            )
        if not images.is_floating_point():
            raise InputError(f"images of {images.dtype}; prepare them with qkv.data.image_processor")
        patches = self.projection(images.to(self.projection.weight.dtype))  # [B, width, rows, columns]
        patches = patches.flatten(2).transpose(1, 2)  # [B, patches, width]
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.position
        if self.training and self.spec.dropout:
            x = dropout(x, self.spec.dropout)
        return Ragged(x.flatten(0, 1), layout or BatchLayout([self.spec.max_length] * len(images), x.device))
