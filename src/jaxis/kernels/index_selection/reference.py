"""Definition of the selection within whole sequences, without a cache, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scores_of_keys(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns scores float32 [..., T, S] of keys [..., S, D] for q [..., T, H, D] and weights float32 [..., T, H]."""
    products = jnp.einsum(
        "...thd,...sd->...ths", q, keys, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    scores = jnp.sum(jax.nn.relu(products) * weights[..., None], axis=-2)
    # A sort may tell -0 from 0, but the scores are equal.
    return jnp.where(scores == 0, 0.0, scores)


def select_from_whole_sequences(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    visible: jax.Array,
    *,
    num_selected: int,
    always: tuple[int, int] = (0, 0),
) -> jax.Array:
    """Returns bool [T, S]: True for the best keys of each token, at most `num_selected`, of those that it sees.

    Takes q [T, H, D], weights float32 [T, H], keys [S, D], of tokens or of groups, and `visible` bool [T, S], those of
    a token's own sequence up to itself, of which the first and last `always` are selected whatever their scores.
    """
    if keys.shape[0] <= num_selected:
        return visible
    from_first = jnp.cumsum(visible, axis=1)
    is_always = (from_first <= always[0]) | (from_first > from_first[:, -1:] - always[1])
    scores = jnp.where(is_always, jnp.inf, scores_of_keys(q, weights, keys))
    scores = jnp.where(visible, scores, -jnp.inf)
    # Of equal scores, the first comes first.
    _, best = jax.lax.top_k(scores, num_selected)
    return visible & jnp.zeros_like(visible).at[jnp.arange(q.shape[0])[:, None], best].set(True)
