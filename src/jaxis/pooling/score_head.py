"""Heads of classifiers, between an input's pooled hidden state and its logits. They are never quantized."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxis.kernels.materialize import in_whole_vectors
from jaxis.layers.leaves import linear
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import Norm
from jaxis.layers.scope import LayerScope, never_quantized


def tanh(x: jax.Array) -> jax.Array:
    """Computes tanh of x [R, N]. The bits of a row do not depend on the others."""
    return in_whole_vectors(jnp.tanh, x)


class ScoreHead(JaxModule):
    """`out_proj(norm(act(dense(x))))`

    Args:
      scope: Scope of the head.
      num_labels: Number of logits.
      activation: Activation after `dense`.
      norm: Norm after the activation; None: no norm.
      use_bias: True if `dense` has a bias; `out_proj` always has one.
    """

    def __init__(
        self,
        scope: LayerScope,
        num_labels: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = tanh,
        norm: Norm | None = None,
        use_bias: bool = True,
    ) -> None:
        scope, size = never_quantized(scope), scope.config["hidden_size"]
        self.dense = linear(scope / "dense", size, size, axes=(None, None), use_bias=use_bias)
        self.act_fn = activation
        self.norm = norm
        self.out_proj = linear(scope / "out_proj", size, num_labels, axes=(None, None), use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [R, E] -> [R, labels]."""
        x = self.act_fn(self.dense(x))
        return self.out_proj(x if self.norm is None else self.norm(x))


def linear_head(scope: LayerScope, num_labels: int) -> JaxLinear:
    """Makes a head of one matrix [labels, E]."""
    return linear(never_quantized(scope), scope.config["hidden_size"], num_labels, axes=(None, None))
