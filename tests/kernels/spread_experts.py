"""Layers of experts that lie whole on 4 devices, as programs: `python -m tests.kernels.spread_experts KIND ...`.

Each kind of weights gives what one device gives, when the program is one of the whole mesh, and in a region that is
manual over the data axis, where each rank has its own tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxis.kernels.low_rank import LowRankStack
from jaxis.kernels.weights import ExpertAdditions, ExpertStacks, experts, experts_on_devices, grouped_experts
from jaxis.layers.glu import GLU
from jaxis.parallel.mesh import MESH_AXES, SPREAD_EXPERT, data_spec, logical_sharding
from tests.support.weight_stacks import weight_stack

X, E, F, T, K = 8, 128, 256, 12, 3
REAL_TOKENS = 7
_STACK_NAMES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
_rng = np.random.default_rng(0)


def _loads() -> dict[str, np.ndarray]:
    """Expert ids [T, K]: every expert has tokens; one has all; half of the devices have none; some tokens are padding,
    whose ids are past the last expert."""
    even = _rng.permuted(np.tile(np.arange(X), (T, 1)), axis=1)[:, :K]
    padded = np.where(np.arange(T)[:, None] < REAL_TOKENS, even, X)
    return {"even": even, "one": np.full((T, K), 5), "few": _rng.integers(2, 4, (T, K)), "padded": padded}


def _stacks(kind: str, *, scales_input: bool) -> ExpertStacks:
    weights = [weight_stack(kind, X, *shape)[0] for shape in ((F, E), (F, E), (E, F))]
    biases = [jnp.asarray(_rng.standard_normal((X, size)), jnp.float32) for size in (F, F, E)]
    return ExpertStacks(*weights, *biases, X, GLU(jax.nn.silu), scales_input)


def _additions() -> Callable[[jax.Array], ExpertAdditions]:
    """Another pair of matrices for each expert: for expert ids [T, K], what is added to their products."""

    def pairs(size_in: int, size_out: int) -> LowRankStack:
        a, b = (jnp.asarray(_rng.standard_normal((X, 2, size)), jnp.float32) for size in (size_in, size_out))
        return LowRankStack(a, b, jnp.full(X, 2, jnp.int32))

    gate, up, down = pairs(E, F), pairs(E, F), pairs(F, E)
    return lambda ids: ExpertAdditions(jnp.where(ids < X, ids + 1, 0).astype(jnp.int32), gate, up, down)


def _spread(mesh: Mesh, stacks: ExpertStacks) -> dict[str, Any]:
    """The arrays on the devices of a mesh."""

    def place(array: jax.Array) -> jax.Array:
        axes = (SPREAD_EXPERT, *[None] * (array.ndim - 1))
        placed = jax.device_put(array, logical_sharding(mesh, axes, array.shape))
        assert {shard.data.shape[0] for shard in placed.addressable_shards} == {X // mesh.size}
        return placed

    return jax.tree.map(place, {name: getattr(stacks, name) for name in _STACK_NAMES})


def check(
    kind: str,
    x: jax.Array,
    shares: jax.Array,
    *,
    scales_input: bool = False,
    additions: Callable[[jax.Array], ExpertAdditions | None] = lambda _: None,
) -> None:
    """Raises an AssertionError if any number of devices or ranks gives something else than one."""
    stacks, loads = _stacks(kind, scales_input=scales_input), _loads()
    alone = jax.jit(lambda ids: experts(x, ids, shares, dataclasses.replace(stacks, additions=additions(ids))))
    expected = {load: np.asarray(alone(ids)) for load, ids in loads.items()}
    assert not expected["padded"][REAL_TOKENS:].any()

    def layer(x: jax.Array, ids: jax.Array, shares: jax.Array, arrays: dict[str, Any]) -> jax.Array:
        changed = dataclasses.replace(stacks, are_spread=True, additions=additions(ids), **arrays)
        return experts(x, ids, shares, changed)

    def compare(what: str, program: Callable[..., jax.Array], arrays: dict[str, Any]) -> None:
        for load, ids in loads.items():
            scale = np.abs(expected[load]).max()
            np.testing.assert_allclose(
                program(x, ids, shares, arrays), expected[load], rtol=0, atol=1e-5 * scale, err_msg=f"{what}, {load}"
            )

    for data, model in ((1, 4), (2, 2), (4, 1)):
        devices = np.array(jax.devices()).reshape(data, model)
        with jax.set_mesh(mesh := Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 2)):
            arrays = _spread(mesh, stacks)
            compare(f"{kind} on {data} x {model}", jax.jit(layer), arrays)
            if data == 1:
                continue
            for axes in ({"data"}, {"data", "model"}):
                specs = jax.tree.map(
                    lambda a, axes=axes: data_spec(a.sharding) if axes == {"data"} else a.sharding.spec, arrays
                )
                ranks = jax.shard_map(
                    layer,
                    in_specs=(P("data"), P("data"), P("data"), specs),
                    out_specs=P("data"),
                    axis_names=axes,
                    check_vma=False,
                )
                compare(f"{kind} on {data} ranks of {model}, manual over {axes}", jax.jit(ranks), arrays)


if __name__ == "__main__":
    tokens = jnp.asarray(_rng.standard_normal((T, E)), jnp.float32)
    weights = jnp.asarray(_rng.uniform(0, 1, (T, K)), jnp.float32)
    for each in sys.argv[1:]:
        check(each, tokens, weights)
    check(sys.argv[1], tokens, weights, additions=_additions())
    # Tests have no accelerator, whose sum over the ranks leaves each with its own rows.
    with (
        mock.patch.object(experts_on_devices, "target_platform", return_value="tpu"),
        mock.patch.object(grouped_experts, "target_platform", return_value="tpu"),
    ):
        check(sys.argv[1], tokens, weights, scales_input=True)
