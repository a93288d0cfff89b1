"""Top-k, top-p and min-p over rows of logits, without sorting the vocabulary.

Each of the three keeps the tokens from some logit upwards, so together they amount to one cutoff per row. Most cutoffs
are found among the few most likely tokens, sorted; those of flat distributions by bisection over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.platform import target_platform
from jaxis.kernels.sampling.bisection import largest_value_reaching
from jaxis.kernels.sampling.tiles import split_into_tiles, take_tiles

# The number of most likely tokens that are sorted, and of tiles that they are taken from. They settle a row if top-k
# and top-p keep fewer tokens, and none outside these tiles.
NUM_SORTED = 128
# Probabilities are summed as integers in units of at most 2**-29 of the whole, so that the sum, and with it the set
# of tokens kept, is the same in any batch and order of summation. With rounding, a row's total stays under
# 2**30 + V / 2, which int32 holds.
MASS_BITS = 30


class TokenFilters(NamedTuple):
    """Filters of the tokens that may be drawn.

    Attributes:
      top_k: int32 [R]. Keep the k most likely tokens; V or more keeps all.
      top_p: float32 [R]. Keep the smallest set of most likely tokens that has this share of the probability that the
        other two keep; 1 keeps all.
      min_p: float32 [R]. Keep tokens at least this share as likely as the most likely; 0 keeps all.

    Tokens exactly as likely as the last one kept are kept too; at least the most likely one always is.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


class LogitScale(NamedTuple):
    """Maps a row's logits to unnormalised probabilities, 1 for the most likely token."""

    max_logit: jax.Array  # float32 [R]
    inverse_temperature: jax.Array  # float32 [R]

    def scaled(self, logits: jax.Array) -> jax.Array:
        """Returns (logits [R, ...] - maximum) / temperature: at most 0, so that no temperature overflows."""
        shape = (-1,) + (1,) * (logits.ndim - 1)
        return (logits - self.max_logit.reshape(shape)) * self.inverse_temperature.reshape(shape)

    def weights(self, logits: jax.Array) -> jax.Array:
        return jnp.exp(self.scaled(logits))


class TokenWeights(NamedTuple):
    """Distribution to draw from.

    Attributes:
      tile_mass: Weight of each tile's kept tokens, float32 [R, N].
      cutoff: Smallest logit kept, float32 [R] (-inf in rows without a filter); None if nothing is filtered.
    """

    scale: LogitScale
    tile_mass: jax.Array
    cutoff: jax.Array | None


def weigh_tokens(logits: jax.Array, inverse_temperature: jax.Array, filters: TokenFilters | None) -> TokenWeights:
    """Weighs and filters tokens of logits float32 [R, V]; without filters, every token is kept.

    `inverse_temperature` is float32 [R], positive.
    """
    tiles = split_into_tiles(logits)
    scale = LogitScale(jnp.max(jnp.max(tiles, axis=-1), axis=-1), inverse_temperature)
    tile_mass = jnp.sum(scale.weights(tiles), axis=-1)
    if filters is None:
        return TokenWeights(scale, tile_mass, None)
    cutoff, tile_mass = apply_filters(tiles, tile_mass, scale, filters, logits.shape[1])
    return TokenWeights(scale, tile_mass, cutoff)


