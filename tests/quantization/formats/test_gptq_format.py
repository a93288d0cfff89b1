"""GPTQ's tensors, packed by AutoGPTQ's own steps, and the weights that they are in memory."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.weights import CodedWeight, QuantizedWeight, ReorderedWeight, lookup, matmul
from jaxis.quantization.formats.gptq import GptqFormat
from tests.quantization.packed_integers import gptq_tensors, quantize
from tests.support.dequantized import dequantize

N, K = 64, 192
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((N, K)).astype(np.float32)


def assemble(weight_format, tensors, shape=(N, K)):
    specs = weight_format.tensors(shape)
    assert tensors.keys() == specs.keys()
    for name, spec in specs.items():
        assert spec.fits(tensors[name].shape), name
        assert tensors[name].dtype in spec.dtypes
    return weight_format.assemble(tensors, shape)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_weight_is_the_one_that_was_packed(bits, symmetric, version, group_size):
    integers = quantize(WEIGHT, bits, group_size, symmetric=symmetric)
    if not symmetric:
        integers.zeros[0, 0] = 0  # version 1 writes -1 for it
    weight_format = GptqFormat(
        bits, None if group_size == -1 else group_size, symmetric, version == 1, has_order=version == 1
    )
    weight = assemble(weight_format, gptq_tensors(integers, version=version, has_order=version == 1))
    is_plain = bits == 4 or (bits == 8 and symmetric)
    assert type(weight) is (QuantizedWeight if is_plain else CodedWeight)
    assert weight.scale.dtype == (np.float32 if group_size == -1 else np.float16)
    np.testing.assert_array_equal(dequantize(weight), integers.wide)


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_reordered_columns_are_put_back(bits, symmetric):
    integers = quantize(WEIGHT, bits, 64, symmetric=symmetric, reorders=True)
    weight = assemble(GptqFormat(bits, 64, symmetric, has_order=True), gptq_tensors(integers))
    assert isinstance(weight, ReorderedWeight)
    assert weight.shape == (N, K)
    np.testing.assert_array_equal(dequantize(weight), integers.wide)
    x = RNG.standard_normal((5, K)).astype(np.float32)
    np.testing.assert_allclose(matmul(jnp.asarray(x), weight), x @ integers.wide.T, rtol=0, atol=1e-4)
    ids = np.array([3, 0, 63])
    np.testing.assert_array_equal(lookup(jnp.asarray(ids), weight, jnp.float32), integers.wide[ids])
    # As if act-order were ignored.
    assert not np.array_equal(dequantize(weight.weight), integers.wide)


def test_a_stack_of_reordered_weights_is_dequantized_each_by_its_own_order():
    made = [quantize(w, 4, 64, reorders=True) for w in RNG.standard_normal((3, N, K)).astype(np.float32)]
    weights = [GptqFormat(4, 64, has_order=True).assemble(gptq_tensors(each), (N, K)) for each in made]
    stack = ReorderedWeight(
        QuantizedWeight(*(np.stack([getattr(w.weight, name) for w in weights]) for name in ("qvalue", "scale"))),
        np.stack([w.input_order for w in weights]),
    )
    np.testing.assert_array_equal(dequantize(stack), np.stack([each.wide for each in made]))


def test_an_order_that_is_in_order_is_dropped_unless_types_must_agree():
    tensors, integers = gptq_tensors(quantize(WEIGHT, 4, 64)), quantize(WEIGHT, 4, 64)
    assert isinstance(assemble(GptqFormat(4, 64, has_order=True), tensors), QuantizedWeight)
    weight = assemble(GptqFormat(4, 64, has_order=True, reorders=True), tensors)
    assert isinstance(weight, ReorderedWeight)
    np.testing.assert_array_equal(dequantize(weight), integers.wide)


@pytest.mark.parametrize("reorders", [False, True])
def test_groups_that_do_not_divide_the_columns_are_split(reorders):
    weight = WEIGHT[:, :96]
    integers = quantize(weight, 4, 64, reorders=reorders)
    assert integers.scales.shape == (N, 2)
    loaded = assemble(GptqFormat(4, 64, has_order=True), gptq_tensors(integers), (N, 96))
    np.testing.assert_array_equal(dequantize(loaded), integers.wide)
    inner = loaded.weight if reorders else loaded
    assert inner.group_size == 32


def test_groups_that_are_too_uneven_are_refused():
    integers = quantize(WEIGHT, 4, 64)
    integers.groups[3] = 1
    with pytest.raises(ValueError, match="whose groups have from 63 to 65 columns, which is not supported"):
        GptqFormat(4, 64, has_order=True).assemble(gptq_tensors(integers), (N, K))


@pytest.mark.parametrize("bad", [-1, 3, 1 << 30])
def test_a_group_that_does_not_exist_is_refused(bad):
    tensors = gptq_tensors(quantize(WEIGHT, 4, 64))
    tensors["g_idx"][7] = bad
    with pytest.raises(ValueError, match=r"whose g_idx has groups from .* but there are 3"):
        GptqFormat(4, 64, has_order=True).assemble(tensors, (N, K))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored", ["as version 1", "as version 2", "absent"])
@pytest.mark.parametrize("zeros_less_one", [True, False])
def test_symmetric_zero_points_are_in_the_middle_however_they_are_written(bits, stored, zeros_less_one):
    integers = quantize(WEIGHT, bits, 64)
    tensors = gptq_tensors(integers, version=2 if stored == "as version 2" else 1, has_order=False)
    if stored == "absent":
        del tensors["qzeros"]
    weight_format = GptqFormat(bits, 64, True, zeros_less_one, has_zeros=stored != "absent")
    np.testing.assert_array_equal(dequantize(assemble(weight_format, tensors)), integers.wide)


def test_other_zero_points_of_a_symmetric_weight_are_refused():
    tensors = gptq_tensors(quantize(WEIGHT, 4, 64, symmetric=False), has_order=False)
    with pytest.raises(ValueError, match="whose zero points are not all 8, although `sym`"):
        GptqFormat(4, 64).assemble(tensors, (N, K))


@pytest.mark.parametrize("symmetric", [True, False])
def test_without_a_word_about_symmetry_zero_points_tell(symmetric):
    integers = quantize(WEIGHT, 4, 64, symmetric=symmetric)
    weight = assemble(GptqFormat(4, 64, None), gptq_tensors(integers, has_order=False))
    np.testing.assert_array_equal(dequantize(weight), integers.wide)
    if symmetric:  # even by a writer that says version 1 and writes version 2
        weight = assemble(GptqFormat(4, 64, None), gptq_tensors(integers, version=2, has_order=False))
        np.testing.assert_array_equal(dequantize(weight), integers.wide)


def test_scales_must_be_finite():
    tensors = gptq_tensors(quantize(WEIGHT, 4, 64), has_order=False)
    tensors["scales"][1, 3] = np.inf
    with pytest.raises(ValueError, match="whose scales are not all finite"):
        GptqFormat(4, 64).assemble(tensors, (N, K))


def test_odd_numbers_of_columns_are_refused():
    with pytest.raises(ValueError, match="has 100 features, which is not a multiple of 8"):
        GptqFormat(4, None).tensors((N, 100))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_example_of_a_format_is_valid(bits):
    for is_symmetric in (True, False, None):
        weight_format = GptqFormat(bits, 64, is_symmetric, has_order=True)
        example = {name: spec.example() for name, spec in weight_format.tensors((N, K)).items()}
        weight = weight_format.assemble(example, (N, K))
        assert weight.shape == (N, K)
        assert not isinstance(weight, ReorderedWeight)
