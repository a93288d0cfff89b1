"""DSpark's layers draft what the equations of the published code give."""

import numpy as np
import pytest

from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.dspark import WholeBlocks, reference_block, write_dspark_checkpoint
from tests.support.parity import prompt


def load(folder):
    config = ModelConfig(str(folder), HFConfig.from_folder(folder), max_model_len=1024)
    return load_model(VllmConfig(config, load_config=LoadConfig(prediction_layer=True)), make_mesh())


@pytest.mark.parametrize("name", ["DeepSeek V4", "DeepSeek V4.1"])
def test_a_block_is_that_of_the_published_equations(tmp_path, name):
    blocks = WholeBlocks(load(write_dspark_checkpoint(tmp_path, name)))
    # Before a window is full, and after.
    for length in (2, 17, 50):
        drafts, logits, chances = blocks.block(prompt(length))
        expected, expected_logits, expected_chances = reference_block(name, prompt(length))
        assert drafts == expected
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-5 * np.abs(expected_logits).max())
        np.testing.assert_allclose(chances, expected_chances, rtol=0, atol=1e-5)