def apply_filters(
    tiles: jax.Array, tile_mass: jax.Array, scale: LogitScale, filters: TokenFilters, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the kept tokens in tiles of logits float32 [R, N, 128] with total weights `tile_mass` float32 [R, N].

    Returns the smallest logit kept, float32 [R] (-inf without a filter), and the kept weight of each tile, float32 [R,
    N].
    """
    rows, num_tiles, _ = tiles.shape
    unit = _Masses(scale, jnp.sum(tile_mass, axis=-1))
    is_filtered = (filters.top_k < vocab_size) | (filters.top_p < 1) | (filters.min_p > 0)

    best, tile_ids = jax.lax.top_k(jnp.max(tiles, axis=-1), min(NUM_SORTED + 1, num_tiles))
    # No token outside the candidates is above the floor.
    floor = best[:, NUM_SORTED] if num_tiles > NUM_SORTED else jnp.full(rows, -jnp.inf)
    tile_ids = tile_ids[:, :NUM_SORTED]
    candidates = take_tiles(tiles, tile_ids)
    cutoff, deciding = _cutoff_among_sorted(candidates.reshape(rows, -1), unit, filters, vocab_size)
    kept = jnp.where(candidates >= cutoff[:, None, None], scale.weights(candidates), 0.0)
    kept_mass = jnp.zeros_like(tile_mass).at[jnp.arange(rows)[:, None], tile_ids].set(jnp.sum(kept, axis=-1))

    # One row at a time if compute is the bottleneck, all at once if kernel launches are.
    rows_at_once = 1 if target_platform() == "cpu" else rows

    def search(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        cutoff, kept_mass, unsettled = state
        (chosen,) = jnp.nonzero(unsettled, size=rows_at_once, fill_value=rows)
        chosen_tiles, chosen_scale, chosen_unit, chosen_filters = jax.tree.map(
            lambda a: a.at[chosen].get(mode="clip"), (tiles, scale, unit, filters)
        )
        found = _cutoff_by_search(chosen_tiles.reshape(rows_at_once, -1), chosen_unit, chosen_filters, vocab_size)
        kept = jnp.where(chosen_tiles >= found[:, None, None], chosen_scale.weights(chosen_tiles), 0.0)
        return (
            cutoff.at[chosen].set(found, mode="drop"),
            kept_mass.at[chosen].set(jnp.sum(kept, axis=-1), mode="drop"),
            unsettled.at[chosen].set(False, mode="drop"),
        )

    unsettled = is_filtered & ~(deciding > floor)
    state = (cutoff, kept_mass, unsettled)
    if rows_at_once == rows:
        # Not a while_loop: XLA would hoist the loop-invariant body, and so always run it.
        state = jax.lax.cond(jnp.any(unsettled), search, lambda state: state, state)
    else:
        state = jax.lax.while_loop(lambda state: jnp.any(state[2]), search, state)
    cutoff, kept_mass, _ = state
    return jnp.where(is_filtered, cutoff, -jnp.inf), jnp.where(is_filtered[:, None], kept_mass, tile_mass)


class _Masses(NamedTuple):
    """Probabilities as integers."""

    scale: LogitScale
    total_weight: jax.Array  # float32 [R]

    def of(self, logits: jax.Array) -> jax.Array:
        return jnp.round(self.scale.weights(logits) * self._units()[:, None]).astype(jnp.int32)

    def total(self) -> jax.Array:
        """Returns the mass of the whole vocabulary, int32 [R]."""
        return jnp.round(self.total_weight * self._units()).astype(jnp.int32)

    def _units(self) -> jax.Array:
        """Returns the power of two that brings the total weight to between 2**29 and 2**30."""
        biased_exponent = jax.lax.bitcast_convert_type(self.total_weight, jnp.int32) >> 23
        return jax.lax.bitcast_convert_type((MASS_BITS - 1 + 2 * 127 - biased_exponent) << 23, jnp.float32)


def _combine(
    candidates: jax.Array,
    masses: jax.Array,
    unit: _Masses,
    filters: TokenFilters,
    vocab_size: int,
    kth_largest: Callable[[jax.Array], jax.Array],
    reaching: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Applies top-k and min-p, then top-p to the remaining tokens.

    Candidates are float32 [R, C] with masses int32 [R, C]. Returns the cutoff float32 [R], and a logit [R]: the cutoff
    is valid if it is above all tokens that are not candidates. `kth_largest` maps the mask of rows to compute to the
    k-th largest logit, float32 [R]; -inf if it is not a candidate. `reaching` maps target masses int32 [R], 0 in rows
    to skip, to the largest logit such that the candidates from it upwards reach the target, float32 [R]; -inf if there
    is none.
    """
    has_k = filters.top_k < vocab_size
    has_p = filters.top_p < 1
    has_min_p = filters.min_p > 0
    max_logit = unit.scale.max_logit
    min_p_logit = max_logit + jnp.log(filters.min_p) / unit.scale.inverse_temperature
    k_logit = jnp.where(has_k, kth_largest(has_k), -jnp.inf)
    cutoff = jnp.maximum(k_logit, jnp.where(has_min_p, jnp.minimum(min_p_logit, max_logit), -jnp.inf))
    mass_kept = jnp.sum(jnp.where(candidates >= cutoff[:, None], masses, 0), axis=-1)
    mass_left = jnp.where(has_k | has_min_p, mass_kept, unit.total())
    target = jnp.ceil(mass_left.astype(jnp.float32) * filters.top_p).astype(jnp.int32)
    p_logit = jnp.where(has_p, reaching(jnp.where(has_p, jnp.clip(target, 1, mass_left), 0)), -jnp.inf)
    is_known = ~(has_k & jnp.isneginf(k_logit)) & ~(has_p & jnp.isneginf(p_logit))
    deciding = jnp.where(has_k | has_min_p, cutoff, p_logit)
    return jnp.maximum(cutoff, p_logit), jnp.where(is_known, deciding, -jnp.inf)


def _cutoff_among_sorted(
    candidates: jax.Array, unit: _Masses, filters: TokenFilters, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Calls `_combine` for candidates [R, C], of which the largest are sorted first."""
    largest, _ = jax.lax.top_k(candidates, min(NUM_SORTED, candidates.shape[1]))
    cumulative = jnp.cumsum(unit.of(largest), axis=-1)

    def at(position: jax.Array) -> jax.Array:
        return largest.at[jnp.arange(largest.shape[0]), position].get(mode="fill", fill_value=-jnp.inf)

    return _combine(
        candidates,
        unit.of(candidates),
        unit,
        filters,
        vocab_size,
        kth_largest=lambda _: at(filters.top_k - 1),
        reaching=lambda target: at(jnp.sum(cumulative < target[:, None], axis=-1)),
    )


def _cutoff_by_search(logits: jax.Array, unit: _Masses, filters: TokenFilters, vocab_size: int) -> jax.Array:
    """Calls `_combine` for all logits [R, V]; always exact."""
    masses = unit.of(logits)
    max_logit = unit.scale.max_logit
    cutoff, _ = _combine(
        logits,
        masses,
        unit,
        filters,
        vocab_size,
        kth_largest=lambda asked: largest_value_reaching(logits, 1, jnp.where(asked, filters.top_k, 0), max_logit),
        reaching=lambda target: largest_value_reaching(logits, masses, target, max_logit),
    )
    return cutoff
