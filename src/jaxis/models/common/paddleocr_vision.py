"""Image encoder of PaddleOCR-VL: SigLIP over an image of any aspect ratio, joined neighbours, a projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen_vision import QwenVision
from jaxis.models.common.siglip import SiglipEmbeddings, SiglipTower
from jaxis.models.common.vision_layers import (
    VisionProjector,
    axial_angles,
    axial_rope_theta,
    stretched_positions,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_DEFAULTS = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"image_size": 384, "patch_size": 14},
}


class PaddleOcrEmbeddings(SiglipEmbeddings):
    """Embeddings of patches plus embeddings of positions from a table that is interpolated over the image."""

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        x = self.patch_embedding(patches.pixels)
        table = self.position_embedding.weight[...].reshape(self.side, self.side, -1)
        return x + stretched_positions(table, patches).astype(x.dtype)


class PaddleOcrTower(SiglipTower):
    """The vision transformer, which also rotates patches by row and column."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(scope, ("paddleocr_vl_vision", "paddleocr_vl"), _DEFAULTS, make_embeddings=PaddleOcrEmbeddings)
        for key in ("temporal_patch_size", "tokens_per_second"):
            config.ignore(key, because="an image is one frame")
        self.head_dim = self.hidden_size // config.get("num_attention_heads", _DEFAULTS["num_attention_heads"])
        self.rope_theta = axial_rope_theta(config, 10_000.0)

    def states(self, patches: Patches, num_layers: int | None = None) -> list[jax.Array]:
        angles = axial_angles(patches, self.head_dim, self.rope_theta)
        return self.encoder(self.embeddings(patches), patches.num_patches, num_layers, angles)


class PaddleOcrVision(QwenVision):
    config_keys = (*QwenVision.config_keys, "hidden_size", "text_config.hidden_size")
    prefixes = ("visual.", "projector.")
    unused = ("visual.head.", "visual.embeddings.packing_position_embedding.", "visual.embeddings.position_ids")
    names = CheckpointNames((("visual.vision_model", "visual"), ("mlp_AR", "projector")))

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        config = scope.config
        self._check_rope(config)
        self.visual = PaddleOcrTower(vision_scope(scope / "visual"))
        self.patch_size = self.visual.patch_size
        self.merge_size = config["vision_config"].get("spatial_merge_size", 2)
        num_features, num_merged = self.visual.hidden_size, self.merge_size**2
        # The text's keys may have no object of their own.
        own_size = config.get("hidden_size", None)
        self.projector = VisionProjector(
            scope / "projector",
            num_features,
            config.get_text_config().get("hidden_size", own_size),
            num_merged=num_merged,
            inner_size=num_features * num_merged,
            activation="gelu",
            make_norm=layer_norm,
        )

    def __call__(self, patches: Patches) -> jax.Array:
        return self.projector(self.visual(patches))
