"""Families with latent attention: published configs, what they refuse, prediction layers, bfloat16."""

from __future__ import annotations

import copy
import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import parity
import pytest
import torch
from paged_sequences import PagedSequence, PagedSequences
from safetensors.numpy import load_file, save_file

import published_latent_configs
from jaxis.bringup.compare import kl_divergence, relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.hf_config import HFConfig
from jaxis.loading.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from published_latent_configs import DEEPSEEK_R1, DEEPSEEK_V2_LITE, GLM_4_7_FLASH, KIMI_K2


def family(name):
    return next(f for f in parity.FAMILIES if f.name == name)


def config_of(published, **changes):
    # What reads the quantization is not the model.
    return HFConfig({**published, **changes, "quantization_config": None})


def construct(published, **changes):
    return construct_abstractly(VllmConfig(ModelConfig("published", config_of(published, **changes))))


# Parameters as their makers state them, without prediction layers.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("DEEPSEEK_V2_LITE", 15.7),
        ("DEEPSEEK_V2_5", 236),
        ("DEEPSEEK_R1", 671),
        ("KIMI_K2", 1026),
        ("MOONLIGHT", 16.0),
        ("GLM_4_7_FLASH", 30),
    ],
)
def test_published_configs_have_no_unknown_key_and_the_stated_size(name, billions):
    model = construct(getattr(published_latent_configs, name))
    size = sum(math.prod(param.get_value().shape) for _, param in model.named_parameters())
    np.testing.assert_allclose(size / 1e9, billions, rtol=0.01)


def test_a_token_of_every_published_model_takes_576_numbers_a_layer():
    for published in (DEEPSEEK_V2_LITE, DEEPSEEK_R1, KIMI_K2, GLM_4_7_FLASH):
        shrunk = {**published, "num_hidden_layers": 1}
        [layer] = construct(shrunk).model.layers
        shape = layer.self_attn.kv_cache_spec.shape(10, 16, jnp.bfloat16)
        assert math.prod(shape) == 10 * 16 * 576


def test_yarn_multiplies_the_scale_by_the_square_of_its_mscale():
    [layer] = construct({**DEEPSEEK_R1, "num_hidden_layers": 1}).model.layers
    expected = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
    assert layer.self_attn.scale == pytest.approx(expected)
    assert layer.self_attn.rope.attention_scaling == 1.0


@pytest.mark.parametrize(
    ("published", "changes"),
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
def test_what_is_not_implemented_is_refused_by_name(published, changes):
    [key] = changes
    with pytest.raises(ConfigError, match=key) as caught:
        construct({**published, "num_hidden_layers": 47 if "mlp_layer_types" in changes else 1}, **changes)
    assert "\n" not in str(caught.value)


def test_experts_that_groups_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="256 experts do not make 7 groups"):
        construct({**DEEPSEEK_R1, "num_hidden_layers": 1}, n_group=7)


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


@pytest.mark.parametrize("name", ["DeepSeek V2 Lite", "DeepSeek V3"])
@pytest.mark.parametrize("path", ["whole", "paged"])
def test_bfloat16_is_as_close_to_float32_as_transformers_own(name, path):
    """A rounded score may choose another expert, so a fixed limit would say little."""
    length = parity.PAGED_LENGTH
    expected = parity.reference_run(family(name), length)[0]
    narrow = copy.deepcopy(parity.reference_model(family(name))).bfloat16()
    with torch.no_grad():
        theirs = narrow(torch.tensor([parity.prompt(length)]), use_cache=False).logits[0].float().numpy()
    if path == "whole":
        ours = parity.whole_run(family(name), (length,), jnp.bfloat16)[length][0]
    else:
        paged = parity.paged_sequences(family(name), jnp.bfloat16)
        (ours,) = paged.step([(PagedSequence(), parity.prompt(length))], **parity.PADDING)
    ours, theirs = (kl_divergence(logits, expected) for logits in (ours, theirs))
    assert np.median(ours) <= 1.2 * np.median(theirs)
    assert ours.mean() <= 1.5 * theirs.mean()
