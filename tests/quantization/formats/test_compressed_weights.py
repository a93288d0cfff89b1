"""Weights in compressed-tensors' formats against the library's own decompression, bit for bit."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight
from jaxis.quantization.compressed_tensors_groups import read_group
from jaxis.quantization.formats.integers import Integers, PackQuantizedFormat
from jaxis.quantization.formats.nvfp4 import NvFp4Format
from tests.support.compressed_checkpoints import compress, config_of, decompress, decompress_wide, host_array, scheme_of
from tests.support.dequantized import dequantize


def integers(bits, strategy, group_size=None, symmetric=True):
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "group_size": group_size,
        "symmetric": symmetric,
    }


def assembled(weight, scheme, scale_dtype=torch.float32):
    """(the tensors as the library stores them, the weight that they become)"""
    tensors = compress(weight, scheme, scale_dtype)
    group = config_of(scheme)["config_groups"]["group_0"]
    weight_format = read_group(group, None, "group_0").format
    arrays = {name: host_array(tensor) for name, tensor in tensors.items()}
    specs = weight_format.tensors(tuple(weight.shape))
    assert {name for name, spec in specs.items() if not spec.is_zero} == arrays.keys()
    for name, array in arrays.items():
        assert array.shape in (specs[name].shape, *specs[name].other_shapes), name
        assert array.dtype in specs[name].dtypes
    return tensors, weight_format.assemble(arrays, tuple(weight.shape))


def random_weight(rows, columns):
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).exp()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group_size"), [("group", 32), ("channel", None), ("tensor", None)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_packed_integers(bits, symmetric, strategy, group_size, scale_dtype):
    scheme = scheme_of("pack-quantized", integers(bits, strategy, group_size, symmetric))
    tensors, weight = assembled(random_weight(29, 96), scheme, scale_dtype)
    expected = decompress(tensors, scheme)
    assert expected.dtype == scale_dtype
    actual = dequantize(weight, jnp.float32 if scale_dtype == torch.float32 else jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(actual, np.float32), expected.float().numpy())


@pytest.mark.parametrize(
    ("bits", "symmetric", "bits_in_memory"),
    [(1, True, 2), (2, False, 2), (3, True, 3), (4, True, 4), (5, True, 5), (6, True, 6), (7, True, 8), (8, False, 8)],
)
def test_packed_integers_keep_the_precision_of_the_file(bits, symmetric, bits_in_memory):
    _, weight = assembled(random_weight(32, 512), scheme_of("pack-quantized", integers(bits, "group", 512, symmetric)))
    assert isinstance(weight, QuantizedWeight | CodedWeight)
    codes = sum(a.nbytes for a in (getattr(weight, "codes", None), getattr(weight, "high", None)) if a is not None)
    assert (codes or weight.qvalue.nbytes) * 8 == 32 * 512 * bits_in_memory


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("symmetric", [True, False])
def test_words_of_older_versions_hold_whole_numbers_only(bits, symmetric):
    """They put 32 // bits into a word, and left the rest of it empty."""
    rng = np.random.default_rng(bits)
    half, per_word = 1 << (bits - 1), 32 // bits
    q, z = (rng.integers(0, 2 * half, shape) for shape in ((29, 96), (29, 3)))
    scale = rng.uniform(0.1, 1, (29, 3)).astype(np.float32)

    def pack(numbers):
        padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word))).reshape(len(numbers), -1, per_word)
        return (padded << (bits * np.arange(per_word))).sum(-1).astype(np.uint32).view(np.int32)

    tensors = {"weight_packed": pack(q), "weight_scale": scale, "weight_shape": np.asarray([29, 96])}
    if not symmetric:
        tensors["weight_zero_point"] = pack(z.T).T
    weight = PackQuantizedFormat(Integers(bits, 32, has_zero_points=not symmetric)).assemble(tensors, (29, 96))
    zero = half if symmetric else np.repeat(z, 32, axis=1)
    np.testing.assert_array_equal(dequantize(weight), (q - zero).astype(np.float32) * np.repeat(scale, 32, axis=1))


