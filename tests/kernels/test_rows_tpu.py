"""Rows of a table on TPU, interpreted on CPU with races looked for."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.weights import rows_tpu
from tests.kernels.tpu_attention import strict_interpreter

IDS = jnp.asarray([0, 31, 32, 149, -1, 2**31 - 1, 32], jnp.int32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8"])
def test_rows_are_the_tables_bit_for_bit(dtype):
    bits = np.random.default_rng(0).integers(0, 256, (150, 640), np.uint8)
    table = bits.view(jnp.dtype(dtype))
    if jnp.issubdtype(table.dtype, jnp.floating):
        table = np.where(np.isfinite(table.astype(np.float32)), table, np.asarray(-0.0, table.dtype))
    with strict_interpreter():
        rows = rows_tpu.take_rows(jnp.asarray(table), IDS)
    expected = table[np.clip(IDS, 0, 149)]
    assert rows.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(rows).view(np.uint8), expected.view(np.uint8))


def test_few_rows_of_a_small_table_are_read_by_the_kernel():
    table = jnp.zeros((4000, 1024), jnp.int8)
    assert rows_tpu.supports(table, jnp.zeros(16, jnp.int32))
    # These would read nearly as much as the whole table, or are of a type without a kernel.
    assert not rows_tpu.supports(table, jnp.zeros(64, jnp.int32))
    assert not rows_tpu.supports(table[:, :32], jnp.zeros(1, jnp.int32))
    assert not rows_tpu.supports(table.astype(jnp.float16), jnp.zeros(1, jnp.int32))
