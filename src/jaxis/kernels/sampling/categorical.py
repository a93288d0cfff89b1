"""Draws a token from each row's softmax, filtered by top-k, top-p and min-p.

The draw is Gumbel-max in two levels: over the tiles by their total weight, then over the winning tile's tokens. That
is the same distribution as over all tokens at once, from V / 128 + 128 random numbers instead of V.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.sampling.threshold import (
    LOWEST_KEY,
    float_to_key,
    key_to_float,
    largest_key_reaching,
    mass_scale,
)
from jaxis.kernels.sampling.tiles import TILE, split_into_tiles, take_tiles

# Tiles that the threshold is looked for in. Every top-k of up to this many is settled there, and every top-p whose
# tokens lie in this many tiles; a batch with a row that is not is searched over the whole vocabulary.
CANDIDATE_TILES = 128


class TokenFilters(NamedTuple):
    """Which tokens may be drawn.

    Attributes:
      top_k: int32 [R]. Keep the k most likely tokens; V or more keeps all.
      top_p: float32 [R]. Keep the smallest set of most likely tokens that holds this share of the probability left
        by the other two; 1 keeps all.
      min_p: float32 [R]. Keep tokens at least this share as likely as the most likely; 0 keeps all.

    Tokens exactly as likely as the last one kept are kept too; at least the most likely one always is.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


def sample_categorical(
    logits: jax.Array, temperature: jax.Array, seed: jax.Array, step: jax.Array, filters: TokenFilters | None = None
) -> jax.Array:
    """Draws one token a row from softmax(logits / temperature), filtered.

    The random numbers come from (seed, step) alone, so a row draws the same token in any batch.

    Args:
      logits: float32 [R, V]; -inf bans a token.
      temperature: float32 [R], positive.
      seed: uint32 [R, 2].
      step: int32 [R]; another one draws independently.
      filters: None keeps every token.

    Returns:
      Token ids int32 [R].
    """
    tiles = split_into_tiles(logits)
    tile_max = jnp.max(tiles, axis=-1)
    row = _Row(jnp.max(tile_max, axis=-1), 1.0 / temperature)
    tile_mass = jnp.sum(row.weights(tiles), axis=-1)
    num_tiles = tiles.shape[1]

    if filters is None:
        cutoff = None
    else:
        cutoff, tile_mass = _apply_filters(tiles, tile_max, tile_mass, row, filters, logits.shape[1])

    noise = jax.vmap(lambda seed, step: _gumbel(seed, step, num_tiles + TILE))(seed, step)
    tile_id = jnp.argmax(jnp.log(tile_mass) + noise[:, :num_tiles], axis=-1).astype(jnp.int32)
    tile = take_tiles(tiles, tile_id[:, None])[:, 0]
    score = row.scaled(tile) + noise[:, num_tiles:]
    if cutoff is not None:
        score = jnp.where(tile >= cutoff[:, None], score, -jnp.inf)
    return tile_id * TILE + jnp.argmax(score, axis=-1).astype(jnp.int32)


class _Row(NamedTuple):
    """What turns a row's logits into unnormalised probabilities, 1 for the most likely token."""

    max_logit: jax.Array  # float32 [R]
    inverse_temperature: jax.Array  # float32 [R]

    def scaled(self, logits: jax.Array) -> jax.Array:
        """Logits [R, ...] less the maximum, over the temperature: at most 0, so that no temperature overflows."""
        shape = (-1,) + (1,) * (logits.ndim - 1)
        return (logits - self.max_logit.reshape(shape)) * self.inverse_temperature.reshape(shape)

    def weights(self, logits: jax.Array) -> jax.Array:
        return jnp.exp(self.scaled(logits))


