"""The RMS norms of queries and keys that some families apply before the rope."""

from __future__ import annotations

from typing import NamedTuple

import jax


class HeadNorms(NamedTuple):
    """RMS norms over each head.

    Attributes:
      q_weight: [D].
      k_weight: [D].
      epsilon: Added to the mean square.
    """

    q_weight: jax.Array
    k_weight: jax.Array
    epsilon: float
