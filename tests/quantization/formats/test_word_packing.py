"""Dense packing, against a stream of bits that Python's integers make."""

import numpy as np
import pytest

from jaxis.kernels.weights import CodedWeight
from jaxis.kernels.weights.code_planes import code_planes
from jaxis.quantization.formats.word_packing import (
    nibble_pairs,
    num_words,
    pack_nibble_pairs,
    pack_numbers,
    unpack_numbers,
)
from tests.support.dequantized import dequantize


def words_of(numbers, bits):
    """The words of one row of numbers: one large integer, cut into pieces of 32 bits."""
    stream = sum(int(number) << bits * i for i, number in enumerate(numbers))
    count = -(-len(numbers) * bits // 32)
    return np.array([stream >> 32 * i & 0xFFFFFFFF for i in range(count)], np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 32, 40, 96])
def test_numbers_are_dense_and_cross_words(bits, count):
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (3, count)).astype(np.uint8)
    words = np.stack([words_of(row, bits) for row in numbers])
    assert words.shape[1] == num_words(count, bits)
    np.testing.assert_array_equal(pack_numbers(numbers, bits), words)
    np.testing.assert_array_equal(unpack_numbers(words, bits, count), numbers)
    np.testing.assert_array_equal(unpack_numbers(words.view(np.uint32), bits, count), numbers)
    # Along the first axis, as GPTQ packs its weights.
    np.testing.assert_array_equal(pack_numbers(numbers.T, bits, axis=0), words.T)
    np.testing.assert_array_equal(unpack_numbers(words.T, bits, count, axis=0), numbers.T)


@pytest.mark.parametrize("count", [2, 8, 20])
def test_nibble_pairs_are_the_bytes_of_words(count):
    numbers = np.random.default_rng(0).integers(0, 16, (3, count)).astype(np.uint8)
    pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
    words = pack_numbers(numbers, 4)
    np.testing.assert_array_equal(nibble_pairs(words, count), pairs)
    np.testing.assert_array_equal(pack_nibble_pairs(pairs), words)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_code_planes_are_those_of_a_coded_weight(bits):
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64)).astype(np.uint8)
    weight = CodedWeight(**code_planes(numbers, bits), scale=np.ones((3, 2), np.float32), bits=bits)
    assert weight.shape == (3, 64)
    np.testing.assert_array_equal(dequantize(weight), numbers)
