"""What jaxis relies on in JAX between processes, as programs: `python -m tests.support.jax_probes NAME RANK PORT`.

Each prints its findings; the tests that start several processes of it say what they must be.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

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


def endless(rank: int, port: str) -> None:
    """P4: sums over all devices until something ends it; says what a failure looks like and when it came."""
    mesh = _initialize(rank, port)
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
    value = jnp.ones(mesh.size, device=NamedSharding(mesh, P("model")))
    np.asarray(total(value))
    print("begun", flush=True)
    try:
        while True:
            assert np.asarray(total(value)) == mesh.size
            time.sleep(0.01)
    except Exception as error:
        print(f"raised {type(error).__name__}", flush=True)
        time.sleep(60)


def idle(rank: int, port: str) -> None:
    """P4: the same, without any collective running."""
    _initialize(rank, port)
    print("begun", flush=True)
    time.sleep(90)


def late(rank: int, port: str) -> None:
    """P5: the second process comes 40 s late to its first collective of each kind, once they have met in another."""
    mesh = _initialize(rank, port)
    met = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
    np.asarray(met(jnp.ones(mesh.size, device=NamedSharding(mesh, P("model")))))

    def reduced(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "model")

    def scattered(x: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x, "model", scatter_dimension=0, tiled=True)

    functions: dict[str, tuple[Callable[[jax.Array], jax.Array], P]] = {
        "psum": (reduced, P()),
        "psum_scatter": (scattered, P("model")),
    }
    for name, (function, spec) in functions.items():
        mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=spec))
        value = jnp.ones(mesh.size, device=NamedSharding(mesh, P()))
        program = mapped.lower(value).compile()
        if rank == 1:
            time.sleep(40)
        started = time.monotonic()
        try:
            jax.block_until_ready(program(value))
            print(f"{name} completed after {time.monotonic() - started:.0f} s", flush=True)
        except Exception as error:
            print(f"{name} failed: {error}".partition("\n")[0], flush=True)


def partly_manual(*_: object) -> None:
    """P3: a region manual over `data`, in it one over `model` and one over both, with caches sharded over `data`.

    Runs on 4 devices of one process, and is lowered for TPUs too.
    """
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("data", "model"))

    def attend(x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * 2, cache + jnp.sum(x)

    def experts(x: jax.Array, stack: jax.Array) -> jax.Array:
        everyone = jax.lax.all_gather(x, "data", tiled=True)
        mine = everyone * jnp.sum(stack)
        return jax.lax.psum(jax.lax.psum_scatter(mine, "data", tiled=True), "model")

    def rank_step(x: jax.Array, cache: jax.Array, stack: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads = P(None, "model")
        x, cache = jax.shard_map(
            attend, in_specs=(heads, heads), out_specs=(heads, heads), axis_names={"model"}, check_vma=False
        )(x, cache)
        x = jax.shard_map(experts, in_specs=(P(), P("model")), out_specs=P(), axis_names={"model"}, check_vma=False)(
            x, stack
        )
        return x, cache

    ranks = P("data")
    step = jax.shard_map(
        rank_step, in_specs=(ranks, ranks, ranks), out_specs=(ranks, ranks), axis_names={"data"}, check_vma=False
    )
    with jax.set_mesh(mesh):
        x = jax.device_put(np.arange(16, dtype=np.float32).reshape(4, 4), NamedSharding(mesh, ranks))
        cache = jax.device_put(np.zeros((8, 4), np.float32), NamedSharding(mesh, P("data", "model")))
        stack = jax.device_put(np.arange(1.0, 5, dtype=np.float32), NamedSharding(mesh, P(("data", "model"))))
        function = jax.jit(step, donate_argnums=1)
        exported = jax.export.export(function, platforms=["tpu"])(x, cache, stack)
        result, new_cache = function(x, cache, stack)
    assert cache.is_deleted()
    # Every device multiplies everyone's rows by its own expert's weight, and the sums go back.
    np.testing.assert_array_equal(np.asarray(result), np.arange(16, dtype=np.float32).reshape(4, 4) * 2 * 10)
    sums = np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2).sum((1, 3))
    np.testing.assert_array_equal(np.asarray(new_cache), np.kron(sums, np.ones((4, 2), np.float32)))
    print(f"exported for {exported.platforms[0]} on {exported.nr_devices} devices")


def transfer(*_: object) -> None:
    """P7: `jax.experimental.transfer` between two servers of this process."""
    from jax.experimental.transfer import start_transfer_server

    device = jax.devices()[0]
    first = start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
    second = start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
    value = jnp.arange(1024, dtype=jnp.bfloat16).reshape(32, 32)
    first.await_pull(7, [value])
    like = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
    [pulled] = second.connect(first.address()).pull(7, [like])
    np.testing.assert_array_equal(np.asarray(pulled), np.asarray(value))
    print("pulled")


def gathers(*_: object) -> None:
    """P8: blocks are read before a later call overwrites them in place, whatever else the devices do."""

    @jax.jit
    def save(cache: jax.Array, blocks: jax.Array) -> jax.Array:
        return cache[blocks]

    overwrite = jax.jit(lambda cache, value: cache.at[:].set(value), donate_argnums=0)
    load = jax.jit(lambda cache, blocks, saved: cache.at[blocks].set(saved), donate_argnums=0)
    blocks, cache = np.asarray([1, 5, 9]), jnp.zeros((16, 256))
    saved = []
    for i in range(10_000):
        saved.append((i, save(cache, blocks)))
        cache = overwrite(cache, np.float32(i + 1))
        if len(saved) == 50:
            assert all((np.asarray(value) == number).all() for number, value in saved)
            saved.clear()
    cache = load(cache, blocks, jnp.full((3, 256), 7.0))
    rows = np.asarray(cache)[:, 0]
    assert (rows[blocks] == 7).all()
    assert (np.delete(rows, blocks) == 10_000).all()
    print("old contents always")


if __name__ == "__main__":
    _, name, number, port = sys.argv
    probes = (steps, endless, idle, late, partly_manual, transfer, gathers)
    {probe.__name__: probe for probe in probes}[name](int(number), port)
