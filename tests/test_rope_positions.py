"""Positions of tokens in prompts with images, as transformers counts them."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from jaxis.prompts import EmbeddedInput, rope_positions

TEXT, IMAGE = 0, 1


def image(start, rows, columns):
    return EmbeddedInput(b"", start, rows * columns, tuple(range(rows * columns)), (), b"", grid=(rows, columns))


def counted_by_the_reference(types, grids):
    """i64 [3, tokens]; `grids` are rows and columns of merged patches."""
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    )
    model.get_vision_position_ids = functools.partial(Qwen2_5_VLModel.get_vision_position_ids, model)
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids])
    types = torch.tensor([types])
    positions, _ = Qwen2_5_VLModel.get_rope_index(model, torch.zeros_like(types), types, image_grid_thw=grids)
    return positions[:, 0].numpy()


@pytest.mark.parametrize("parts", [(4, (3, 2), 5), ((2, 5), 1, (1, 1), 3), (2, (4, 4)), (1, (1, 7), 2, (7, 1), 9)])
def test_tokens_count_on_after_images_as_in_the_reference(parts):
    types, images = [], []
    for part in parts:
        if isinstance(part, tuple):
            images.append(image(len(types), *part))
            types += [IMAGE] * (part[0] * part[1])
        else:
            types += [TEXT] * part
    expected = counted_by_the_reference(types, [each.grid for each in images])
    stop = len(types)
    np.testing.assert_array_equal(rope_positions(images, 0, stop), expected)
    for cut in range(stop):
        pieces = [rope_positions(images, 0, cut), rope_positions(images, cut, stop)]
        np.testing.assert_array_equal(np.concatenate(pieces, axis=1), expected)


def test_tokens_count_on_after_the_last_time_of_a_video():
    """By the rule of Qwen2.5-VL's report: its grids are apart in time, and what follows is after all of them."""
    video = EmbeddedInput(b"", 3, 12, tuple(range(12)), (), b"", grid=(2, 3), times=(0, 4))
    of_time = [0, 1, 2, *[3] * 6, *[7] * 6, 8, 9]
    rows = [0, 1, 2, *[3, 3, 3, 4, 4, 4] * 2, 8, 9]
    columns = [0, 1, 2, *[3, 4, 5] * 4, 8, 9]
    np.testing.assert_array_equal(rope_positions([video], 0, 17), [of_time, rows, columns])
    for cut in range(17):
        pieces = [rope_positions([video], 0, cut), rope_positions([video], cut, 17)]
        np.testing.assert_array_equal(np.concatenate(pieces, axis=1), [of_time, rows, columns])
