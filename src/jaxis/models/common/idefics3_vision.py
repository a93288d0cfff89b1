"""Image encoder of Idefics3 and SmolVLM: SigLIP's transformer, joined neighbours, one product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.layers.leaves import linear
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import SiglipTower
from jaxis.models.common.vision_layers import vision_scope
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_DEFAULTS = {
    **{"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
    **{"image_size": 224, "patch_size": 32},
}


class Idefics3Projection(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int, size: int) -> None:
        self.proj = linear(scope / "proj", num_features, size, axes=("embed", "mlp"))


class Idefics3Connector(JaxModule):
    """Projection of joined neighbours to embeddings of the text."""

    def __init__(self, scope: LayerScope, num_features: int, size: int) -> None:
        self.modality_projection = Idefics3Projection(scope / "modality_projection", num_features, size)


class Idefics3Vision(VisionTower):
    config_keys = ("vision_config", "scale_factor", "text_config.hidden_size")
    prefixes = ("vision_model.", "connector.")

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        model_types = ("idefics3", "idefics3_vision", "smolvlm_vision")
        self.vision_model = SiglipTower(vision_scope(scope / "vision_model"), model_types, _DEFAULTS)
        self.patch_size, self.merge_size = self.vision_model.patch_size, scope.config.get("scale_factor", 2)
        num_features = self.vision_model.hidden_size * self.merge_size**2
        self.connector = Idefics3Connector(
            scope / "connector", num_features, scope.config["text_config"]["hidden_size"]
        )

    def __call__(self, patches: Patches) -> jax.Array:
        x = self.vision_model(patches)
        return self.connector.modality_projection.proj(x.reshape(x.shape[0] // self.merge_size**2, -1))
