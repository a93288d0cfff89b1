"""A step over two processes, as jaxis compiles it: `python -m tests.parallel.donated_caches steps RANK PORT`."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HEARTBEAT_SECONDS = 5


def _initialize(rank: int, port: str, num_processes: int = 2) -> Mesh:
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes,
        rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"127.0.0.1:{port}" if rank == 0 else None,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=15,
        initialization_timeout=60,
    )
    return Mesh(np.asarray(jax.devices()), ("model",))


def steps(rank: int, port: str) -> None:
    """P1, P2: a compiled step with a packed vector and donated caches; how global arrays are made without exchange."""
    mesh = _initialize(rank, port)
    replicated, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("model"))
    num_devices = mesh.size
    host = np.arange(8 * num_devices, dtype=np.float32).reshape(num_devices, 8)
    weight = jax.make_array_from_callback(host.shape, divided, lambda index: host[index])
    cache = jnp.zeros((num_devices, 4), jnp.float32, device=divided)
    last = jnp.zeros(3, jnp.int32, device=replicated)
    made = jax.jit(lambda: jnp.full((num_devices, 4), 2.0), out_shardings=divided)()
    assert float(np.asarray(jax.jit(jnp.sum, out_shardings=replicated)(made))) == 8 * num_devices

    def step(weight: jax.Array, cache: jax.Array, last: jax.Array, packed: jax.Array) -> tuple[jax.Array, ...]:
        return cache + packed[:4] + weight[:, :4], jnp.sum(weight) + jnp.sum(packed), last + 1

    lowered = jax.jit(step, donate_argnums=1, out_shardings=(divided, replicated, replicated)).lower(
        weight, cache, last, jax.ShapeDtypeStruct((6,), jnp.int32, sharding=replicated)
    )
    program = lowered.compile()
    for i in range(100):
        packed = np.full(6, i, np.int32)
        old, (cache, total, last) = cache, program(weight, cache, last, packed)
        assert old.is_deleted()
        assert np.asarray(total) == host.sum() + 6 * i
    for shard in cache.addressable_shards:
        [row] = range(*shard.index[0].indices(num_devices))
        np.testing.assert_array_equal(np.asarray(shard.data)[0], host[row, :4] * 100 + 4950)
    assert np.asarray(last).tolist() == [100, 100, 100]
    print(f"devices {num_devices}")
    jax.distributed.shutdown()


if __name__ == "__main__":
    _, _, number, port = sys.argv
    steps(int(number), port)
