"""Image encoder of LFM2-VL: SigLIP 2's transformer (arXiv:2502.14786), joined neighbours, a projector."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import SiglipEncoder
from jaxis.models.common.vision_layers import PositionTable, VisionProjector, one_side, vision_scope
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_DEFAULTS = {"intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


class Siglip2Embeddings(JaxModule):
    """Embeddings of patches plus embeddings of positions from a table that is resized to the image."""

    def __init__(self, scope: LayerScope, patch_size: int, num_features: int) -> None:
        num_places: int = scope.config.get("num_patches", 256)
        self.side = math.isqrt(num_places)
        self.patch_embedding = linear(
            scope / "patch_embedding", 3 * patch_size**2, num_features, axes=(None, None), use_bias=True
        )
        self.position_embedding = PositionTable(scope / "position_embedding", num_places, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        x = self.patch_embedding(patches.pixels)
        by_row, by_column = self._weights(patches.rows), self._weights(patches.columns)
        weights = (by_row[:, :, None] * by_column[:, None]).reshape(x.shape[0], -1)
        table = self.position_embedding.weight[...]
        return x + (weights @ table.astype(jnp.float32)).astype(x.dtype)

    def _weights(self, places: jax.Array) -> jax.Array:
        """Returns [P, side]: weights of the table's rows or columns for each patch, of an antialiased linear filter."""
        scale = self.side / (jnp.max(places) + 1).astype(jnp.float32)
        center = (places.astype(jnp.float32) + 0.5) * scale - 0.5
        distance = jnp.abs(jnp.arange(self.side, dtype=jnp.float32) - center[:, None])
        weights = jnp.maximum(1 - distance / jnp.maximum(scale, 1), 0)
        return weights / jnp.sum(weights, axis=-1, keepdims=True)


class Siglip2Tower(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("model_type", "siglip2_vision_model")
        config.expect("num_channels", 3)
        config.expect("attention_dropout", 0.0)
        config.ignore("vision_use_head", because="only the patches are read, not what the head makes of them")
        self.patch_size = one_side(config.get("patch_size", 16), config.source)
        self.hidden_size: int = config.get("hidden_size", 768)
        self.embeddings = Siglip2Embeddings(scope / "embeddings", self.patch_size, self.hidden_size)
        self.encoder = SiglipEncoder(scope / "encoder", self.hidden_size, _DEFAULTS)
        self.post_layernorm = layer_norm(scope, self.hidden_size, epsilon=config.get("layer_norm_eps", 1e-6))

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        return self.post_layernorm(self.encoder(self.embeddings(patches), patches.num_patches)[-1])


class Lfm2Vision(VisionTower):
    config_keys = (
        *("vision_config", "projector_hidden_act", "projector_hidden_size", "projector_bias"),
        *("projector_use_layernorm", "downsample_factor", "text_config.hidden_size"),
    )
    prefixes = ("vision_tower.", "multi_modal_projector.")
    unused = ("vision_tower.head.",)
    names = CheckpointNames((("vision_tower.vision_model", "vision_tower"), ("layer_norm", "pre_norm")))

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        self.vision_tower = Siglip2Tower(vision_scope(scope / "vision_tower"))
        config = scope.config
        self.patch_size, self.merge_size = self.vision_tower.patch_size, config.get("downsample_factor", 2)
        self.multi_modal_projector = VisionProjector(
            scope / "multi_modal_projector",
            self.vision_tower.hidden_size,
            num_merged=self.merge_size**2,
            inner_size=config.get("projector_hidden_size", 2560),
            use_bias=config.get("projector_bias", True),
            make_norm=layer_norm if config.get("projector_use_layernorm", True) else None,
            norms_merged=True,
        )

    def __call__(self, patches: Patches) -> jax.Array:
        return self.multi_modal_projector(self.vision_tower(patches))
