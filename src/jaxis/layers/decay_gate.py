"""The decays of the states of linear attention by the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.kernels.gates import gated, softplus
from jaxis.kernels.materialize import materialize


@dataclass(frozen=True)
class DecayGate:
    """How logits f become the logarithms of decays, in float32, with the parameters `A_log` and `dt_bias`.

    `-exp(A_log) * softplus(f + dt_bias)`, or, with a lower bound, `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`.

    Attributes:
      per_channel: Whether each of the dk rows of a head's state has a decay of its own; otherwise the head has one.
      lower_bound: Below 0, the least logarithm; None for none.
    """

    per_channel: bool
    lower_bound: float | None = None

    def __call__(self, logits: jax.Array, log_rates: jax.Array, bias: jax.Array) -> jax.Array:
        """logits [T, N], log_rates [Hv], bias [N], with N = Hv, or Hv dk by channel -> float32 [T, N]."""
        logits = logits.astype(jnp.float32)
        # Otherwise XLA takes the exponentials within the product, in vectors or one by one as the number of tokens is.
        rates = jnp.repeat(materialize(jnp.exp(log_rates)), bias.size // log_rates.size)
        if self.lower_bound is None:
            return -rates * softplus(logits, bias)
        return gated(jnp.full_like(logits, self.lower_bound), rates * (logits + bias), "sigmoid")
