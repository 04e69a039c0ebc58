"""An image becomes one vector a patch behind one for the whole (Dosovitskiy et al. 2021, equation 1)."""

from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.errors import InputError
from qkv.nn import BatchLayout, Ragged
from qkv.nn.embedding import PatchEmbedding

SPEC = spec.PatchEmbedding(image_size=6, patch_size=2, num_channels=3, d_model=5)
IMAGES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def by_hand(patches: PatchEmbedding, image: torch.Tensor) -> torch.Tensor:
    """[x_class; x_p E] + E_pos: patches row by row, each flattened and multiplied by one matrix."""
    weight, bias = patches.projection.weight.flatten(1), patches.projection.bias
    cut = [image[:, y : y + 2, x : x + 2].flatten() for y in (0, 2, 4) for x in (0, 2, 4)]
    rows = [patches.cls_token[0, 0], *(weight @ patch + bias for patch in cut)]
    return torch.stack(rows) + patches.position[0]


def test_patches_are_flattened_and_projected_row_by_row_behind_the_whole() -> None:
    patches = PatchEmbedding(SPEC)
    embedded = patches(IMAGES)
    assert embedded.layout.lengths_list == (SPEC.max_length,) * 4 == (10,) * 4
    torch.testing.assert_close(embedded.sequences(), [by_hand(patches, image) for image in IMAGES])


def test_a_layout_that_comes_with_the_images_is_that_of_what_comes_out() -> None:
    patches, layout = PatchEmbedding(SPEC), BatchLayout([SPEC.max_length] * 4)
    found = patches(Ragged(IMAGES, layout))
    assert found.layout is layout
    assert torch.equal(found.values, patches(IMAGES).values)


def test_an_image_does_not_depend_on_its_batch_mates() -> None:
    patches = PatchEmbedding(SPEC).double()
    alone = torch.cat([patches(image[None].double()).values for image in IMAGES])
    torch.testing.assert_close(patches(IMAGES.double()).values, alone)


def test_fresh_vectors_are_small_and_differ() -> None:
    patches = PatchEmbedding(spec.PatchEmbedding(image_size=16, patch_size=4, num_channels=1, d_model=64))
    assert 0.015 < float(patches.position.detach().std()) < 0.025
    assert float(patches.cls_token.detach().abs().max()) > 0


def test_every_parameter_learns() -> None:
    patches = PatchEmbedding(SPEC)
    patches(IMAGES).values.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in patches.parameters())


def test_dropout_is_for_training_only() -> None:
    patches = PatchEmbedding(spec.replace(SPEC, dropout=0.5))
    assert (patches(IMAGES).values == 0).any()
    assert torch.equal(patches.eval()(IMAGES).values, patches(IMAGES).values)
    assert not (patches(IMAGES).values == 0).any()


def test_images_take_the_precision_of_the_model() -> None:
    assert PatchEmbedding(SPEC).bfloat16()(IMAGES).values.dtype == torch.bfloat16
    assert PatchEmbedding(SPEC).double()(IMAGES).values.dtype == torch.double


@pytest.mark.parametrize("shape", [(3, 6, 6), (4, 3, 6, 8), (4, 1, 6, 6), (4, 6, 6, 3)])
def test_an_image_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"this model takes \[batch, 3, 6, 6\]"):
        PatchEmbedding(SPEC)(torch.zeros(shape))


def test_bytes_and_tokens_are_refused() -> None:
    with pytest.raises(InputError, match=r"images of torch.uint8"):
        PatchEmbedding(SPEC)(torch.zeros(4, 3, 6, 6, dtype=torch.uint8))
    with pytest.raises(InputError, match="it was given tokens"):
        PatchEmbedding(SPEC)(Ragged.from_lengths(torch.arange(5), [3, 2]))
    with pytest.raises(InputError, match="it was given tokens"):
        PatchEmbedding(SPEC)(Ragged(IMAGES, BatchLayout([9] * 4)))
    with pytest.raises(InputError, match="at least one sequence"):
        PatchEmbedding(SPEC)(torch.zeros(0, 3, 6, 6))


@pytest.mark.parametrize(("image", "patch"), [(7, 2), (2, 4), (6, 0), (0, 2)])
def test_an_image_that_does_not_divide_into_patches_is_refused(image: int, patch: int) -> None:
    with pytest.raises(InputError, match=f"{image} pixels does not divide into patches of {patch}"):
        PatchEmbedding(spec.replace(SPEC, image_size=image, patch_size=patch))
