"""Activation xIELU (arXiv:2411.13010) with learnt slopes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.materialize import in_whole_vectors, materialize
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope


class XIELU(JaxModule):
    """`p x^2 + beta x` for x above 0, and `n (expm1(min(x, eps)) - x) + beta x` otherwise, in float32.

    p is `softplus(alpha_p)` and n is `beta + softplus(alpha_n)`. Checkpoints have all four numbers: `alpha_p` and
    `alpha_n` [1], `beta` and `eps` []. The last two are constants, which training leaves as they are.
    """

    def __init__(self, scope: LayerScope) -> None:
        def number(value: float, shape: tuple[int, ...]) -> nnx.Param:
            init = nnx.initializers.constant(value)
            return make_parameter(scope.rngs, init, shape, scope.dtype, axes=(None,) * len(shape))

        self.alpha_p = number(0.2, (1,))
        self.alpha_n = number(-1.05, (1,))
        self.beta = number(0.5, ())
        self.eps = number(-1e-6, ())

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        alpha_p, alpha_n, beta, eps = (
            each[...].astype(jnp.float32) for each in (self.alpha_p, self.alpha_n, self.beta, self.eps)
        )
        beta, eps = jax.lax.stop_gradient((beta, eps))
        # Rounded between steps, so that no product is fused with a sum in one program and not in another.
        p, n = (in_whole_vectors(jax.nn.softplus, alpha) for alpha in (alpha_p, alpha_n))
        n = materialize(beta + n)
        positive = p * wide * wide
        negative = n * (in_whole_vectors(jnp.expm1, jnp.minimum(wide, eps)) - wide)
        return (materialize(jnp.where(wide > 0, positive, negative)) + materialize(beta * wide)).astype(x.dtype)
