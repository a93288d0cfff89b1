"""Image encoders of Aya Vision and Command A Vision: SigLIP, joined neighbours, a gated projector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.layers.leaves import layer_norm, linear
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import PROJECTOR, SO400M, siglip_names, siglip_options
from jaxis.models.common.vision_layers import merged
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions


class CohereProjector(JaxModule):
    """`linear_2(silu(gate) * x)`, where `linear_1` computes x and then the gate of joined neighbours.

    Neighbours have a norm before the products if patches have none after the transformer.
    """

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        config, num_features, self.num_merged = scope.config, options.merged_size, options.num_merged
        hidden_size = config["text_config"]["hidden_size"]
        self.layernorm, size = None, 36864
        if "post_norm" not in options.norms:
            size = hidden_size
            self.layernorm = layer_norm(scope, num_features, epsilon=config.get("adapter_layer_norm_eps", 1e-6))
        size = config.get("alignment_intermediate_size", size)  # of x and the gate together
        self.linear_1 = linear(scope / "linear_1", num_features, size, axes=("mlp", "embed"), use_bias=True)
        self.linear_2 = linear(scope / "linear_2", size // 2, hidden_size, axes=("embed", "mlp"), use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        x = merged(x, self.num_merged)
        x = x if self.layernorm is None else self.layernorm(x)
        x, gate = jnp.split(self.linear_1(x), 2, axis=-1)
        return self.linear_2(nnx.silu(gate) * x)


class Cohere2Vision(TransformerTower):
    unused = ("tower.head.", "tower.embeddings.position_ids")
    names = siglip_names("vision_tower", PROJECTOR)
    norms: tuple[str, ...] = ("post_norm",)
    make_projector = CohereProjector

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        config.expect("vision_feature_layer", -1)
        config.expect("vision_feature_select_strategy", "full")
        changes = {"merge_size": config.get("downsample_factor", 2), "norms": cls.norms}
        return siglip_options(config["vision_config"], SO400M, image_size=364, **changes)


class AyaVision(Cohere2Vision):
    unused = (*Cohere2Vision.unused, "tower.post_norm.")
    norms = ()
