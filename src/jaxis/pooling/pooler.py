"""Pooling of hidden states into a vector for each text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.materialize import materialize
from jaxis.kernels.norms import rms_norm
from jaxis.pooling.pooling_config import Mode


def pool(hidden: jax.Array, starts: jax.Array, lengths: jax.Array, mode: Mode) -> jax.Array:
    """Pools the hidden states of each text. No result depends on other texts.

    Args:
      hidden: [T, E], texts one after the other, then padding.
      starts: i32 [R], first row of each text.
      lengths: i32 [R], number of rows of each text; 0 where there is no text.
      mode: Selection of rows.

    Returns:
      float32 [R, E]; meaningless where there is no text.
    """
    num_texts = lengths.shape[0]
    if mode == "mean":
        rows = jnp.arange(hidden.shape[0])
        text = jnp.searchsorted(starts + lengths, rows, side="right")
        # Row after row, so that the order of the sum is that of the text alone.
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
    """i32 [R]: number of each text's tokens up to its last one with another id; 1 if there is none.

    Args:
      input_ids: i32 [T].
      starts: i32 [R], first row of each text.
      lengths: i32 [R], number of rows of each text.
      token_id: Token id that is ignored at the end.
    """
    rows = jnp.arange(input_ids.shape[0])
    text = jnp.searchsorted(starts + lengths, rows, side="right")
    stops = jnp.where(input_ids != token_id, rows - starts[text] + 1, 1)
    return jnp.ones_like(lengths).at[text].max(stops.astype(lengths.dtype), mode="drop")


def normalized(vectors: jax.Array) -> jax.Array:
    """Normalizes float32 vectors [R, N] to length 1."""
    # A vector divided by its length is its RMS norm, times size ** -0.5.
    size = vectors.shape[1]
    return rms_norm(vectors, jnp.full(size, size**-0.5, jnp.float32), epsilon=1e-24)
