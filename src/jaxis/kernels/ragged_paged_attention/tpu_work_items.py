"""Lists of the work items of a TPU kernel, made from a step's flat batch on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WorkItems(NamedTuple):
    """Work items of all requests, in the order of requests.

    Attributes:
      count: i32 [], the number of items.
      request: i32 [max_items], the request of each item; past the last item, a valid index.
      nth: i32 [max_items], the index of each item within its request.
    """

    count: jax.Array
    request: jax.Array
    nth: jax.Array


def work_items(counts: jax.Array, max_items: int) -> WorkItems:
    """Returns `counts[r]` items for each request r, at most `max_items` together."""
    ends = jnp.cumsum(counts)
    index = jnp.arange(max_items, dtype=jnp.int32)
    # Compared with all: XLA merges this for all layers of a step, which it does not do with searchsorted's loop.
    request = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, counts.shape[0] - 1)
    return WorkItems(ends[-1].astype(jnp.int32), request, index - (ends - counts)[request])
