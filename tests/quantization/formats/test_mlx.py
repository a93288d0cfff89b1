"""Values that MLX's tensors stand for, by its own `quantize` and `dequantize`."""

import mlx.core as mx
import numpy as np
import pytest

from jaxis.kernels.weights import BlockScaledWeight, CodedWeight
from jaxis.quantization.formats.mlx import AFFINE_BITS, FLOAT_MODES, MlxAffineFormat, MlxFloatFormat
from tests.quantization.foreign_quantizers import mlx_arrays, random_weight
from tests.support.dequantized import dequantize


def arrays(found):
    """Arrays of NumPy; bfloat16 as its own type."""
    return {name: np.array(array) if array.dtype != mx.bfloat16 else bfloat16(array) for name, array in found.items()}


def bfloat16(array):
    import ml_dtypes

    return np.array(array.astype(mx.float32)).astype(ml_dtypes.bfloat16)


def assemble(stored_as, found, shape):
    specs = stored_as.tensors(shape)
    for name, spec in specs.items():
        assert spec.fits(found[name].shape), name
        assert found[name].dtype in spec.dtypes, name
    return stored_as.assemble({name: found[name] for name in specs}, shape)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_affine(bits, group_size, dtype):
    found = arrays(mlx_arrays(random_weight(24, 384).numpy(), "affine", bits, group_size, dtype))
    weight = assemble(MlxAffineFormat(bits, group_size), found, (24, 384))
    assert isinstance(weight, CodedWeight)
    assert weight.group_size == group_size
    stored = bits / 8 + 2 * found["scales"].itemsize / group_size
    assert weight.nbytes == stored * 24 * 384  # as in the file
    np.testing.assert_array_equal(dequantize(weight), found["wide"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_floats(mode):
    bits, group_size, _ = FLOAT_MODES[mode]
    found = arrays(mlx_arrays(random_weight(24, 96).numpy(), mode, bits, group_size))
    weight = assemble(MlxFloatFormat(mode), found, (24, 96))
    assert isinstance(weight, CodedWeight if mode == "nvfp4" else BlockScaledWeight)
    np.testing.assert_array_equal(dequantize(weight), found["wide"])


def test_groups_must_fill_rows():
    with pytest.raises(ValueError, match="has 96 features, which groups of 64 do not divide"):
        MlxAffineFormat(4, 64).tensors((24, 96))


@pytest.mark.parametrize("name", ["scales", "biases"])
def test_scales_and_biases_must_be_finite(name):
    found = arrays(mlx_arrays(random_weight(24, 128).numpy(), "affine", 4, 64))
    found[name] = found[name] * np.inf
    with pytest.raises(ValueError, match="not all finite"):
        assemble(MlxAffineFormat(4, 64), found, (24, 128))


def test_scales_that_are_not_numbers():
    found = arrays(mlx_arrays(random_weight(24, 128).numpy(), "nvfp4", 4, 16))
    found["scales"] = np.full_like(found["scales"], 0x7F)
    with pytest.raises(ValueError, match="not all finite"):
        assemble(MlxFloatFormat("nvfp4"), found, (24, 128))
