"""Image encoder of Aya Vision and Command A Vision: SigLIP, joined neighbours, a gated projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import SiglipTower
from jaxis.models.common.vision_layers import vision_scope
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_DEFAULTS = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"image_size": 364, "patch_size": 14},
}


class CohereProjector(JaxModule):
    """`linear_2(silu(gate) * x)`, where `linear_1` computes x and then the gate of joined neighbours.

    `size` counts the features of x and the gate together; without `norm_epsilon`, there is no norm before the products.
    """

    def __init__(self, scope: LayerScope, num_features: int, size: int, norm_epsilon: float | None) -> None:
        hidden_size = scope.config["text_config"]["hidden_size"]
        self.layernorm = None if norm_epsilon is None else layer_norm(scope, num_features, epsilon=norm_epsilon)
        self.linear_1 = linear(scope / "linear_1", num_features, size, axes=("mlp", "embed"), use_bias=True)
        self.linear_2 = linear(scope / "linear_2", size // 2, hidden_size, axes=("embed", "mlp"), use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, features] -> [P, E]."""
        x = x if self.layernorm is None else self.layernorm(x)
        x, gate = jnp.split(self.linear_1(x), 2, axis=-1)
        return self.linear_2(nnx.silu(gate) * x)


class Cohere2Vision(VisionTower):
    config_keys = (
        *("vision_config", "downsample_factor", "alignment_intermediate_size", "text_config.hidden_size"),
        *("vision_feature_layer", "vision_feature_select_strategy", "adapter_layer_norm_eps"),
    )
    prefixes = ("vision_tower.", "multi_modal_projector.")
    unused = ("vision_tower.head.", "vision_tower.embeddings.position_ids")
    names = CheckpointNames((("vision_tower.vision_model", "vision_tower"),))
    # True if the norm comes before the projector instead of after the tower's layers.
    norms_late = False

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        config = scope.config
        config.expect("vision_feature_layer", -1)
        config.expect("vision_feature_select_strategy", "full")
        tower = vision_scope(scope / "vision_tower")
        kinds = ("siglip_vision_model",)
        self.vision_tower = SiglipTower(tower, kinds, _DEFAULTS, is_normed=not self.norms_late)
        self.patch_size, self.merge_size = self.vision_tower.patch_size, config.get("downsample_factor", 2)
        default = config["text_config"]["hidden_size"] if self.norms_late else 36864
        size = config.get("alignment_intermediate_size", default)
        epsilon = config.get("adapter_layer_norm_eps", 1e-6) if self.norms_late else None
        num_features = self.vision_tower.hidden_size * self.merge_size**2
        self.multi_modal_projector = CohereProjector(scope / "multi_modal_projector", num_features, size, epsilon)

    def __call__(self, patches: Patches) -> jax.Array:
        x = self.vision_tower(patches)
        return self.multi_modal_projector(x.reshape(x.shape[0] // self.merge_size**2, -1))


class AyaVision(Cohere2Vision):
    unused = (*Cohere2Vision.unused, "vision_tower.post_layernorm.")
    norms_late = True
