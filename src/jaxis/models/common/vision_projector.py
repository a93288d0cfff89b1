"""The projector of most vision towers, from joined patches to embeddings of the text."""

from __future__ import annotations

import jax

from jaxis.layers.leaves import linear
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import MakeNorm
from jaxis.models.common.vision_transformer import VisionOptions


class VisionProjector(JaxModule):
    """`linear_2(act(linear_1(x)))`: projects a tower's features of joined neighbours to embeddings of the text.

    Args:
      options: Options of the transformer.
      size: E; None means the text's `hidden_size`.
      num_states: Number of the transformer's states that are joined by feature.
      num_merged: Number of patches that become one embedding; None means the options'.
      inner_size: F, between the products; None means E.
      activation: Name of the activation; None means config.json's `projector_hidden_act`.
      use_bias: True if the products have biases.
      make_norm: Factory of a norm before the products, `layer_norm` or `rms_norm`; None for no norm.
      epsilon: Epsilon of the norm.
      norms_merged: True if the norm is over joined neighbours, False if over each patch.

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
        inner_size: int | None = None,
        activation: str | None = None,
        use_bias: bool = True,
        make_norm: MakeNorm | None = None,
        epsilon: float = 1e-5,
        norms_merged: bool = False,
    ) -> None:
        num_features = options.hidden_size * num_states
        self.merged_size = num_features * (num_merged or options.num_merged)
        self.norms_merged = norms_merged
        into, out = ("mlp", "embed"), ("embed", "mlp")
        outer: int = size or scope.config["text_config"]["hidden_size"]
        inner = inner_size or outer
        normed = self.merged_size if norms_merged else num_features
        self.pre_norm = None if make_norm is None else make_norm(scope, normed, epsilon=epsilon)
        self.linear_1 = linear(scope / "linear_1", self.merged_size, inner, axes=into, use_bias=use_bias)
        self.act = activation_function(activation or scope.config.get("projector_hidden_act", "gelu"))
        self.linear_2 = linear(scope / "linear_2", inner, outer, axes=out, use_bias=use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], joined patches next to each other -> [P / num_merged, E]."""
        x = x.reshape(-1, self.merged_size) if self.norms_merged else x
        x = x if self.pre_norm is None else self.pre_norm(x)
        return self.linear_2(self.act(self.linear_1(x.reshape(-1, self.merged_size))))
