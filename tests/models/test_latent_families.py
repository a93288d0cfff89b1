"""Families with latent attention: published configs, what they refuse, prediction layers, bfloat16."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.bringup.verify.compare import relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from tests.support import parity
from tests.support.paged_sequences import PagedSequence, PagedSequences
from tests.support.places import TESTS

CONFIGS = TESTS / "data" / "configs"


def published(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


DEEPSEEK_V2_LITE, DEEPSEEK_R1 = published("deepseek-v2-lite"), published("deepseek-r1")
KIMI_K2 = published("kimi-k2")


def family(name):
    return next(f for f in parity.FAMILIES if f.name == name)


def construct(config, **changes):
    # What reads the quantization is not the model.
    config = HFConfig({**config, **changes, "quantization_config": None})
    return construct_abstractly(VllmConfig(ModelConfig("published", config)))


def test_a_token_of_every_published_model_takes_576_numbers_a_layer():
    for config in (DEEPSEEK_V2_LITE, DEEPSEEK_R1, KIMI_K2):
        [layer] = construct(config, num_hidden_layers=1).model.layers
        assert layer.self_attn.kv_cache_spec.layout(16, jnp.bfloat16).block_bytes == 2 * 16 * 576


def test_yarn_multiplies_the_scale_by_the_square_of_its_mscale():
    [layer] = construct(DEEPSEEK_R1, num_hidden_layers=1).model.layers
    expected = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
    assert layer.self_attn.scale == pytest.approx(expected)
    assert layer.self_attn.rope.attention_scaling == 1.0


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (DEEPSEEK_V2_LITE, {"scoring_func": "sigmoid"}),
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}),
        (DEEPSEEK_V2_LITE, {"moe_layer_freq": 2}),
        (DEEPSEEK_V2_LITE, {"num_key_value_heads": 4}),
        (DEEPSEEK_V2_LITE, {"head_dim": 128}),
        (DEEPSEEK_R1, {"scoring_func": "softmax"}),
        (DEEPSEEK_R1, {"topk_method": "greedy"}),
        (DEEPSEEK_R1, {"index_topk": 2048}),
    ],
    ids=lambda value: next(iter(value)) if len(value) == 1 else value["model_type"],
)
def test_what_is_not_implemented_is_refused_by_name(config, changes):
    [key] = changes
    with pytest.raises(ConfigError, match=key) as caught:
        construct(config, num_hidden_layers=1, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kinds", [["dense"], ["other"] * 3])
def test_kinds_of_layers_that_there_are_not_are_refused(kinds):
    config = json.loads(Path(parity.checkpoint_folder(family("GLM-4.7 Flash")), "config.json").read_text())
    with pytest.raises(ConfigError, match="mlp_layer_types"):
        construct(config, mlp_layer_types=kinds)


def test_experts_that_groups_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="256 experts cannot be divided into 7 groups"):
        construct(DEEPSEEK_R1, num_hidden_layers=1, n_group=7)


class TestPredictionLayers:
    @pytest.fixture
    def folder(self, tmp_path):
        """A checkpoint with a prediction layer after its own three, as DeepSeek V3 is published."""
        shutil.copytree(parity.checkpoint_folder(family("DeepSeek V3")), tmp_path, dirs_exist_ok=True)
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
        extra = {name.replace("layers.2.", "layers.3."): 7 + tensor for name, tensor in last.items()}
        extra["model.layers.3.eh_proj.weight"] = np.ones((64, 128), np.float32)
        save_file(tensors | extra, path)
        return tmp_path

    def load(self, folder, **changes):
        config = json.loads((folder / "config.json").read_text()) | changes
        return load_model(VllmConfig(ModelConfig(str(folder), HFConfig(config))), make_mesh())

    def test_are_left_out(self, folder):
        model = self.load(folder, num_nextn_predict_layers=1)
        (logits,) = PagedSequences(model).step([(PagedSequence(), parity.prompt(17))], pad_tokens=17, pad_requests=1)
        assert relative_error(logits, parity.reference_run(family("DeepSeek V3"), 17)[0]) < 1e-4

    def test_that_the_config_does_not_name_are_an_error(self, folder):
        with pytest.raises(CheckpointError, match=r"model\.layers\.3\."):
            self.load(folder, num_nextn_predict_layers=0)
