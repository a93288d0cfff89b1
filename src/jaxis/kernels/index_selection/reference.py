"""The definition: the selection within whole sequences, without a cache, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scores_of_keys(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Scores of keys, float32 [..., T, S].

    Args:
      q: [..., T, H, D].
      weights: float32 [..., T, H].
      keys: [..., S, D].
    """
    products = jnp.einsum(
        "...thd,...sd->...ths", q, keys, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    scores = jnp.sum(jax.nn.relu(products) * weights[..., None], axis=-2)
    # -0 and 0 are equal scores, and must be equal to whatever sorts them.
    return jnp.where(scores == 0, 0.0, scores)


def select_from_whole_sequences(
    q: jax.Array, weights: jax.Array, keys: jax.Array, visible: jax.Array, *, num_selected: int
) -> jax.Array:
    """Which of a flat batch's tokens each of them attends to: bool [T, T].

    Args:
      q: [T, H, D].
      weights: float32 [T, H].
      keys: [T, D].
      visible: bool [T, T], the tokens of its own sequence up to itself.
      num_selected: K, the most tokens that a token attends to.
    """
    num_tokens = q.shape[0]
    if num_tokens <= num_selected:
        return visible
    scores = jnp.where(visible, scores_of_keys(q, weights, keys), -jnp.inf)
    # Of equal scores, the first comes first.
    _, best = jax.lax.top_k(scores, num_selected)
    selected = jnp.zeros((num_tokens, num_tokens), bool).at[jnp.arange(num_tokens)[:, None], best].set(True)
    return selected & visible
