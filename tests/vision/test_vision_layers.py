"""What towers are made of, against PyTorch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxis.models.common.towers.lfm3 import patches_around
from jaxis.models.common.towers.patches import Patches, pack_patches, unpack_patches
from jaxis.models.common.towers.positions import stretched_positions

PADDED = 64


def patches_of(height, width, merge_size=1):
    """A view's, padded, whose patches have one pixel."""
    packed = pack_patches(np.zeros((height, width, 3), np.uint8), 1, merge_size, PADDED)
    return unpack_patches(jnp.asarray(packed), 1, PADDED, 3)


def in_rows(values, patches: Patches, height, width):
    """[P, C] -> [height, width, C]."""
    rows, columns = (np.asarray(each)[: height * width] for each in (patches.rows, patches.columns))
    placed = np.zeros((height, width, values.shape[-1]), np.float32)
    placed[rows, columns] = np.asarray(values)[: height * width]
    return placed


@pytest.mark.parametrize(("mode", "is_cubic"), [("bilinear", False), ("bicubic", True)])
@pytest.mark.parametrize("aligns_corners", [False, True])
@pytest.mark.parametrize(("height", "width"), [(6, 4), (2, 10), (8, 8)])
def test_positions_are_stretched_as_pytorch_interpolates(mode, is_cubic, aligns_corners, height, width):
    table = np.random.default_rng(0).normal(size=(5, 5, 3)).astype(np.float32)
    patches = patches_of(height, width, merge_size=2)
    ours = stretched_positions(jnp.asarray(table), patches, is_cubic=is_cubic, aligns_corners=aligns_corners)
    expected = torch.nn.functional.interpolate(
        torch.tensor(table).permute(2, 0, 1)[None], size=(height, width), mode=mode, align_corners=aligns_corners
    )
    np.testing.assert_allclose(in_rows(ours, patches, height, width), expected[0].permute(1, 2, 0), atol=2e-6)


def test_beyond_the_table_of_positions_there_may_be_nothing():
    table = np.random.default_rng(0).normal(size=(5, 5, 3)).astype(np.float32)
    patches = patches_of(6, 8, merge_size=2)
    ours = stretched_positions(jnp.asarray(table), patches, is_zero_beyond=True)
    down, across = (torch.tensor((np.arange(size) + 0.5) / size * 2 - 1, dtype=torch.float32) for size in (6, 8))
    places = torch.stack([across.expand(6, 8), down[:, None].expand(6, 8)], dim=-1)[None]
    expected = torch.nn.functional.grid_sample(
        torch.tensor(table).permute(2, 0, 1)[None], places, padding_mode="zeros", align_corners=False
    )
    np.testing.assert_allclose(in_rows(ours, patches, 6, 8), expected[0].permute(1, 2, 0), atol=2e-6)


@pytest.mark.parametrize("side", [3, 5])
@pytest.mark.parametrize(("height", "width"), [(6, 4), (2, 10)])
def test_the_patches_around_each_are_those_that_pytorch_convolves(side, height, width):
    x = np.random.default_rng(0).normal(size=(PADDED, 3)).astype(np.float32)
    patches = patches_of(height, width, merge_size=2)
    around = np.pad(x, ((0, 1), (0, 0)))[np.asarray(patches_around(patches, side // 2))].sum(axis=1)
    image = torch.tensor(in_rows(x, patches, height, width)).permute(2, 0, 1)[None]
    expected = torch.nn.functional.conv2d(image, torch.ones(3, 1, side, side), padding=side // 2, groups=3)
    np.testing.assert_allclose(in_rows(around, patches, height, width), expected[0].permute(1, 2, 0), atol=1e-5)
