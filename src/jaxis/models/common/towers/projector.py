"""The projector of most vision towers, from joined patches to embeddings of the text."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.layers.leaves import linear
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import MakeNorm, merged
from jaxis.models.common.towers.options import VisionOptions, of_model, resolved

JOINED = 0
"""Inner size: as many features as the joined patches have."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Declaration of a `VisionProjector`, and its factory.

    Attributes:
      size: E; None means the text's `hidden_size`.
      num_merged: Number of patches that become one embedding; None means the options'.
      joins_states: True if all states that the transformer hands on are joined by feature.
      inner_sizes: F between the products, of each but the last; `JOINED`, or None for E.
      activation: Name of the activation.
      is_gated: True if the first product computes x and then a gate, where `act(gate) * x` is the input of the second.
      use_bias: True if the products have biases.
      make_norm: Factory of a norm before the products, `layer_norm` or `rms_norm`; None for no norm.
      epsilon: Epsilon of the norm.
      norms_merged: True if the norm is over joined neighbours, False if over each patch.
      by_feature: True if joined neighbours are sorted by feature, False if by patch.
    """

    size: int | None = None
    num_merged: int | None = None
    joins_states: bool = False
    inner_sizes: tuple[int | None, ...] = (None,)
    activation: str = of_model("projector_hidden_act", "gelu")
    is_gated: bool = False
    use_bias: bool = True
    make_norm: MakeNorm | None = None
    epsilon: float = 1e-5
    norms_merged: bool = False
    by_feature: bool = False

    def __call__(self, scope: LayerScope, options: VisionOptions) -> VisionProjector:
        return VisionProjector(scope, options, self)


class VisionProjector(JaxModule):
    """Projection of a tower's features of joined neighbours to embeddings of the text: `linear_2(act(linear_1(x)))`.

    There are as many products as inner sizes, and one more. Raises ConfigError if the activation is unknown.
    """

    def __init__(self, scope: LayerScope, options: VisionOptions, projection: Projection) -> None:
        self.projection = projection = resolved(projection, scope.config)
        self.num_merged = projection.num_merged or options.num_merged
        num_features = options.hidden_size * (len(options.outputs) or 1 if projection.joins_states else 1)
        joined = num_features * self.num_merged
        size: int = projection.size or scope.config.get_text_config()["hidden_size"]
        inner = [joined if each == JOINED else each or size for each in projection.inner_sizes]
        make, normed = projection.make_norm, joined if projection.norms_merged else num_features
        self.pre_norm = None if make is None else make(scope, normed, epsilon=projection.epsilon)
        self.act = activation_function(projection.activation)
        inputs = [joined, *(each // 2 if projection.is_gated else each for each in inner)]
        for i, sizes in enumerate(zip(inputs, [*inner, size], strict=True), 1):
            axes = ("mlp", "embed") if i == 1 <= len(inner) else ("embed", "mlp")
            setattr(self, f"linear_{i}", linear(scope / f"linear_{i}", *sizes, axes=axes, use_bias=projection.use_bias))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], joined patches next to each other -> [P / num_merged, E]."""
        projection = self.projection
        x = x if projection.norms_merged or self.pre_norm is None else self.pre_norm(x)
        x = merged(x, self.num_merged, by_feature=projection.by_feature)
        x = self.pre_norm(x) if projection.norms_merged and self.pre_norm is not None else x
        for i in range(1, len(projection.inner_sizes) + 2):
            x = getattr(self, f"linear_{i}")(x if i == 1 else self._activated(x))
        return x

    def _activated(self, x: jax.Array) -> jax.Array:
        if not self.projection.is_gated:
            return self.act(x)
        x, gate = jnp.split(x, 2, axis=-1)
        return self.act(gate) * x
