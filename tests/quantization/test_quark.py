"""Checkpoints of AMD's Quark against a dequantization in numpy by the definition of each scheme."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.kernels.weights import BlockScaledWeight
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.support.block_checkpoints import assert_logits
from tests.support.compressed_checkpoints import write_stored
from tests.support.dequantized import dequantize
from tests.support.quantized_models import values
from tests.support.tiny_checkpoints import write_checkpoint

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp8_value(codes):
    """e4m3: a sign, four bits of exponent with a bias of 7, three of mantissa."""
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(codes >> 7, -magnitude, magnitude).astype(np.float32)


def fp8(weight, axis):
    scale = weight.abs().amax(axis) / 448
    value = (weight / (scale if axis is None else scale[:, None])).to(torch.float8_e4m3fn)
    wide = fp8_value(value.view(torch.uint8).numpy()) * np.atleast_1d(scale.numpy())[:, None]
    tensors = {"weight": value, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return tensors, torch.from_numpy(wide)


def mxfp4(weight):
    groups = weight.numpy().reshape(len(weight), -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - 2
    codes = np.abs(groups[..., None] / 2.0 ** exponent[..., None, None] - E2M1).argmin(-1).reshape(len(weight), -1)
    packed, scale = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8), (exponent + 127).astype(np.uint8)
    wide = np.empty_like(weight.numpy())
    wide[:, ::2], wide[:, 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
    wide *= np.repeat(2.0 ** (scale.astype(np.float32) - 127), 32, 1)
    return {"weight": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scale)}, torch.from_numpy(wide)


FP8_TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True, "ch_axis": None}
FP8_ROWS = FP8_TENSOR | {"qscheme": "per_channel", "ch_axis": 0}
MXFP4 = {
    **{"dtype": "fp4", "qscheme": "per_group", "is_dynamic": False, "symmetric": None, "ch_axis": -1},
    **{"group_size": 32, "scale_format": "e8m0", "scale_type": "float", "observer_cls": "PerBlockMXObserver"},
}
SCHEMES = {
    "MXFP4": (MXFP4, mxfp4),
    "fp8 per tensor": (FP8_TENSOR, lambda weight: fp8(weight, None)),
    "fp8 per channel": (FP8_ROWS, lambda weight: fp8(weight, 1)),
}


def config(weight, **keys):
    module = {"weight": weight, "input_tensors": weight, "output_tensors": None, "bias": None, "target_device": None}
    return {
        **{"quant_method": "quark", "global_quant_config": module, "layer_quant_config": {}, "exclude": ["lm_head"]},
        **{"layer_type_quant_config": {}, "algo_config": [{"name": "autosmoothquant"}], "softmax_quant_spec": None},
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **{"kv_cache_quant_config": {}, "kv_cache_post_rope": False, "quant_mode": "eager_mode", "version": "0.11"},
        **keys,
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    sizes = {"hidden_size": 192, "intermediate_size": 160, "tie_word_embeddings": False}
    return write_checkpoint(tmp_path_factory.mktemp("source") / "moe", "qwen3_moe", tokenizer=False, **sizes, **moe)


def assert_loads(stored, wide):
    held, expected = values(assert_logits(stored, wide)), load_file(wide / "model.safetensors")
    for name, weight in held.items():
        if name in expected:  # and no stack of experts
            np.testing.assert_array_equal(dequantize(weight), expected[name].numpy(), err_msg=name)
    return held


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_weights_that_a_scheme_stands_for(source, tmp_path, scheme):
    weight, encode = SCHEMES[scheme]
    stored, wide = write_stored(tmp_path, source, lambda _, tensor: encode(tensor), config(weight))
    for name, held in assert_loads(stored, wide).items():
        assert isinstance(held, BlockScaledWeight) == name.endswith(("_proj.weight", "_proj")), name


def test_modules_may_have_schemes_of_their_own(source, tmp_path):
    def encode(module, tensor):
        if module.endswith("o_proj"):
            return {"weight": tensor}, tensor
        return fp8(tensor, 1) if ".self_attn." in module else mxfp4(tensor)

    layers = {"*self_attn*": {"weight": FP8_ROWS, "output_tensors": FP8_TENSOR}}
    keys = {"layer_quant_config": layers, "exclude": ["lm_head", "re:.*o_proj"]}
    assert_loads(*write_stored(tmp_path, source, encode, config(MXFP4, **keys)))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (config(MXFP4 | {"dtype": "int4", "group_size": 128}), "weight: dtype='int4' is not supported"),
        (config(MXFP4 | {"dtype": "fp6_e2m3"}), "weight: dtype='fp6_e2m3' is not supported; supported: 'fp4'"),
        (config(MXFP4 | {"group_size": 16}), "weight: group_size=16 is not supported; supported: 32"),
        (config(MXFP4 | {"scale_format": None}), "weight: scale_format=None is not supported; supported: 'e8m0'"),
        (config(FP8_TENSOR | {"dtype": "int8"}), "global_quant_config: weight: dtype='int8' is not supported"),
        (config(FP8_ROWS | {"ch_axis": 1}), "weight: ch_axis=1 is not supported; supported: 0"),
        (config(FP8_TENSOR | {"qscheme": "per_block"}), "weight: qscheme='per_block' is not supported"),
        (config([FP8_TENSOR, MXFP4]), "weight is quantized in several steps, which is not supported"),
        (
            config(MXFP4, layer_quant_config={"*down_proj": {"weight": {"dtype": "int8"}}}),
            r"layer_quant_config: \*down_proj: weight: qscheme=None is not supported",
        ),
        (config(MXFP4, global_quant_config={"bias": FP8_TENSOR}), "global_quant_config: bias is quantized"),
        (config(MXFP4, global_quant_config="fp4"), "global_quant_config is 'fp4', expected an object"),
        (config(MXFP4, layer_quant_config=["a"]), r"layer_quant_config=\['a'\] must be an object"),
        (config(MXFP4, algo_config=[{"name": "rotation"}]), "algo_config has 'rotation', which is not supported"),
        (config(MXFP4, pre_quant_opt_config=[]), "has the key 'pre_quant_opt_config', which is not supported"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(stored, message):
    with pytest.raises(ConfigError, match=message) as caught:
        quantization_of_checkpoint(HFConfig({"quantization_config": stored}), None)
    assert "\n" not in str(caught.value)
