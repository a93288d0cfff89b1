"""Image encoder of Gemma 3 (arXiv:2503.19786): SigLIP's transformer, averages of squares, one product."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.weights import matmul
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import SiglipTower
from jaxis.models.common.vision_layers import parameter, vision_scope
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_DEFAULTS = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 16},
}


class Gemma3Projector(JaxModule):
    """Projection of averages to embeddings of the text."""

    def __init__(self, scope: LayerScope, num_features: int) -> None:
        config = scope.config
        size = config["text_config"]["hidden_size"]
        self.mm_input_projection_weight = parameter(scope, num_features, size)
        epsilon = config["vision_config"].get("layer_norm_eps", 1e-6)
        self.mm_soft_emb_norm = rms_norm(scope, num_features, epsilon=epsilon, add_unit_offset=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, C] -> [N, E]."""
        return matmul(self.mm_soft_emb_norm(x), self.mm_input_projection_weight[...].T)


class Gemma3Vision(VisionTower):
    config_keys = ("vision_config", "mm_tokens_per_image", "text_config.hidden_size")
    prefixes = ("vision_tower.", "multi_modal_projector.")
    unused = ("vision_tower.head.",)
    names = CheckpointNames((("vision_tower.vision_model", "vision_tower"),))

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        model_types = ("siglip_vision_model",)
        self.vision_tower = SiglipTower(vision_scope(scope / "vision_tower"), model_types, _DEFAULTS)
        self.patch_size = self.vision_tower.patch_size
        self.merge_size = self.vision_tower.side // math.isqrt(scope.config.get("mm_tokens_per_image", 256))
        self.multi_modal_projector = Gemma3Projector(scope / "multi_modal_projector", self.vision_tower.hidden_size)

    def __call__(self, patches: Patches) -> jax.Array:
        x = self.vision_tower(patches)
        squares = x.reshape(-1, self.merge_size**2, x.shape[-1]).astype(jnp.float32)
        return self.multi_modal_projector(jnp.mean(squares, axis=1).astype(x.dtype))
