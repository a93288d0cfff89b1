"""Families with latent attention: published configs, what they refuse, prediction layers, bfloat16."""

from __future__ import annotations

import copy
import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxis.bringup.verify.compare import kl_divergence, relative_error
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
GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.0rc0",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def family(name):
    return next(f for f in parity.FAMILIES if f.name == name)


def construct(config, **changes):
    # What reads the quantization is not the model.
    config = HFConfig({**config, **changes, "quantization_config": None})
    return construct_abstractly(VllmConfig(ModelConfig("published", config)))


@pytest.mark.slow
def test_glm_4_7_flash_as_published_has_no_unknown_key_and_30_billion_parameters():
    size = sum(math.prod(param.get_value().shape) for _, param in construct(GLM_4_7_FLASH).named_parameters())
    assert size / 1e9 == pytest.approx(30, rel=0.01)


def test_a_token_of_every_published_model_takes_576_numbers_a_layer():
    for config in (DEEPSEEK_V2_LITE, DEEPSEEK_R1, KIMI_K2, GLM_4_7_FLASH):
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
        (GLM_4_7_FLASH, {"mlp_layer_types": ["dense", "sparse"]}),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["other"] * 47}),
    ],
    ids=lambda value: next(iter(value)) if len(value) == 1 else value["model_type"],
)
def test_what_is_not_implemented_is_refused_by_name(config, changes):
    [key] = changes
    with pytest.raises(ConfigError, match=key) as caught:
        construct({**config, "num_hidden_layers": 47 if "mlp_layer_types" in changes else 1}, **changes)
    assert "\n" not in str(caught.value)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("DeepSeek V2 Lite", marks=pytest.mark.slow), "DeepSeek V3"])
@pytest.mark.parametrize("path", [pytest.param("whole", marks=pytest.mark.slow), "paged"])
def test_bfloat16_is_as_close_to_float32_as_transformers_own(name, path):
    """A rounded score may choose another expert, so a fixed limit would say little."""
    length = 150
    expected = parity.reference_run(family(name), length)[0]
    low_precision = copy.deepcopy(parity.reference_model(family(name))).bfloat16()
    with torch.no_grad():
        theirs = low_precision(torch.tensor([parity.prompt(length)]), use_cache=False).logits[0].float().numpy()
    if path == "whole":
        ours = parity.whole_run(family(name), (length,), jnp.bfloat16)[length][0]
    else:
        paged = parity.paged_sequences(family(name), jnp.bfloat16)
        (ours,) = paged.step([(PagedSequence(), parity.prompt(length))], pad_tokens=length, pad_requests=1)
    ours, theirs = (kl_divergence(logits, expected) for logits in (ours, theirs))
    assert np.median(ours) <= 1.2 * np.median(theirs)
    assert ours.mean() <= 1.5 * theirs.mean()
