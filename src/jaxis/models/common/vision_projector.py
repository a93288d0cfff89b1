"""The projector of most vision towers, from joined patches to embeddings of the text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax

from jaxis.layers.leaves import linear
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import MakeNorm, merged
from jaxis.models.common.vision_transformer import VisionOptions


class VisionProjector(JaxModule):
    """Projection of a tower's features of joined neighbours to embeddings of the text: `linear_2(act(linear_1(x)))`.

    There are as many products as `inner_sizes`, and one more.

    Args:
      options: Options of the transformer.
      size: E; None means the text's `hidden_size`.
      num_states: Number of the transformer's states that are joined by feature.
      num_merged: Number of patches that become one embedding; None means the options'.
      inner_sizes: F between the products, of each but the last; None means E, once.
      activation: Name of the activation; None means config.json's `projector_hidden_act`.
      use_bias: True if the products have biases.
      make_norm: Factory of a norm before the products, `layer_norm` or `rms_norm`; None for no norm.
      epsilon: Epsilon of the norm.
      norms_merged: True if the norm is over joined neighbours, False if over each patch.
      by_feature: True if joined neighbours are sorted by feature, False if by patch.

    Raises:
      ConfigError: The activation is unknown.
    """

    def __init__(
        self,
        scope: LayerScope,
        options: VisionOptions,
        size: int | None = None,
        *,
        num_states: int = 1,
        num_merged: int | None = None,
        inner_sizes: Sequence[int] | None = None,
        activation: str | None = None,
        use_bias: bool = True,
        make_norm: MakeNorm | None = None,
        epsilon: float = 1e-5,
        norms_merged: bool = False,
        by_feature: bool = False,
    ) -> None:
        self.num_merged = num_merged or options.num_merged
        self.norms_merged, self.by_feature = norms_merged, by_feature
        num_features = options.hidden_size * num_states
        merged_size = num_features * self.num_merged
        outer: int = size or scope.config["text_config"]["hidden_size"]
        sizes = [merged_size, *((outer,) if inner_sizes is None else inner_sizes), outer]
        normed = merged_size if norms_merged else num_features
        self.pre_norm = None if make_norm is None else make_norm(scope, normed, epsilon=epsilon)
        self.act = activation_function(activation or scope.config.get("projector_hidden_act", "gelu"))
        self.num_products = len(sizes) - 1
        for i, (size_in, size_out) in enumerate(itertools.pairwise(sizes), 1):
            axes = ("mlp", "embed") if i == 1 < self.num_products else ("embed", "mlp")
            setattr(self, f"linear_{i}", linear(scope / f"linear_{i}", size_in, size_out, axes=axes, use_bias=use_bias))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], joined patches next to each other -> [P / num_merged, E]."""
        x = x if self.norms_merged or self.pre_norm is None else self.pre_norm(x)
        x = merged(x, self.num_merged, by_feature=self.by_feature)
        x = self.pre_norm(x) if self.norms_merged and self.pre_norm is not None else x
        for i in range(1, self.num_products + 1):
            x = getattr(self, f"linear_{i}")(x if i == 1 else self.act(x))
        return x
