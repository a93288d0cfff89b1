"""Models of published size, without weights: every key of their configs is known, every parameter is there."""

import json
import math

import pytest
import torch
import transformers

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.module import named_parameters
from jaxis.models.model_loader import construct_abstractly
from tests.support.published_moe_configs import GPT_OSS_120B, LLAMA_4_MAVERICK, PUBLISHED_MOE_CONFIGS


def model_of(folder, overrides=None):
    config = HFConfig.from_folder(folder, {"quantization_config": None} | (overrides or {}))
    return construct_abstractly(VllmConfig(ModelConfig(str(folder), config)))


@pytest.mark.parametrize("name", PUBLISHED_MOE_CONFIGS)
@pytest.mark.parametrize("style", ["published", "saved by transformers 5"])
def test_published_configs_make_models_with_as_many_parameters_as_the_reference(tmp_path, name, style):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_MOE_CONFIGS[name]))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    if style != "published":
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert "rope_parameters" in saved.get("text_config", saved)
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(getattr(config, "text_config", config))
    model = model_of(tmp_path)
    num_parameters = sum(math.prod(parameter.shape) for _, parameter in named_parameters(model))
    # The selection bias is a buffer in the reference.
    biases = sum(buffer.numel() for name, buffer in reference.named_buffers() if "correction_bias" in name)
    assert num_parameters == sum(parameter.numel() for parameter in reference.parameters()) + biases


def test_maverick_alternates_dense_and_sparse_layers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_4_MAVERICK))
    layers = model_of(tmp_path).decoder.layers
    assert [hasattr(layer.feed_forward, "experts") for layer in layers] == [False, True] * 24
    assert [layer.self_attn.rope is None for layer in layers] == [False, False, False, True] * 12
    assert [layer.self_attn.span.attention_chunk_size for layer in layers] == [8192, 8192, 8192, None] * 12


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("experts_per_token", 2, 4), ("initial_context_length", 8192, 4096), ("hidden_act", "gelu", "'silu'")],
)
def test_contradicting_keys_of_gpt_oss_are_refused(tmp_path, key, value, expected):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_120B))
    with pytest.raises(ConfigError, match=f"config.json has {key}={value!r}, of which only {expected} is supported"):
        model_of(tmp_path, {key: value})
