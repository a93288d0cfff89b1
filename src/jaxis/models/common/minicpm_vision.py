"""Image encoder of MiniCPM-V 4.6: SigLIP's transformer, which merges neighbours midway, and a projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import SiglipAttention, SiglipEmbeddings, SiglipTower
from jaxis.models.common.vision_layers import VisionProjector, run_layer, vision_scope
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_DEFAULTS = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 16},
}
_MERGED = 4  # patches that each of the two mergers joins


class MiniCPMVEmbeddings(SiglipEmbeddings):
    """Embeddings of patches plus embeddings of the nearest position above and to the left in a table."""

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        # Padding is in the first row and column.
        rows, columns = (places * self.side // (jnp.max(places) + 1) for places in (patches.rows, patches.columns))
        return self.patch_embedding(patches.pixels) + self.position_embedding(rows * self.side + columns)


class MiniCPMVMerger(VisionProjector):
    """Merges neighbours: attention among them, then their average plus a projection of them."""

    def __init__(self, scope: LayerScope, num_features: int, inner_size: int, num_heads: int, epsilon: float) -> None:
        super().__init__(
            scope,
            num_features,
            num_features,
            num_merged=_MERGED,
            inner_size=inner_size,
            activation="gelu_pytorch_tanh",
            make_norm=layer_norm,
            epsilon=epsilon,
            norms_merged=True,
        )
        self.layer_norm1 = layer_norm(scope, num_features, epsilon=epsilon)
        self.self_attn = SiglipAttention(scope / "self_attn", num_features, num_heads)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], neighbours next to each other -> [P / 4, C]."""
        x = x + self.self_attn.within_groups(self.layer_norm1(x), _MERGED)
        average = jnp.mean(x.reshape(-1, _MERGED, x.shape[-1]).astype(jnp.float32), axis=1)
        return super().__call__(x) + average.astype(x.dtype)


class MiniCPMVTower(SiglipTower):
    """The vision transformer, which merges neighbours after the layer `merges_after`, if any."""

    def __init__(self, scope: LayerScope, merges_after: int | None) -> None:
        config = scope.config
        super().__init__(scope, ("minicpmv4_6_vision",), _DEFAULTS, make_embeddings=MiniCPMVEmbeddings)
        config.expect("window_kernel_size", [2, 2])
        config.ignore("insert_layer_id", because="the checkpoint's own is read")
        self.merges_after = merges_after
        self.vit_merger = MiniCPMVMerger(
            scope / "vit_merger",
            self.hidden_size,
            _MERGED * config.get("intermediate_size", _DEFAULTS["intermediate_size"]),
            config.get("num_attention_heads", _DEFAULTS["num_attention_heads"]),
            config.get("layer_norm_eps", 1e-6),
        )

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P / 4, C] with merging, else [P, C]."""
        x, count = self.embeddings(patches), patches.num_patches
        if self.merges_after is not None:
            # Of the sixteen patches that become one, the four that the first merger joins lie next to each other.
            x = x.reshape(-1, 2, 2, 2, 2, self.hidden_size).swapaxes(2, 3).reshape(x.shape)
        for i, layer in enumerate(self.encoder.layers):
            x = run_layer(layer, x, count)
            if i == self.merges_after:
                x, count = self.vit_merger(x), count // _MERGED
        return x if self.post_layernorm is None else self.post_layernorm(x)


class MiniCPMVision(VisionTower):
    config_keys = (
        *("vision_config", "insert_layer_id", "image_size", "drop_vision_last_layer", "downsample_mode"),
        *("merge_kernel_size", "merger_times", "patch_size", "text_config.hidden_size"),
    )
    prefixes = ("vision_tower.", "merger.")
    unused = ("vision_tower.embeddings.position_ids",)
    names = CheckpointNames((("merger.mlp.0", "merger"),))

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        config = scope.config
        config.expect("drop_vision_last_layer", False)
        config.expect("merge_kernel_size", [2, 2])
        config.expect("merger_times", 1)
        config.ignore("image_size", because="the processor's own is read")
        config.ignore("patch_size", because="the tower's own is read")
        config.expect("downsample_mode", "16x", "4x")
        merges_twice = config.get("downsample_mode", "16x") == "16x"
        after = config.get("insert_layer_id", 6)
        self.vision_tower = MiniCPMVTower(vision_scope(scope / "vision_tower"), after if merges_twice else None)
        self.patch_size, self.merge_size = self.vision_tower.patch_size, 4 if merges_twice else 2
        num_features = self.vision_tower.hidden_size
        self.merger = VisionProjector(
            scope / "merger",
            num_features,
            num_merged=_MERGED,
            inner_size=num_features * _MERGED,
            activation="gelu",
            make_norm=layer_norm,
            epsilon=1e-6,
            norms_merged=True,
        )

    def __call__(self, patches: Patches) -> jax.Array:
        return self.merger(self.vision_tower(patches))
