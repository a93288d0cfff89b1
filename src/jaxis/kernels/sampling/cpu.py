"""Reductions over the vocabulary on CPU: native kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxis.kernels import native
from jaxis.kernels.materialize import in_whole_vectors
from jaxis.kernels.sampling.filters import LogitScale, TokenFilters, TokenWeights
from jaxis.kernels.sampling.tiles import TILE


def supports(logits: jax.Array) -> bool:
    return native.usable() and logits.dtype == jnp.float32 and logits.size > 0


def argmax(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = logits.shape[0]
    ids, maxima = native.call("argmax", [_array(jnp.int32, rows), _array(jnp.float32, rows)], logits)
    return ids, maxima


def logsumexp(logits: jax.Array) -> jax.Array:
    return _native_logsumexp(logits)


def _logsumexp_kernel(logits: jax.Array) -> jax.Array:
    _, _, row_max, total = _tile_weights(logits, jnp.ones(logits.shape[0], jnp.float32))
    return row_max + in_whole_vectors(jnp.log, total[:, None])[:, 0]


_native_logsumexp = native.transformable(_logsumexp_kernel, functools.partial(jax.nn.logsumexp, axis=-1))


def top_tokens(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    shape = (logits.shape[0], min(k, logits.shape[1]))
    if k == 0:
        return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
    if k >= logits.shape[1]:
        return jax.lax.top_k(logits, logits.shape[1])
    values, ids = native.call("top_tokens", [_array(jnp.float32, *shape), _array(jnp.int32, *shape)], logits)
    return values, ids


def token_ranks(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    return native.call("token_ranks", _array(jnp.int32, logits.shape[0]), logits, chosen)


def weigh_tokens(logits: jax.Array, inverse_temperature: jax.Array, filters: TokenFilters | None) -> TokenWeights:
    tile_max, tile_mass, row_max, total = _tile_weights(logits, inverse_temperature)
    scale = LogitScale(row_max, inverse_temperature)
    if filters is None:
        return TokenWeights(scale, tile_mass, None)
    cutoff, tile_mass = native.call(
        "filter_tokens",
        [_array(jnp.float32, logits.shape[0]), _array(jnp.float32, *tile_mass.shape)],
        logits,
        inverse_temperature,
        tile_max,
        tile_mass,
        row_max,
        total,
        filters.top_k,
        filters.top_p,
        row_max + in_whole_vectors(jnp.log, filters.min_p[:, None])[:, 0] / inverse_temperature,
    )
    return TokenWeights(scale, tile_mass, cutoff)


def _tile_weights(logits: jax.Array, inverse_temperature: jax.Array) -> Sequence[jax.Array]:
    """Returns each tile's maximum and total weight, float32 [R, N], and each row's, float32 [R]."""
    rows, num_tiles = logits.shape[0], -(-logits.shape[1] // TILE)
    outputs = [_array(jnp.float32, rows, num_tiles)] * 2 + [_array(jnp.float32, rows)] * 2
    return native.call("tile_weights", outputs, logits, inverse_temperature)


def _array(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
