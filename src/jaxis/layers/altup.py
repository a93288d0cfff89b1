"""Alternating updates: several hidden states of a token, of which a layer computes one (arXiv:2301.13310, Gemma 3n)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.materialize import in_whole_vectors, materialize
from jaxis.kernels.norms import row_moments
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope, never_quantized

_LEAST_MEAN_SQUARE = 1e-5


class AltUp(JaxModule):
    """Predicts a layer's effect on a token's A hidden states, and corrects it by the effect on the active state.

    The mixture of states depends on the token: `tanh` of a projection of its `active` state to A numbers. These
    projections are so small that they are never quantized.
    """

    def __init__(self, scope: LayerScope, num_states: int, active: int) -> None:
        self.num_states, self.active = num_states, active
        self.size: int = scope.config["hidden_size"]
        small = never_quantized(scope)
        ones = nnx.initializers.ones
        self.correct_output_scale = make_parameter(scope.rngs, ones, (self.size,), scope.dtype, axes=(None,))
        self.correction_coefs = linear(small / "correction_coefs", num_states, num_states, axes=(None, None))
        self.prediction_coefs = linear(small / "prediction_coefs", num_states, num_states**2, axes=(None, None))
        self.modality_router = linear(small / "modality_router", self.size, num_states, axes=(None, "embed"))
        self.router_norm = rms_norm(scope)

    def predict(self, x: jax.Array) -> jax.Array:
        """Returns the states expected after the layer, [T, A, E], from x [T, A, E]."""
        factors = self.prediction_coefs(self._modalities(x[:, self.active])).astype(jnp.float32)
        factors = factors.reshape(-1, self.num_states, self.num_states)
        states = x.astype(jnp.float32)
        predictions = states
        # One state after the other, so that the order of the sum does not depend on the number of tokens.
        for i in range(self.num_states):
            predictions = predictions + materialize(factors[:, :, i, None] * states[:, i, None])
        return predictions.astype(x.dtype)

    def correct(self, predictions: jax.Array, computed: jax.Array) -> jax.Array:
        """Returns the corrected states [T, A, E] from predictions [T, A, E] and the computed active state [T, E]."""
        factors = self.correction_coefs(self._modalities(computed)).astype(jnp.float32) + 1
        wide = predictions.astype(jnp.float32)
        innovation = computed.astype(jnp.float32) - wide[:, self.active]
        return (wide + materialize(factors[..., None] * innovation[:, None])).astype(predictions.dtype)

    def _modalities(self, x: jax.Array) -> jax.Array:
        """Returns [T, A], from -1 to 1, for x [T, E]."""
        routed = self.modality_router(scaled(self.router_norm(x), 1 / self.size))
        return materialize(in_whole_vectors(jnp.tanh, routed.astype(jnp.float32)).astype(x.dtype))


def split_states(x: jax.Array, projections: Sequence[JaxLinear]) -> jax.Array:
    """Returns x [T, E] and its A - 1 projections, which get x's length: [T, A, E]."""
    return jnp.stack([x, *(_with_length_of(x, projection(x)) for projection in projections)], axis=1)


def join_states(x: jax.Array, projections: Sequence[JaxLinear]) -> jax.Array:
    """Returns the mean [T, E] of the first state and the projections of the others, which get its length."""
    first = x[:, 0]
    total = first.astype(jnp.float32)
    for i, projection in enumerate(projections, start=1):
        total = total + _with_length_of(first, projection(x[:, i])).astype(jnp.float32)
    return scaled(total, 1 / x.shape[1]).astype(x.dtype)


def _with_length_of(target: jax.Array, x: jax.Array) -> jax.Array:
    # Rounded, so that no program multiplies by the reciprocal of a root where another divides by the root.
    wanted = materialize(jnp.sqrt(_mean_square(target)))
    length = materialize(jnp.sqrt(jnp.maximum(_mean_square(x), _LEAST_MEAN_SQUARE)))
    return materialize((x.astype(jnp.float32) * wanted / length).astype(x.dtype))


def _mean_square(x: jax.Array) -> jax.Array:
    mean, variance = row_moments(x)
    return materialize(mean * mean) + variance
