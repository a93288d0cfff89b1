from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.kernels.gates import gated, softplus
from jaxis.kernels.materialize import materialize


@dataclass(frozen=True)
class DecayGate:
    """Map from logits f to logarithms of decays, in float32, with the parameters `A_log` and `dt_bias`.

    `-exp(A_log) * softplus(f + dt_bias)`, or, with a lower bound below 0,
    `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`. If `per_channel`, each of the dk rows of a head's state has a
    decay of its own; else each head has one.
    """

    per_channel: bool
    lower_bound: float | None = None

    def __call__(self, logits: jax.Array, log_rates: jax.Array, bias: jax.Array) -> jax.Array:
        """Returns float32 [T, N] for logits [T, N], log_rates [Hv], bias [N], where N is Hv, or Hv dk per channel."""
        logits = logits.astype(jnp.float32)
        # Otherwise XLA computes the exponentials within the product, in vectors or one by one, by the number of tokens.
        rates = jnp.repeat(materialize(jnp.exp(log_rates)), bias.size // log_rates.size)
        if self.lower_bound is None:
            return -rates * softplus(logits, bias)
        return gated(jnp.full_like(logits, self.lower_bound), rates * (logits + bias), "sigmoid")
