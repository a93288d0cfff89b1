"""config.json files as published: transformers has the same parameters, from them and as it saves them itself.

tests/bringup/analyze/test_analyze.py has the one test that every published config passes: all keys are known, and sizes
are those that its makers say.
"""

import json
import math

import jax.numpy as jnp
import pytest
import torch
import transformers

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.model_loader import construct_abstractly
from tests.support.published_models import read

NAMES = (
    *("olmo-2-7b", "olmo-3-7b", "gemma-2-9b", "gemma-3-1b", "phi-3-mini-4k", "phi-4", "phi-4-mini", "glm-4-9b-0414"),
    *("granite-3.3-8b", "starcoder2-3b", "command-r", "command-r7b", "ernie-4.5-0.3b", "smollm3-3b"),
    *("lfm2.5-350m", "granite-4.0-h-350m", "falcon-h1-0.5b", "nemotron-h-56b"),
    *("jamba-reasoning-3b", "falcon-mamba-7b", "mamba-130m"),
)
NUM_LAYERS = 6  # the longest pattern
# Of mixtures of experts, whose parameters transformers stacks: their number is compared, in the whole model.
MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "glm-4.5-air", "llama-4-scout", "llama-4-maverick")


def model_of(folder, overrides=None):
    """The model that a folder's config.json describes, unquantized. An error where a key is not known."""
    config = HFConfig.from_folder(folder, {"quantization_config": None} | (overrides or {}))
    return construct_abstractly(VllmConfig(ModelConfig(str(folder), config, dtype=jnp.bfloat16, max_model_len=4096)))


def reference_of(config):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_makes_the_references_parameters(name, tmp_path):
    values = read(name) | {"num_hidden_layers": NUM_LAYERS}
    for key in {"layer_types", "hybrid_override_pattern", "no_rope_layers"} & set(values):
        values[key] = values[key][:NUM_LAYERS]
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = model_of(tmp_path)
    ours = {path: parameter.shape for path, parameter in model.named_parameters()}
    reference = reference_of(transformers.AutoConfig.from_pretrained(tmp_path))
    expected = {path: tuple(parameter.shape) for path, parameter in reference.named_parameters()}
    names = model.checkpoint_names
    assert ours == {names.name_here(path): shape for path, shape in expected.items()}
    published = "backbone." if name.startswith("nemotron") else "model."  # which transformers renames on loading
    assert {names.name_in_checkpoint(path).replace(published, "model.") for path in ours} == set(expected)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MIXTURES)
def test_a_config_that_transformers_saved_makes_as_many_parameters_as_the_reference(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(read(name)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved.get("text_config", saved)
    reference = reference_of(getattr(config, "text_config", config))
    num_parameters = sum(math.prod(parameter.shape) for _, parameter in model_of(tmp_path).named_parameters())
    # The selection bias is a buffer in the reference.
    biases = sum(buffer.numel() for name, buffer in reference.named_buffers() if "correction_bias" in name)
    assert num_parameters == sum(parameter.numel() for parameter in reference.parameters()) + biases


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("experts_per_token", 2, 4), ("initial_context_length", 8192, 4096), ("hidden_act", "gelu", "'silu'")],
)
def test_contradicting_keys_of_gpt_oss_are_refused(tmp_path, key, value, expected):
    (tmp_path / "config.json").write_text(json.dumps(read("gpt-oss-120b")))
    with pytest.raises(ConfigError, match=f"config.json has {key}={value!r}, of which only {expected} is supported"):
        model_of(tmp_path, {key: value})
