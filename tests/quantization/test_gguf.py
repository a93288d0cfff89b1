"""Weights from GGUF blocks, against gguf-py's own dequantization."""

import re

import gguf
import jax
import numpy as np
import pytest
from gguf.quants import dequantize as reference

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight
from jaxis.loading.gguf_block_types import TYPE_OF_NAME
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.formats.gguf import GGUFFormat, LatentHeadsFormat, read_blocks
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization.wrappers import Dequantize, DequantizingConfig
from jaxis.quantization_rules import QuantizationRule
from tests.support.dequantized import dequantize
from tests.support.gguf_blocks import QUANTIZED, random_rows

# Bits an element takes in memory; what is more than in the file is whole bytes of scales.
BITS = {
    **{"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q2_K": 3.125, "Q3_K": 3.5625, "Q4_K": 4.625},
    **{"Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.25, "NVFP4": 4.5},
    **{"TQ1_0": 2.0625, "TQ2_0": 2.0625},
}


def expected(name, rows):
    return reference(rows, gguf.GGMLQuantizationType[name])


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_equal_gguf_pys_exactly(name):
    rows = random_rows(name, 37, 768)
    weight = GGUFFormat(TYPE_OF_NAME[name]).assemble({"weight": rows}, (37, 768))
    assert weight.shape == (37, 768)
    np.testing.assert_array_equal(np.asarray(dequantize(weight)), expected(name, rows))


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_keep_the_precision_of_the_file(name):
    weight = read_blocks(TYPE_OF_NAME[name], random_rows(name, 16, 1024), (16, 1024))
    kind = {"Q8_0": QuantizedWeight, "Q4_0": QuantizedWeight, "MXFP4": BlockScaledWeight}.get(name, CodedWeight)
    assert type(weight) is kind
    assert 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) / (16 * 1024) == BITS[name]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["Q6_K", "Q8_0", "IQ4_XS"])
def test_weights_of_many_chunks_of_rows_equal_gguf_pys(name, monkeypatch):
    monkeypatch.setattr("jaxis.quantization.formats.gguf._BYTES_AT_ONCE", 5000)
    rows = random_rows(name, 101, 512)
    np.testing.assert_array_equal(
        np.asarray(dequantize(read_blocks(TYPE_OF_NAME[name], rows, (101, 512)))), expected(name, rows)
    )


def test_mxfp4_scales_below_normal_float32_are_only_those_of_zeros():
    """Kernels and XLA may take such a scale for 0."""
    rows = random_rows("MXFP4", 4, 64).reshape(4, 2, 17)
    rows[..., 0] = [0, 1]
    with pytest.raises(ValueError, match=r"a scale of 2\^-127 for elements that are not zero"):
        read_blocks(TYPE_OF_NAME["MXFP4"], rows.reshape(4, -1), (4, 64))
    rows[:, 0, 1:] = 0
    weight = read_blocks(TYPE_OF_NAME["MXFP4"], rows.reshape(4, -1), (4, 64))
    # XLA may flush what is below the normal numbers.
    np.testing.assert_allclose(
        np.asarray(dequantize(weight)), expected("MXFP4", rows.reshape(4, -1)), rtol=0, atol=6e-39
    )


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_NL", "Q5_1", "Q4_0"])
def test_scales_that_are_not_finite_are_an_error(name):
    rows = random_rows(name, 3, 256)
    rows.reshape(3, -1, TYPE_OF_NAME[name].nbytes)[1, 0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="not all finite"):
        read_blocks(TYPE_OF_NAME[name], rows, (3, 256))


def test_nvfp4_is_multiplied_by_its_tensors_scale():
    rows = random_rows("NVFP4", 5, 128)
    tensors = {"weight": rows, "scale": np.float32([0.37])}
    weight = GGUFFormat(TYPE_OF_NAME["NVFP4"], has_scale=True).assemble(tensors, (5, 128))
    np.testing.assert_allclose(np.asarray(dequantize(weight)), np.float32(0.37) * expected("NVFP4", rows), rtol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("key_type", "value_type"), [("Q8_0", "Q4_K"), ("F32", "Q6_K"), ("Q5_0", "F16")])
def test_keys_and_values_of_latents_are_joined_by_heads(key_type, value_type):
    num_heads, key_dim, value_dim, latent_dim = 3, 64, 32, 256

    def stored(name, rows, columns):
        if TYPE_OF_NAME[name].dtype is None:
            return random_rows(name, rows, columns)
        return np.random.default_rng(0).normal(size=(rows, columns)).astype(TYPE_OF_NAME[name].dtype)

    keys = stored(key_type, num_heads * latent_dim, key_dim)
    values = stored(value_type, num_heads * value_dim, latent_dim)
    weight = LatentHeadsFormat(TYPE_OF_NAME[key_type], TYPE_OF_NAME[value_type], num_heads, key_dim)
    shape = (num_heads * (key_dim + value_dim), latent_dim)
    tensors = {"k_b": keys.reshape(num_heads, latent_dim, -1), "v_b": values.reshape(num_heads, value_dim, -1)}
    assert {name: spec.shape for name, spec in weight.tensors(shape).items()} == {
        n: t.shape for n, t in tensors.items()
    }

    def floats(name, rows, shape):
        return (expected(name, rows) if TYPE_OF_NAME[name].dtype is None else rows.astype(np.float32)).reshape(shape)

    joined = [
        np.concatenate([key.T, value])
        for key, value in zip(
            floats(key_type, keys, (num_heads, latent_dim, key_dim)),
            floats(value_type, values, (num_heads, value_dim, latent_dim)),
            strict=True,
        )
    ]
    np.testing.assert_array_equal(weight.assemble(tensors, shape), np.concatenate(joined))


STORED = {"quantization_config": {"quant_method": "gguf", "block_types": {"a": "Q4_K"}, "scaled": []}}


def test_a_users_choices():
    assert isinstance(quantization_of_checkpoint(HFConfig(STORED), Dequantize()), DequantizingConfig)
    rules = RuleQuantizationConfig([QuantizationRule(".*", weight_qtype="int8")])
    with pytest.raises(ConfigError, match="is quantized by gguf and cannot be quantized again"):
        quantization_of_checkpoint(HFConfig(STORED), rules)


def test_rows_that_blocks_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match=re.escape("has 300 features, which blocks of 256 (Q4_K) do not divide")):
        GGUFFormat(TYPE_OF_NAME["Q4_K"]).tensors((5, 300))
