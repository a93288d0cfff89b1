"""Layer norms of families whose config.json has `layer_norm_eps`."""

from __future__ import annotations

from jaxis.layers.leaves import layer_norm
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.scope import LayerScope


def biased_layer_norm(scope: LayerScope) -> JaxLayerNorm:
    """A layer norm with a bias over config.json's `hidden_size`, with its `layer_norm_eps`."""
    return layer_norm(scope, epsilon=scope.config.get("layer_norm_eps", 1e-5))


def unbiased_layer_norm(scope: LayerScope, shape: int | tuple[int, ...] | None = None) -> JaxLayerNorm:
    """A layer norm without bias over features of this shape; None means config.json's `hidden_size`."""
    return layer_norm(scope, shape, epsilon=scope.config.get("layer_norm_eps", 1e-5), use_bias=False)
