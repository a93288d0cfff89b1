"""Allocating caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.bench.process_facts import compile_stats
from jaxis.kernels.paged_cache import make_cache_array
from jaxis.parallel.mesh import make_mesh


def test_caches_of_one_shape_are_allocated_by_one_program() -> None:
    sharding = NamedSharding(make_mesh(), PartitionSpec())
    struct = jax.ShapeDtypeStruct((3, 7, 5), jnp.bfloat16, sharding=sharding)
    with compile_stats() as stats:
        first, second = (make_cache_array(struct, reads_only_written=True) for _ in range(2))
    assert stats.num_programs <= 1
    assert first.shape == second.shape == (3, 7, 5)
    assert first.dtype == jnp.bfloat16
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()
