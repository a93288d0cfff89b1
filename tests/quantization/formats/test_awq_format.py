"""AWQ's tensors, packed by AutoAWQ's own steps, and the weights that they are in memory."""

import numpy as np
import pytest

from jaxis.kernels.weights import QuantizedWeight
from jaxis.quantization.formats.awq import AwqGemmFormat, AwqGemvFormat
from tests.quantization.packed_integers import awq_gemm_tensors, awq_gemv_tensors, quantize
from tests.support.dequantized import dequantize

N, K = 64, 192
WEIGHT = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)


def assemble(weight_format, tensors):
    specs = weight_format.tensors((N, K))
    assert tensors.keys() == specs.keys()
    for name, spec in specs.items():
        assert spec.fits(tensors[name].shape), name
        assert tensors[name].dtype in spec.dtypes
    return weight_format.assemble(tensors, (N, K))


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_a_weight_is_the_one_that_was_packed(version, group_size):
    integers = quantize(WEIGHT, 4, group_size, symmetric=False)
    group = None if group_size == -1 else group_size
    if version == "gemm":
        weight = assemble(AwqGemmFormat(group), awq_gemm_tensors(integers))
    else:
        tensors = awq_gemv_tensors(integers)
        weight = assemble(AwqGemvFormat(group, tensors["qzeros"].shape[1]), tensors)
    assert isinstance(weight, QuantizedWeight)
    np.testing.assert_array_equal(dequantize(weight), integers.wide)


def test_too_few_zero_points_are_refused():
    with pytest.raises(ValueError, match="has 0 words of zero points for a row of 3 groups"):
        AwqGemvFormat(64, 0).tensors((N, K))
