"""Code shared by Cohere's models: layer norms without bias, a head that is tied to the embeddings, scaled logits."""

from __future__ import annotations

from jaxis.layers.leaves import layer_norm
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions


def cohere_norm(scope: LayerScope, shape: int | tuple[int, ...] | None = None) -> JaxLayerNorm:
    """A layer norm without bias, with a weight of this shape; None means config.json's `hidden_size`."""
    return layer_norm(scope, shape, epsilon=scope.config.get("layer_norm_eps", 1e-5), use_bias=False)


class CohereCausalLM(CausalLM):
    """Base of Cohere's models; each sets its layer class."""

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            tied_by_default=True, norm=cohere_norm(scope), logits_multiplier=scope.config.get("logit_scale", 0.0625)
        )