class TestOrderOfColumns:
    """`weight_g_idx`, which today's library no longer writes; so its meaning is restated here."""

    SHAPE = (29, 96)

    def stored(self, bits, symmetric, groups):
        rng = np.random.default_rng(bits)
        half = 1 << (bits - 1)
        q, z = (rng.integers(-half, half, shape).astype(np.int8) for shape in (self.SHAPE, (29, 3)))
        scale = rng.uniform(0.1, 1, (29, 3)).astype(np.float32)
        tensors = {
            "weight_packed": pack_to_int32(torch.from_numpy(q), bits).numpy(),
            "weight_scale": scale,
            "weight_shape": np.asarray(self.SHAPE),
            "weight_g_idx": groups.astype(np.int32),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_to_int32(torch.from_numpy(z), bits, 0).numpy()
        of_column = np.where(groups < 0, np.arange(96) // 32, groups)
        return tensors, (q - (0 if symmetric else z[:, of_column].astype(np.float32))) * scale[:, of_column]

    @pytest.mark.parametrize("bits", [3, 4, 8])
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("groups", ["shuffled", "in order", "unset"])
    def test_groups_need_not_be_neighbours(self, bits, symmetric, groups):
        in_order = np.arange(96) // 32
        kinds = {"shuffled": np.random.default_rng(0).permutation(in_order), "in order": in_order}
        tensors, expected = self.stored(bits, symmetric, kinds.get(groups, np.full(96, -1)))
        weight_format = PackQuantizedFormat(Integers(bits, 32, has_zero_points=not symmetric), has_order=True)
        weight = weight_format.assemble(tensors, self.SHAPE)
        np.testing.assert_array_equal(dequantize(weight), expected.astype(np.float32))

    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            (np.arange(96) // 24, "weight_g_idx has groups that are not among its 3"),
            (np.arange(96) // 48, "groups have from 0 to 48 columns, which is not supported"),
            (np.arange(96) // 32 - 2, "weight_g_idx has groups that are not among its 3"),
        ],
    )
    def test_damaged_ones_are_refused(self, groups, message):
        tensors, _ = self.stored(4, True, np.arange(96) // 32)
        tensors["weight_g_idx"] = groups.astype(np.int32)
        if (groups == -1).any():
            tensors["weight_g_idx"][groups == -1] = 0
        with pytest.raises(ValueError, match=message):
            PackQuantizedFormat(Integers(4, 32), has_order=True).assemble(tensors, self.SHAPE)


def test_elements_and_zero_points_packed_in_different_ways_are_refused():
    integers = Integers(3, 32, has_zero_points=True)
    tensors = {
        "weight_packed": np.zeros((64, 7), np.int32),  # 64 columns in words of ten
        "weight_scale": np.ones((64, 2), np.float32),
        "weight_shape": np.asarray([64, 64]),
        "weight_zero_point": pack_to_int32(torch.zeros(64, 2, dtype=torch.int8), 3, 0).numpy(),
    }
    with pytest.raises(ValueError, match="zero points are packed in 6 words, its elements as if in 7"):
        PackQuantizedFormat(integers).assemble(tensors, (64, 64))


@pytest.mark.parametrize("file_format", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group_size"), [("group", 16), ("channel", None), ("tensor", None)])
def test_integers_in_bytes(file_format, bits, symmetric, strategy, group_size):
    scheme = scheme_of(file_format, integers(bits, strategy, group_size, symmetric))
    tensors, weight = assembled(random_weight(13, 48), scheme)
    np.testing.assert_array_equal(dequantize(weight), decompress(tensors, scheme).numpy())


@pytest.mark.parametrize("file_format", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("preset", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8(file_format, preset, scale_dtype):
    scheme = scheme_of(file_format, preset)
    tensors, weight = assembled(random_weight(130, 192), scheme, scale_dtype)
    expected = decompress(tensors, scheme)
    actual = dequantize(weight, jnp.float32 if scale_dtype == torch.float32 else jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(actual, np.float32), expected.float().numpy())
    assert isinstance(weight, BlockScaledWeight)


@pytest.mark.parametrize(
    ("file_format", "preset"),
    [
        ("mxfp4-pack-quantized", "MXFP4A16"),
        ("mxfp6-pack-quantized", "MXFP6A16"),
        ("mxfp8-quantized", "MXFP8A16"),
    ],
)
def test_microscaling_formats(file_format, preset):
    scheme = scheme_of(file_format, preset)
    tensors, weight = assembled(random_weight(29, 96), scheme)
    np.testing.assert_array_equal(dequantize(weight), decompress_wide(tensors, scheme).numpy())
    np.testing.assert_array_equal(
        np.asarray(dequantize(weight, jnp.bfloat16), np.float32), decompress(tensors, scheme).float().numpy()
    )
    assert weight.nbytes * 8 == 29 * 96 * (scheme.weights.num_bits + 0.25)


class TestNvfp4:
    scheme = scheme_of("nvfp4-pack-quantized", "NVFP4A16")

    def test_in_bfloat16_it_is_the_librarys(self):
        for rows in (20, 29, 38):
            tensors, weight = assembled(random_weight(rows, 96), self.scheme)
            actual = np.asarray(dequantize(weight, jnp.bfloat16), np.float32)
            np.testing.assert_array_equal(actual, decompress(tensors, self.scheme).float().numpy())

    def test_in_float32_it_is_off_by_two_units_in_the_last_place_at_most(self):
        for rows in (20, 29, 38):
            tensors, weight = assembled(random_weight(rows, 96), self.scheme)
            expected = decompress_wide(tensors, self.scheme).numpy()
            np.testing.assert_array_max_ulp(np.asarray(dequantize(weight)), expected, maxulp=2)

    def test_it_takes_four_and_a_half_bits(self):
        _, weight = assembled(random_weight(64, 1024), self.scheme)
        assert isinstance(weight, CodedWeight)
        assert weight.scale.dtype == ml_dtypes.float8_e4m3fn
        assert weight.nbytes * 8 / (64 * 1024) == pytest.approx(4.5, rel=0.01)


class TestDamagedWeights:
    @pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16", "MXFP6A16", "MXFP8A16", "FP8_DYNAMIC"])
    def test_scales_that_are_not_finite_are_refused(self, preset):
        arrays, weight_format = self.stored(preset)
        arrays["weight_scale"].view(np.uint8).reshape(-1)[-4:] = (0, 0, 0xC0, 0x7F)  # NaN in float32
        if arrays["weight_scale"].dtype.itemsize == 1:
            arrays["weight_scale"].view(np.uint8).reshape(-1)[-1] = 0x7F if preset == "NVFP4A16" else 0xFF
        with pytest.raises(ValueError, match="values or scales are not all finite"):
            weight_format.assemble(arrays, (32, 64))

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    @pytest.mark.parametrize("preset", ["MXFP8A16", "FP8_DYNAMIC", "FP8"])
    def test_fp8_nan_is_refused(self, preset, code):
        arrays, weight_format = self.stored(preset)
        arrays["weight"].view(np.uint8)[3, 5] = code
        with pytest.raises(ValueError, match="values or scales are not all finite"):
            weight_format.assemble(arrays, (32, 64))

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("preset", ["MXFP4A16", "MXFP6A16", "MXFP8A16"])
    def test_the_smallest_scale_is_only_that_of_zeros(self, preset):
        """2^-127 is a denormal float32, which kernels may take for 0."""
        arrays, weight_format = self.stored(preset)
        elements = arrays["weight" if preset == "MXFP8A16" else "weight_packed"].view(np.uint8)
        arrays["weight_scale"].view(np.uint8)[2, 1] = 0
        elements[2] = 0
        assert not np.asarray(dequantize(weight_format.assemble(arrays, (32, 64))))[2].any()
        elements[2, elements.shape[1] // 2] = 0x88 if preset == "MXFP4A16" else 0x80 if preset == "MXFP8A16" else 0x20
        weight_format.assemble(arrays, (32, 64))  # a negative zero
        elements[2, elements.shape[1] // 2 - 1] = 1  # of the other scale
        weight_format.assemble(arrays, (32, 64))
        elements[2, -1] = 0x10
        with pytest.raises(ValueError, match=r"with a scale of 2\^-127 for elements that are not zero"):
            weight_format.assemble(arrays, (32, 64))

    def test_a_divisor_of_zero_is_refused(self):
        arrays, weight_format = self.stored("NVFP4A16")
        arrays["weight_global_scale"][...] = 0
        with pytest.raises(ValueError, match="weight_global_scale, which divides its scales, is 0"):
            weight_format.assemble(arrays, (32, 64))

    def test_a_factor_of_scales_that_is_not_finite_is_refused(self):
        arrays, _ = self.stored("NVFP4A16")
        tensors = {"weight": arrays["weight_packed"], "weight_scale": arrays["weight_scale"]}
        with pytest.raises(ValueError, match="values or scales are not all finite"):
            NvFp4Format().assemble(tensors | {"weight_scale_2": np.float32([np.inf])}, (32, 64))

    @pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16", "MXFP8A16", "W4A16"])
    def test_columns_that_groups_do_not_divide_are_refused(self, preset):
        _, weight_format = self.stored(preset)
        with pytest.raises(ValueError, match=r"has 72 input features, which groups of (16|32|128) do not divide"):
            weight_format.tensors((8, 72))

    @staticmethod
    def stored(preset):
        formats = {"NVFP4A16": "nvfp4-pack-quantized", "MXFP4A16": "mxfp4-pack-quantized", "W4A16": "pack-quantized"}
        formats |= {"MXFP6A16": "mxfp6-pack-quantized", "MXFP8A16": "mxfp8-quantized"}
        scheme = scheme_of(formats.get(preset, "float-quantized"), preset)
        weight = random_weight(32, 128 if preset == "W4A16" else 64)
        arrays = {name: host_array(tensor).copy() for name, tensor in compress(weight, scheme).items()}
        return arrays, read_group(config_of(scheme)["config_groups"]["group_0"], None, "").format