def _apply_filters(
    tiles: jax.Array, tile_max: jax.Array, tile_mass: jax.Array, row: _Row, filters: TokenFilters, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """The logit from which tokens are kept [R], and each tile's weight in kept tokens [R, N]."""
    rows, num_tiles, _ = tiles.shape
    is_filtered = (filters.top_k < vocab_size) | (filters.top_p < 1) | (filters.min_p > 0)
    total_weight = jnp.sum(tile_mass, axis=-1)

    def search(candidates: jax.Array, floor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        weights = row.weights(candidates)
        key, settled = _cutoff_key(candidates.reshape(rows, -1), weights.reshape(rows, -1), floor, row,
                                   total_weight, filters, vocab_size)  # fmt: skip
        cutoff = jnp.where(is_filtered, key_to_float(key), -jnp.inf)
        kept_mass = jnp.sum(jnp.where(candidates >= cutoff[:, None, None], weights, 0.0), axis=-1)
        return cutoff, kept_mass, settled | ~is_filtered

    def search_all() -> tuple[jax.Array, jax.Array]:
        cutoff, kept_mass, _ = search(tiles, jnp.full(rows, LOWEST_KEY, jnp.int32))
        return cutoff, jnp.where(is_filtered[:, None], kept_mass, tile_mass)

    if num_tiles <= CANDIDATE_TILES:
        return search_all()

    best, tile_ids = jax.lax.top_k(tile_max, CANDIDATE_TILES + 1)
    tile_ids = tile_ids[:, :CANDIDATE_TILES]
    # No token outside the candidates is above this one.
    floor = float_to_key(best[:, CANDIDATE_TILES])
    cutoff, kept_mass, settled = search(take_tiles(tiles, tile_ids), floor)

    def keep_candidates() -> tuple[jax.Array, jax.Array]:
        scattered = jnp.zeros_like(tile_mass).at[jnp.arange(rows)[:, None], tile_ids].set(kept_mass)
        return cutoff, jnp.where(is_filtered[:, None], scattered, tile_mass)

    return jax.lax.cond(jnp.all(settled), keep_candidates, search_all)


def _cutoff_key(
    candidates: jax.Array,
    weights: jax.Array,
    floor: jax.Array,
    row: _Row,
    total_weight: jax.Array,
    filters: TokenFilters,
    vocab_size: int,
) -> tuple[jax.Array, jax.Array]:
    """The key of the smallest logit kept, and whether the candidates were enough to tell.

    Args:
      candidates: float32 [R, C], every logit of the row whose key is above `floor`, and perhaps others.
      weights: float32 [R, C], their unnormalised probabilities.
      floor: int32 [R].
      row: The rows' scale.
      total_weight: float32 [R], over the whole vocabulary.
      filters: The filters; rows with none get a key without meaning.
      vocab_size: V.

    Returns:
      Keys int32 [R], settled bool [R].
    """
    keys = float_to_key(candidates)
    masses = jnp.round(weights * mass_scale(total_weight)[:, None]).astype(jnp.int32)
    top = float_to_key(row.max_logit)

    def search(masses: jax.Array | int, target: jax.Array, wanted: jax.Array) -> jax.Array:
        return largest_key_reaching(keys, masses, target, floor, jnp.where(wanted, top + 1, floor))

    has_k = filters.top_k < vocab_size
    has_p = filters.top_p < 1
    has_min_p = filters.min_p > 0
    k_key = search(1, filters.top_k, has_k)
    min_p_logit = row.max_logit + jnp.log(filters.min_p) / row.inverse_temperature
    key = jnp.maximum(k_key, jnp.where(has_min_p, jnp.minimum(float_to_key(min_p_logit), top), floor))

    is_cut = has_k | has_min_p
    mass_left = jnp.where(
        is_cut,
        jnp.sum(jnp.where(keys >= key[:, None], masses, 0), axis=-1),
        jnp.round(total_weight * mass_scale(total_weight)).astype(jnp.int32),
    )
    target = jnp.ceil(mass_left.astype(jnp.float32) * filters.top_p).astype(jnp.int32)
    p_key = search(masses, jnp.clip(target, 1, mass_left), has_p)
    settled = jnp.where(is_cut, key, p_key) > floor
    return jnp.maximum(key, p_key), settled


def _gumbel(seed: jax.Array, step: jax.Array, n: int) -> jax.Array:
    """n independent standard Gumbel numbers, a function of seed uint32 [2] and step int32 [] alone."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step)
    bits = jax.random.bits(key, (n,), jnp.uint32)
    # All 32 bits count where it matters, near 0, which becomes the large Gumbel numbers; 1 itself must not occur.
    uniform = jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
