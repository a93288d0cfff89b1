"""Checkpoints of fp8 blocks: what they mean to transformers, what stays in memory, and mistakes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizers_utils import should_convert_module

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import BlockScaledWeight
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.module_patterns import is_unconverted
from tests.support.block_checkpoints import (
    FP8,
    assert_logits,
    quantize_fp8,
    replace_tensors,
    write_fp8,
)
from tests.support.dequantized import dequantize
from tests.support.quantized_models import assert_equal, load, logits, values
from tests.support.tiny_checkpoints import variant, write_checkpoint

# Several blocks, the last of them cut off, along either side.
SIZES = {"hidden_size": 192, "intermediate_size": 320, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "qwen3", tokenizer=False, **SIZES)


@pytest.fixture(scope="module")
def folders(source, tmp_path_factory):
    """(In fp8, with the weights it stands for.)"""
    return write_fp8(tmp_path_factory.mktemp("fp8"), source)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_logits_are_those_of_the_weights_that_fp8_stands_for(folders):
    assert_logits(*folders)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("scale_dtype", "scale_fmt"),
    [(torch.bfloat16, None), (torch.float32, "ue8m0"), (torch.float8_e8m0fnu, "ue8m0")],
)
def test_scales_of_other_types(source, tmp_path, scale_dtype, scale_fmt):
    """bfloat16: Qwen3's; powers of two: DeepSeek V3.1's."""
    fp8, wide = write_fp8(tmp_path, source, scale_dtype=scale_dtype, scale_fmt=scale_fmt)
    for native in (False, True):
        assert_close(logits(load(fp8, native=native)), logits(load(wide)))


@pytest.mark.parametrize("shape", [(256, 128), (384, 640)])
def test_dequantized_blocks_are_transformers(shape):
    value, scale = quantize_fp8(torch.randn(shape), (128, 128))
    weight = BlockScaledWeight(value.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn), scale.numpy(), (128, 128))
    expected = Fp8Dequantize(None)._dequantize_one(value, scale, torch.float32)
    np.testing.assert_array_equal(dequantize(weight), expected.numpy())


def test_weights_stay_quantized(folders, source):
    model = load(folders[0])
    for name, value in values(model).items():
        if "proj" in name:
            assert isinstance(value, BlockScaledWeight)
            assert value.value.dtype == jnp.float8_e4m3fn
            assert value.scale.shape == tuple(-(-size // 128) for size in value.shape)
        else:
            assert isinstance(value, jax.Array)
    assert set(values(model)) == set(load_file(source / "model.safetensors"))


@pytest.mark.sampled
@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dequantized_by_choice(folders, dtype, native):
    fp8, wide = folders
    model = load(fp8, "dequantize", dtype=dtype, native=native)
    expected = load(wide, dtype=dtype, native=native)
    assert_equal(model, expected)
    np.testing.assert_array_equal(logits(model), logits(expected))


def test_modules_left_as_they_are(source, tmp_path):
    """Names as Qwen3's config.json has them."""
    stored = load_file(source / "model.safetensors")
    left = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj"]
    fp8, _ = write_fp8(tmp_path, source, modules_to_not_convert=left)
    quantized = load_file(fp8 / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    del quantized[f"{name}_scale_inv"]
    quantized[name] = stored[name]
    folder = replace_tensors(tmp_path / "left", fp8, quantized)
    model = values(load(folder))
    np.testing.assert_array_equal(model[name], stored[name].numpy())
    assert isinstance(model["model.layers.0.mlp.gate_proj.weight"], BlockScaledWeight)


@pytest.mark.parametrize(
    "patterns",
    [
        ["lm_head"],
        ["model.layers.1"],
        ["mlp.gate"],
        ["model.layers.*.self_attn"],
        ["q_proj", "gate"],
        [r"model\.e"],
        [],
    ],
)
def test_patterns_mean_what_they_mean_to_transformers(patterns):
    names = ["lm_head", "model.embed_tokens", "model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate"]
    names += ["model.layers.1.self_attn.q_proj", "model.layers.2.self_attn", "model.layers.2.self_attention.o_proj"]
    for name in names:
        assert is_unconverted(name, patterns) != should_convert_module(name, patterns), name


@pytest.mark.parametrize(
    "config",
    [
        FP8,  # DeepSeek V3 and R1, Kimi K2
        FP8 | {"scale_fmt": "ue8m0"},  # DeepSeek V3.1
        FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"]},
        FP8 | {"ignored_layers": None, "modules_to_not_convert": None},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
)
def test_published_settings_are_understood(config):
    hf_config = HFConfig({"quantization_config": config})
    assert quantization_of_checkpoint(hf_config, None).format.block_shape == (128, 128)
    assert hf_config.unread_keys() == []


class TestMistakes:
    NAME = "model.layers.0.self_attn.k_proj.weight"

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("", lambda t: t.to(torch.bfloat16), "weight' is bfloat16 in the checkpoint, but must be float8_e4m3fn"),
            ("", lambda t: t.to(torch.float8_e5m2), "weight' is float8_e5m2 in the checkpoint, but must be float8_e4m"),
            ("", lambda t: t[:-1].contiguous(), r"weight' has shape \[31, 192\] in the checkpoint, \[32, 192\]"),
            ("_scale_inv", lambda t: t[:, :1].contiguous(), r"weight_scale_inv' has shape \[1, 1\] .* \[1, 2\] in the"),
            ("_scale_inv", lambda t: t.to(torch.int32), "weight_scale_inv' is int32 in the checkpoint, but must be"),
            ("_scale_inv", lambda t: None, "1 of the model's parameters are not in the checkpoint: .*weight_scale_inv"),
            (
                "_scale_inv",
                lambda t: t * torch.inf,
                r"layers\.0\.self_attn\.k_proj has a weight whose values",
            ),
            (
                "",
                lambda t: torch.full_like(t, torch.nan),
                r"layers\.0\.self_attn\.k_proj has a weight whose values",
            ),
        ],
    )
    @pytest.mark.parametrize("native", [False, True])
    def test_tensors_that_do_not_fit_are_named(self, folders, tmp_path, name, change, message, native):
        stored = load_file(folders[0] / "model.safetensors")
        stored[self.NAME + name] = change(stored[self.NAME + name])
        tensors = {n: t for n, t in stored.items() if t is not None}
        folder = replace_tensors(tmp_path / "changed", folders[0], tensors)
        with pytest.raises(CheckpointError, match=message) as caught:
            load(folder, native=native)
        assert "\n" not in str(caught.value)

    def test_a_scale_of_no_weight(self, folders, tmp_path):
        folder = variant(
            tmp_path / "left", folders[0], quantization_config=FP8 | {"modules_to_not_convert": ["k_proj", "lm_head"]}
        )
        with pytest.raises(CheckpointError, match=r"k_proj.weight_scale_inv' \[1, 2\] has no parameter"):
            load(folder)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"activation_scheme": "static"}, "activation_scheme='static' is not supported; supported: 'dynamic'"),
            ({"fmt": "e5m2"}, "fmt='e5m2' is not supported; supported: 'e4m3'"),
            ({"weight_block_size": 128}, "weight_block_size=128 is not supported"),
            ({"weight_block_size": [128]}, r"weight_block_size=\[128\] is not supported"),
            ({"scale_fmt": "int"}, "scale_fmt='int' is not supported"),
            ({"expert_dtype": "fp6"}, "expert_dtype='fp6' is not supported"),
            ({"modules_to_convert": ["x"]}, r"modules_to_convert=\['x'\] is not supported"),
            ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' must be a list of names"),
            ({"modules_to_not_convert": ["a("]}, r"modules_to_not_convert has 'a\(', which is not a regular expr"),
            (
                {"modules_to_not_convert": [], "ignored_layers": []},
                "has both modules_to_not_convert and ignored_layers: remove one",
            ),
            ({"kv_cache": 1}, "config.json has the key 'kv_cache', which is not supported"),
        ],
    )
    def test_what_is_not_implemented_is_refused_by_name(self, config, message):
        with pytest.raises(ConfigError, match=message) as caught:
            quantization_of_checkpoint(HFConfig({"quantization_config": FP8 | config}), None)
        assert "\n" not in str(caught.value)

    def test_only_a_quantized_checkpoint_is_dequantized(self):
        with pytest.raises(ConfigError, match="this one is not quantized: leave it out"):
            quantization_of_checkpoint(HFConfig({}), parse_quantization("dequantize"))
