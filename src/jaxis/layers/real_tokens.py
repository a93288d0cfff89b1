"""How many of a step's tokens are real, for layers that take each token by itself and so get no metadata.

Padding computes what nobody reads. Layers whose work depends on what tokens contain, as experts', can leave it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_count: ContextVar[jax.Array | None] = ContextVar("real_tokens", default=None)


@contextmanager
def real_tokens(count: jax.Array) -> Iterator[None]:
    """Tells the layers that are called inside the block, in the same trace, how many rows are real tokens.

    Args:
      count: i32 scalar; the rows from this one on are padding.
    """
    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


def num_real_tokens() -> jax.Array | None:
    """i32 scalar: the rows from this one on are padding; None if nobody has said so."""
    return _count.get()
