"""Reductions over the vocabulary in tiles of 128 tokens, for GPU, TPU and vocabularies that devices share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.kernels import native_constants
from jaxis.parallel.mesh import MODEL_AXIS, devices_of_layer, on_each_device

TILE = native_constants.VOCAB_TILE


def split_into_tiles(logits: jax.Array) -> jax.Array:
    """Returns logits [R, V] as [R, V / 128, 128], the last tile padded with -inf."""
    return _padded_to(logits, TILE).reshape(logits.shape[0], -1, TILE)


def _padded_to(logits: jax.Array, multiple: int) -> jax.Array:
    padding = -logits.shape[1] % multiple
    return jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf) if padding else logits


def take_tiles(tiles: jax.Array, tile_ids: jax.Array) -> jax.Array:
    """Returns the given tiles of each row: tiles [R, N, 128], tile_ids int32 [R, M] -> [R, M, 128]."""
    return jnp.take_along_axis(tiles, tile_ids[:, :, None], axis=1)


def argmax(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    tiles = split_into_tiles(logits)
    tile_max = jnp.max(tiles, axis=-1)
    tile_id = jnp.argmax(tile_max, axis=-1).astype(jnp.int32)
    tile = take_tiles(tiles, tile_id[:, None])[:, 0]
    return tile_id * TILE + jnp.argmax(tile, axis=-1).astype(jnp.int32), jnp.max(tile_max, axis=-1)


def logsumexp(logits: jax.Array) -> jax.Array:
    tiles = split_into_tiles(logits)
    row_max = jnp.max(jnp.max(tiles, axis=-1), axis=-1)
    tile_sums = jnp.sum(jnp.exp(tiles - row_max[:, None, None]), axis=-1)
    return row_max + jnp.log(jnp.sum(tile_sums, axis=-1))


def top_tokens(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns `jaxis.kernels.sampling.top_tokens`, from the k tiles with the largest maxima.

    Any token elsewhere has k better ones.
    """
    tiles = split_into_tiles(logits)
    rows, num_tiles, _ = tiles.shape
    _, tile_ids = jax.lax.top_k(jnp.max(tiles, axis=-1), min(k, num_tiles))
    tile_ids = jnp.sort(tile_ids, axis=-1)
    candidates = take_tiles(tiles, tile_ids).reshape(rows, -1)
    values, positions = jax.lax.top_k(candidates, min(k, logits.shape[1]))
    token_ids = jnp.take_along_axis(tile_ids, positions // TILE, axis=-1) * TILE + positions % TILE
    return values, token_ids.astype(jnp.int32)


def token_ranks(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    return 1 + jnp.sum(logits > chosen[:, None], axis=-1, dtype=jnp.int32)


def argmax_on_shards(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `jaxis.kernels.sampling.argmax` on several devices that share each layer.

    The devices exchange 8 bytes a row, and not the logits. The result does not depend on the number of devices.
    """

    def on_shard(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        token_ids, peaks = argmax(part)
        token_ids += jax.lax.axis_index(MODEL_AXIS) * part.shape[1]
        all_ids, all_peaks = jax.lax.all_gather((token_ids, peaks), MODEL_AXIS)  # [devices, R] each
        # The first of equal logits: devices are in the order of their tokens.
        first = jnp.argmax(all_peaks, axis=0)[None]
        return jnp.take_along_axis(all_ids, first, axis=0)[0], jnp.max(all_peaks, axis=0)

    whole = PartitionSpec()
    parts = _padded_to(logits, devices_of_layer())
    return on_each_device(on_shard, PartitionSpec(None, MODEL_AXIS), (whole, whole))(parts)
