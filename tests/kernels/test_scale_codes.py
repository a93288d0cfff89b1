"""Powers of two that scales and minima are multiples of."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.weights.scale_codes import MINIMUM_BITS, SCALE_BITS, unit_of


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("bits", [SCALE_BITS, MINIMUM_BITS])
def test_the_unit_is_the_smallest_power_of_two_that_reaches_the_largest(library, bits):
    most = (1 << bits) - 1
    codes = np.float32([most, np.nextafter(np.float32(most), np.float32(np.inf)), most + 0.5, most + 1, 1.0, 0.75])
    largest = np.concatenate([codes * np.float32(2.0**exponent) for exponent in (-100, -8, 0, 90)])
    found = np.asarray(unit_of(library.asarray(largest), bits))
    expected = [min(2.0**e for e in range(-126, 128) if x <= most * 2.0**e) for x in largest.astype(np.float64)]
    np.testing.assert_array_equal(found, np.float32(expected))
