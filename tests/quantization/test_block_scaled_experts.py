"""Checkpoints whose experts are MXFP4 or fp8 blocks: GPT-OSS, DeepSeek V3, Qwen3 MoE."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import BlockScaledWeight, PackedWeight
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.support.block_checkpoints import (
    MXFP4,
    assert_logits,
    quantize_mxfp4,
    replace_tensors,
    write_fp8,
    write_model,
    write_mxfp4,
)
from tests.support.dequantized import dequantize
from tests.support.quantized_models import load, values
from tests.support.tiny_checkpoints import variant, write_tokenizer

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON, intermediate_size=64, num_key_value_heads=2, head_dim=24, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_COMMON,
        **{"intermediate_size": 112, "moe_intermediate_size": 80, "num_key_value_heads": 4, "n_routed_experts": 8},
        **{"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
        **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20},
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON,
        **{"intermediate_size": 112, "moe_intermediate_size": 72, "num_key_value_heads": 2, "head_dim": 24},
        **{"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
}
# Several blocks, the last of them cut off, along either side.
BLOCK = (64, 32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> (quantized, with the weights it stands for), made once."""
    root, made = tmp_path_factory.mktemp("experts"), {}

    def write(family):
        if family not in made:
            source = write_model(root / family / "source", CONFIGS[family]())
            write_tokenizer(source)
            is_mxfp4 = family == "gpt_oss"
            made[family] = (
                write_mxfp4(root / family, source) if is_mxfp4 else write_fp8(root / family, source, block=BLOCK)
            )
        return made[family]

    return write


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_the_weights_that_the_quantized_ones_stand_for(folders, family):
    assert_logits(*folders(family))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.slow), True])
def test_dequantized_by_choice(folders, family, native):
    quantized, wide = folders(family)
    ours, theirs = (
        values(load(folder, choice, native=native)) for folder, choice in [(quantized, "dequantize"), (wide, None)]
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        jax.tree.map(lambda a, b, name=name: np.testing.assert_array_equal(a, b, err_msg=name), ours[name], value)


def test_dequantized_blocks_are_transformers():
    blocks, scales = quantize_mxfp4(torch.randn(3, 10, 64))
    value = jnp.asarray(blocks.flatten(-2).numpy())
    weight = BlockScaledWeight(value, jax.lax.bitcast_convert_type(scales.numpy(), jnp.float8_e8m0fnu), (1, 32))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.testing.assert_array_equal(dequantize(weight), expected.mT.numpy())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "layer"), [("gpt_oss", 0), ("deepseek_v3", 1), ("qwen3_moe", 0)])
def test_experts_stay_quantized(folders, family, layer):
    quantized, _ = folders(family)
    plain, packed = values(load(quantized)), values(load(quantized, native=True))
    for name in ("gate_proj", "up_proj", "down_proj"):
        stack, packed_stack = (each[f"model.layers.{layer}.mlp.experts.{name}"] for each in (plain, packed))
        assert isinstance(stack, BlockScaledWeight)
        assert isinstance(packed_stack, PackedWeight)
        assert stack.storage == packed_stack.storage == ("float4_e2m1fn" if family == "gpt_oss" else "float8_e4m3fn")
        assert stack.nbytes < (0.6 if family == "gpt_oss" else 1.1) * np.prod(stack.shape)
    assert not any("scale" in name or "blocks" in name for name in plain)


class TestMistakes:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize(
        ("family", "name", "change", "message"),
        [
            (
                "gpt_oss",
                "gate_up_proj_blocks",
                lambda t: t[:, :-2],
                r"has \[63, 3, 16\] for an expert .* \[64, 3",
            ),
            ("gpt_oss", "down_proj_blocks", lambda t: t.to(torch.int8), "is int8 in the checkpoint, but must be uint8"),
            ("gpt_oss", "down_proj_scales", lambda t: t[..., :1], r"has \[96, 1\] for an expert .* \[96, 2\]"),
            ("gpt_oss", "down_proj_scales", lambda t: None, "down_proj_scales"),
            ("gpt_oss", "gate_up_proj_scales", lambda t: t | 255, "has a gate_proj whose values or scales are not"),
            ("qwen3_moe", "1.up_proj.weight_scale_inv", lambda t: None, "up_proj_weight_scale_inv of expert 1"),
            (
                "qwen3_moe",
                "1.up_proj.weight",
                lambda t: t.float(),
                "is float32 in the checkpoint, but must be float8_e4",
            ),
            ("qwen3_moe", "1.up_proj.weight_scale_inv", lambda t: t[:1], r"has \[1, 3\] for an expert .* \[2, 3\]"),
        ],
    )
    def test_tensors_that_do_not_fit_are_named(self, folders, tmp_path, family, name, change, message):
        quantized, _ = folders(family)
        stored = load_file(quantized / "model.safetensors")
        full_name = f"model.layers.0.mlp.experts.{name}"
        stored[full_name] = change(stored[full_name])
        tensors = {n: t.contiguous() for n, t in stored.items() if t is not None}
        with pytest.raises(CheckpointError, match=message) as caught:
            load(replace_tensors(tmp_path / "changed", quantized, tensors))
        assert "\n" not in str(caught.value)

    def test_sizes_that_groups_do_not_divide(self, folders, tmp_path):
        quantized, _ = folders("gpt_oss")
        folder = variant(tmp_path / "odd", quantized, intermediate_size=72)
        with pytest.raises(ConfigError, match=r"mlp\.experts has 72 features, which groups of 32 do not divide"):
            load(folder)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"activation_scheme": "dynamic"}, "has the key 'activation_scheme', which is not supported"),
            ({"modules_to_not_convert": 1}, "modules_to_not_convert=1 must be a list of names"),
        ],
    )
    def test_what_is_not_implemented_is_refused_by_name(self, config, message):
        with pytest.raises(ConfigError, match=message):
            quantization_of_checkpoint(HFConfig({"quantization_config": MXFP4 | config}), None)
