"""Draws of a token from each row's softmax, filtered by top-k, top-p and min-p.

The draw is Gumbel-max in two levels: over the tiles by their total weight, then over the winning tile's tokens. That
is the same distribution as over all tokens at once, from V / 128 + 128 random numbers instead of V.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.materialize import in_whole_vectors, materialize
from jaxis.kernels.sampling import cpu
from jaxis.kernels.sampling.filters import TokenFilters, TokenWeights, weigh_tokens
from jaxis.kernels.sampling.tiles import TILE


def sample_categorical(
    logits: jax.Array, temperature: jax.Array, seed: jax.Array, step: jax.Array, filters: TokenFilters | None = None
) -> jax.Array:
    """Draws one token per row from softmax(logits / temperature), filtered; returns token ids int32 [R].

    The random numbers come from (seed, step) alone, so a row draws the same token in any batch. Logits are float32 [R,
    V]; -inf bans a token. Temperatures are float32 [R], positive; seeds uint32 [R, 2]; steps int32 [R], independent of
    each other.
    """
    return draw(logits, weights_of(logits, temperature, filters), seed, step)


def weights_of(logits: jax.Array, temperature: jax.Array, filters: TokenFilters | None = None) -> TokenWeights:
    """Returns the distribution that `draw` takes; the arguments are those of `sample_categorical`."""
    weigh = cpu.weigh_tokens if cpu.supports(logits) else weigh_tokens
    return weigh(logits, 1.0 / temperature, filters)


def tempered(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Returns logits [R, V] divided by the temperature of their row, positive float32 [R].

    The last bits are the same in every program that calls this function. In some programs, XLA turns a division into a
    product with the reciprocal, and skips the rounding of that product before a subtraction.
    """
    return materialize(logits * materialize(1.0 / temperature)[:, None])


def draw(logits: jax.Array, weights: TokenWeights, seed: jax.Array, step: jax.Array) -> jax.Array:
    """Draws one token per row, as `sample_categorical` does, from known weights."""
    scale, tile_mass, cutoff = weights
    num_tiles = tile_mass.shape[1]
    uniform = jax.vmap(lambda seed, step: _uniform(seed, step, num_tiles + TILE))(seed, step)
    noise = in_whole_vectors(_gumbel, uniform)
    tile_id = jnp.argmax(in_whole_vectors(jnp.log, tile_mass) + noise[:, :num_tiles], axis=-1).astype(jnp.int32)
    token_ids = tile_id[:, None] * TILE + jnp.arange(TILE)
    tile = logits.at[jnp.arange(logits.shape[0])[:, None], token_ids].get(mode="fill", fill_value=-jnp.inf)
    score = scale.scaled(tile) + noise[:, num_tiles:]
    if cutoff is not None:
        score = jnp.where(tile >= cutoff[:, None], score, -jnp.inf)
    return tile_id * TILE + jnp.argmax(score, axis=-1).astype(jnp.int32)


def _uniform(seed: jax.Array, step: jax.Array, n: int) -> jax.Array:
    """Returns n independent numbers between 0 and 1, exclusive, from only seed uint32 [2] and step int32 []."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step)
    bits = jax.random.bits(key, (n,), jnp.uint32)
    # All 32 bits count near 0, which maps to large Gumbel samples; 1 itself must not occur.
    return jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)


def _gumbel(uniform: jax.Array) -> jax.Array:
    return -jnp.log(-jnp.log1p(-uniform))
