"""How LLaVA-OneVision puts the embeddings of an image's squares together, against transformers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.llava_onevision.configuration_llava_onevision import LlavaOnevisionConfig
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel, image_size_to_num_patches

from jaxis.image_encoder.encoder import _in_order
from jaxis.vision.processors.llava_next import LlavaOnevisionProcessor
from jaxis.vision.processors.preprocessor_config import HALF_SCALE

SIZE, PATCH, EMBEDDING = 384, 14, 3
SIDE = SIZE // PATCH


@pytest.mark.parametrize("most_squares", [1, 4, 9])
def test_lines_of_an_image_are_those_of_the_reference(most_squares):
    """With the canvases of the published models, and fewer tokens of large images."""
    config = LlavaOnevisionConfig(vision_config={"image_size": SIZE, "patch_size": PATCH})
    canvases = config.image_grid_pinpoints
    processor = LlavaOnevisionProcessor(
        **{"pixel_scale": HALF_SCALE, "resample": 3, "placeholder": "<image>", "placeholder_id": 7},
        **{"size": SIZE, "patch_size": PATCH, "canvases": canvases, "most_squares": most_squares},
    )
    rng, num_shrunk = np.random.default_rng(most_squares), 0
    for _ in range(20):
        width, height = (int(2 ** rng.uniform(4, 12)) for _ in range(2))
        count = image_size_to_num_patches([height, width], canvases, SIZE)
        made = rng.standard_normal((count, SIDE**2, EMBEDDING)).astype(np.float32)
        end = rng.standard_normal(EMBEDDING).astype(np.float32)
        [expected], _ = LlavaOnevisionModel.pack_image_features(
            SimpleNamespace(config=config),
            [torch.tensor(made)],
            torch.tensor([[height, width]]),
            image_newline=torch.tensor(end),
            vision_aspect_ratio=f"anyres_max_{most_squares}",
        )
        token_ids, rows = processor.tokens(width, height)
        order, weights = processor.order(width, height)
        ours = _in_order(np.concatenate([made.reshape(-1, EMBEDDING), end[None]]), order, weights, len(rows))
        assert token_ids == [7] * len(expected)
        assert rows == list(range(len(expected)))
        # Positions between 162 patches are rounded in float32.
        assert np.abs(ours - expected.numpy()).max() < 1e-5 * np.abs(made).max()
        num_shrunk += weights is not None
    assert 0 < num_shrunk < 20
