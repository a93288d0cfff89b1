"""DSpark's layers draft what the equations of the published code give."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.models.deepseek_v41 import DeepseekV41ForConditionalGeneration
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.dspark import WholeBlocks, reference_block, write_dspark_checkpoint
from tests.support.parity import prompt
from tests.support.published_models import read

CONFIG = read("deepseek-v4.1-flash")


def load(folder):
    config = ModelConfig(str(folder), HFConfig.from_folder(folder), max_model_len=1024)
    return load_model(VllmConfig(config, load_config=LoadConfig(prediction_layer=True)), make_mesh())


@pytest.mark.parametrize("name", ["DeepSeek V4.1", pytest.param("DeepSeek V4", marks=pytest.mark.slow)])
def test_a_block_is_that_of_the_published_equations(tmp_path, name):
    blocks = WholeBlocks(load(write_dspark_checkpoint(tmp_path, name)))
    # Before a window is full, and after.
    for length in (2, 17, 50):
        drafts, logits, chances = blocks.block(prompt(length))
        expected, expected_logits, expected_chances = reference_block(name, prompt(length))
        assert drafts == expected
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-5 * np.abs(expected_logits).max())
        np.testing.assert_allclose(chances, expected_chances, rtol=0, atol=1e-5)


def test_a_file_without_a_part_is_refused(tmp_path):
    folder = write_dspark_checkpoint(tmp_path, "DeepSeek V4.1")
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.2.markov_head.head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"draft\.markov_head\.weight"):
        load(folder)


def test_a_model_without_the_layers_is_refused(tmp_path):
    folder = write_dspark_checkpoint(tmp_path, "DeepSeek V4.1")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dspark_block_size": 0}))
    with pytest.raises(ConfigError, match="another method than mtp and dspark"):
        load(folder)


def test_the_published_layers_have_their_sizes():
    config = HFConfig(CONFIG | {"quantization_config": None})
    model_config = ModelConfig("", config, dtype=jnp.bfloat16, max_model_len=4096)
    model = construct_abstractly(VllmConfig(model_config, load_config=LoadConfig(prediction_layer=True)))
    shapes = {name: param.get_value().shape for name, param in model.draft.named_parameters()}
    assert shapes["main_proj.weight"] == (5120, 3 * 5120)
    assert shapes["layers.2.mlp.gate.weight"] == (128, 5120)
    assert shapes["markov_head.weight"] == shapes["markov_embed.weight"] == (129280, 256)
    assert shapes["confidence.weight"] == (1, 5120 + 256)
    assert model.decoder.aux_hidden_state_layers == (37, 38, 39)
    assert [layer.mlp.gate.routing.num_experts_per_token for layer in model.draft.layers] == [3, 3, 3]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([37, 38, 40], "expected different ones of 40 layers"),
        ([37, 37], "expected different ones of 40 layers"),
        ([], "expected different ones of 40 layers"),
        ([14, 20], "engram_layer_ids.* expected different layers"),
    ],
)
def test_layers_that_cannot_be_read_are_refused(layers, said):
    config = HFConfig(CONFIG["text_config"] | {"dspark_target_layer_ids": layers})
    with pytest.raises(ConfigError, match=f"dspark_target_layer_ids.*{said}"):
        DeepseekV41ForConditionalGeneration.prediction_names(config).layers_read(40)
