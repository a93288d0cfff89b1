"""From hidden states to a vector for each text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.materialize import materialize
from jaxis.kernels.norms import rms_norm
from jaxis.pooling.pooling_config import Mode


def pool(hidden: jax.Array, starts: jax.Array, lengths: jax.Array, mode: Mode) -> jax.Array:
    """The pooled hidden state of each text, which does not depend on the texts beside it.

    Args:
      hidden: [T, E], texts one after the other, then padding.
      starts: i32 [R], the first row of each text.
      lengths: i32 [R], the rows of each; 0 is no text.
      mode: Which rows count.

    Returns:
      float32 [R, E]; meaningless where there is no text.
    """
    num_texts = lengths.shape[0]
    if mode == "mean":
        rows = jnp.arange(hidden.shape[0])
        text = jnp.searchsorted(starts + lengths, rows, side="right")
        # Row after row, so that the sum's order is the text's own.
        sums = (
            jnp.zeros((num_texts, hidden.shape[1]), jnp.float32)
            .at[text]
            .add(hidden.astype(jnp.float32), mode="drop", indices_are_sorted=True)
        )
        vectors = materialize(sums) / jnp.maximum(lengths, 1)[:, None]
    else:
        rows = starts if mode == "cls" else starts + lengths - 1
        vectors = hidden[rows].astype(jnp.float32)
    return vectors


def lengths_up_to_others(input_ids: jax.Array, starts: jax.Array, lengths: jax.Array, token_id: int) -> jax.Array:
    """i32 [R]: how many tokens each text has up to its last one with another id; 1, if there is none.

    Args:
      input_ids: i32 [T].
      starts: See `pool`.
      lengths: See `pool`.
      token_id: The id that does not count at the end.
    """
    rows = jnp.arange(input_ids.shape[0])
    text = jnp.searchsorted(starts + lengths, rows, side="right")
    stops = jnp.where(input_ids != token_id, rows - starts[text] + 1, 1)
    return jnp.ones_like(lengths).at[text].max(stops.astype(lengths.dtype), mode="drop")


def normalized(vectors: jax.Array) -> jax.Array:
    """float32 [R, N] -> the same vectors with a length of 1."""
    # A vector divided by its length is its RMS norm, times size ** -0.5.
    size = vectors.shape[1]
    return rms_norm(vectors, jnp.full(size, size**-0.5, jnp.float32), epsilon=1e-24)
