"""Sums of log decays between the tokens of a chunk, from which chunked recurrences take their weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sums_between(log_decay: jax.Array) -> jax.Array:
    """Of log decays [C, ...], at [i, j, ...] their sum over the tokens after j up to i; -inf where i < j.

    Each is summed by itself: as a difference of two sums from the chunk's beginning, it would lose the digits that
    those have before it.
    """
    num_rows = log_decay.shape[0]
    row = jnp.arange(num_rows)
    wide = (..., *[None] * (log_decay.ndim - 1))
    after = (row[:, None] > row)[wide]
    sums = jnp.cumsum(jnp.where(after, log_decay[:, None], 0), axis=0)
    return jnp.where((row[:, None] >= row)[wide], sums, -jnp.inf)
