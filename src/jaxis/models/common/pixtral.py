"""Pixtral's vision transformer (arXiv:2410.07073), which rotates patches by row and column, and its projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import (
    PatchConvolution,
    VisionProjector,
    attend_within,
    axial_rope_theta,
    one_segment,
    rotate_halves,
    run_layer,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_NORM_EPSILON = 1e-5


class PixtralAttention(JaxModule):
    """Attention among all patches of an image."""

    def __init__(self, scope: LayerScope) -> None:
        size: int = scope.config.get("hidden_size", 1024)
        self.num_heads: int = scope.config.get("num_attention_heads", 16)
        into, out = ("heads", "embed"), ("embed", "heads")
        self.q_proj = linear(scope / "q_proj", size, size, axes=into)
        self.k_proj = linear(scope / "k_proj", size, size, axes=into)
        self.v_proj = linear(scope / "v_proj", size, size, axes=into)
        self.o_proj = linear(scope / "o_proj", size, size, axes=out)

    def __call__(self, x: jax.Array, angles: jax.Array, num_patches: jax.Array) -> jax.Array:
        """x [P, C], of which the first `num_patches` are seen, and angles [P, D / 2] -> [P, C]."""
        heads = x.shape[0], self.num_heads, -1
        q, k, v = (layer(x).reshape(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate_halves(each, angles, x.dtype) for each in (q, k))
        return self.o_proj(attend_within(one_segment(x.shape[0], num_patches), q, k, v))


class PixtralLayer(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        num_features = config.get("hidden_size", 1024)
        self.attention_norm = rms_norm(scope, num_features, epsilon=_NORM_EPSILON)
        self.attention = PixtralAttention(scope / "attention")
        self.ffn_norm = rms_norm(scope, num_features, epsilon=_NORM_EPSILON)
        size, activation = config.get("intermediate_size", 4096), config.get("hidden_act", "gelu")
        self.feed_forward = GatedMLP(scope / "feed_forward", intermediate_size=size, activation=activation)

    def __call__(self, x: jax.Array, angles: jax.Array, num_patches: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), angles, num_patches)
        return x + self.feed_forward(self.ffn_norm(x))


class PixtralTransformer(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        self.layers = [PixtralLayer(scope.layer(i)) for i in range(scope.config.get("num_hidden_layers", 24))]


class PixtralTower(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("model_type", "pixtral")
        config.expect("num_channels", 3)
        config.expect("attention_dropout", 0.0)
        config.ignore("image_size", because="positions have no table; the processor limits the size")
        self.patch_size: int = config.get("patch_size", 16)
        self.hidden_size: int = config.get("hidden_size", 1024)
        self.head_dim = self.hidden_size // config.get("num_attention_heads", 16)
        config.expect("head_dim", self.head_dim)
        self.rope_theta = axial_rope_theta(config, config.get("rope_theta", 10_000.0))
        self.patch_conv = PatchConvolution(scope / "patch_conv", self.patch_size, self.hidden_size)
        self.ln_pre = rms_norm(scope, self.hidden_size, epsilon=_NORM_EPSILON)
        self.transformer = PixtralTransformer(scope / "transformer")

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C], the output of the last layer."""
        x = self.ln_pre(self.patch_conv(patches.pixels))
        angles = self._angles(patches.rows, patches.columns)
        for layer in self.transformer.layers:
            x = run_layer(layer, x, angles, patches.num_patches)
        return x

    def _angles(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """Returns [P, D / 2]: every other inverse frequency belongs to rows, the rest to columns."""
        inverse = 1.0 / self.rope_theta ** (jnp.arange(0, self.head_dim, 2, dtype=jnp.float32) / self.head_dim)
        by_rows = rows.astype(jnp.float32)[:, None] * inverse[0::2]
        return jnp.concatenate([by_rows, columns.astype(jnp.float32)[:, None] * inverse[1::2]], axis=-1)


class PatchMerger(JaxModule):
    """A product that merges neighbouring patches, `merge_size` of a side."""

    def __init__(self, scope: LayerScope, num_features: int, merge_size: int) -> None:
        self.num_merged = merge_size * merge_size
        self.merging_layer = linear(
            scope / "merging_layer", num_features * self.num_merged, num_features, axes=("embed", None)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], merged patches next to each other -> [P / merge_size ** 2, C]."""
        grouped = x.reshape(-1, self.num_merged, x.shape[-1])
        return self.merging_layer(grouped.swapaxes(1, 2).reshape(grouped.shape[0], -1))


class PixtralProjector(VisionProjector):
    """Projection of neighbours together to embeddings of the text."""

    def __init__(self, scope: LayerScope, num_features: int) -> None:
        config = scope.config
        super().__init__(scope, num_features, use_bias=config.get("multimodal_projector_bias", False))
        self.norm = rms_norm(scope, num_features, epsilon=config["text_config"].get("rms_norm_eps", 1e-6))
        self.merge_size: int = config.get("spatial_merge_size", 2)
        self.patch_merger = PatchMerger(scope / "patch_merger", num_features, self.merge_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        return super().__call__(self.patch_merger(self.norm(x)))


class PixtralVision(VisionTower):
    config_keys = (
        *("vision_config", "projector_hidden_act", "vision_feature_layer", "spatial_merge_size"),
        *("multimodal_projector_bias", "text_config.hidden_size", "text_config.rms_norm_eps"),
    )
    prefixes = ("vision_tower.", "multi_modal_projector.")

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        scope.config.expect("vision_feature_layer", -1, [-1])
        self.vision_tower = PixtralTower(vision_scope(scope / "vision_tower"))
        self.multi_modal_projector = PixtralProjector(scope / "multi_modal_projector", self.vision_tower.hidden_size)
        self.patch_size, self.merge_size = self.vision_tower.patch_size, self.multi_modal_projector.merge_size

    def __call__(self, patches: Patches) -> jax.Array:
        return self.multi_modal_projector(self.vision_tower(patches))
