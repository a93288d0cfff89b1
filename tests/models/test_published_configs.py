"""config.json files as published: every key is known, and parameters have the names and shapes of transformers'."""

import json

import jax.numpy as jnp
import pytest
import torch
import transformers

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.models.model_loader import construct_abstractly
from tests.support.places import TESTS

FOLDER = TESTS / "data" / "configs"
NAMES = (
    *("olmo-2-7b", "olmo-3-7b", "gemma-2-9b", "gemma-3-1b", "phi-3-mini-4k", "phi-4", "phi-4-mini", "glm-4-9b-0414"),
    *("granite-3.3-8b", "starcoder2-3b", "command-r", "command-r7b", "ernie-4.5-0.3b", "smollm3-3b"),
    *("lfm2.5-350m", "granite-4.0-h-350m", "falcon-h1-0.5b", "nemotron-h-56b"),
)
NUM_LAYERS = 6  # the longest pattern


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_makes_the_references_parameters(name, tmp_path):
    values = json.loads((FOLDER / f"{name}.json").read_text()) | {"num_hidden_layers": NUM_LAYERS}
    for key in {"layer_types", "hybrid_override_pattern"} & set(values):
        values[key] = values[key][:NUM_LAYERS]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig(str(tmp_path), HFConfig.from_folder(tmp_path), dtype=jnp.bfloat16, max_model_len=4096)
    # An error where a key is not known.
    model = construct_abstractly(VllmConfig(config))
    ours = {path: parameter.shape for path, parameter in model.named_parameters()}
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    expected = {path: tuple(parameter.shape) for path, parameter in reference.named_parameters()}
    for piece, replacement in {"model.": f"{model.decoder_name}.", **model.tensor_names}.items():
        expected = {path.replace(piece, replacement): shape for path, shape in expected.items()}
    assert ours == expected
