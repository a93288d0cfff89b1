"""Reductions over a vocabulary that is divided between devices, which exchange their results and not the logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.kernels.sampling.tiles import argmax
from jaxis.parallel.mesh import MODEL_AXIS, devices_of_layer, on_each_device


def can_divide(logits: jax.Array) -> bool:
    """Whether several devices share each layer, and can have equal parts of the vocabulary of logits [R, V]."""
    num_devices = devices_of_layer()
    return num_devices > 1 and logits.shape[1] % num_devices == 0


def argmax_on_shards(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Same arguments and result as `jaxis.kernels.sampling.argmax`, for logits that `can_divide` takes.

    A maximum is exact, so the result does not depend on the number of devices. Each sends 8 bytes a row to the others.
    """

    def on_shard(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        token_ids, peaks = argmax(part)
        token_ids += jax.lax.axis_index(MODEL_AXIS) * part.shape[1]
        all_ids, all_peaks = jax.lax.all_gather((token_ids, peaks), MODEL_AXIS)  # [devices, R] each
        # Of equals the first: devices are in the order of their tokens.
        first = jnp.argmax(all_peaks, axis=0)[None]
        return jnp.take_along_axis(all_ids, first, axis=0)[0], jnp.max(all_peaks, axis=0)

    whole = PartitionSpec()
    return on_each_device(on_shard, PartitionSpec(None, MODEL_AXIS), (whole, whole))(logits)
