"""Image encoder of InternVL (arXiv:2504.10479): InternViT, joined neighbours, a projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import (
    PatchConvolution,
    VisionMLP,
    VisionProjector,
    add_class_token,
    attend_within,
    one_side,
    parameter,
    run_layer,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig


class InternViTAttention(JaxModule):
    """Attention among all patches and the class token."""

    def __init__(self, scope: LayerScope, num_features: int) -> None:
        config = scope.config
        self.num_heads: int = config.get("num_attention_heads", 16)
        sizes, use_bias = (num_features, num_features), config.get("attention_bias", False)
        self.q_proj = linear(scope / "q_proj", *sizes, axes=("heads", "embed"), use_bias=use_bias)
        self.k_proj = linear(scope / "k_proj", *sizes, axes=("heads", "embed"), use_bias=use_bias)
        self.v_proj = linear(scope / "v_proj", *sizes, axes=("heads", "embed"), use_bias=use_bias)
        self.projection_layer = linear(scope / "projection_layer", *sizes, axes=("embed", "heads"), use_bias=True)
        has_norms = config.get("use_qk_norm", False)
        self.q_norm = rms_norm(scope, num_features, epsilon=1e-6) if has_norms else None
        self.k_norm = rms_norm(scope, num_features, epsilon=1e-6) if has_norms else None

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        """x [P, C], segments i32 [P] -> [P, C]. Rows see rows of the same segment."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.reshape(x.shape[0], self.num_heads, -1) for each in (q, k, v))
        return self.projection_layer(attend_within(segments, q, k, v))


class InternViTLayer(JaxModule):
    """A pre-norm layer whose residual updates are scaled by feature."""

    def __init__(self, scope: LayerScope, num_features: int) -> None:
        config = scope.config
        epsilon = config.get("layer_norm_eps", 1e-6)
        make_norm = rms_norm if config.get("norm_type", "layer_norm") == "rms_norm" else layer_norm
        self.layernorm_before = make_norm(scope, num_features, epsilon=epsilon)
        self.attention = InternViTAttention(scope / "attention", num_features)
        self.layernorm_after = make_norm(scope, num_features, epsilon=epsilon)
        size, activation = config.get("intermediate_size", 4096), config.get("hidden_act", "gelu")
        self.mlp = VisionMLP(scope / "mlp", num_features, size, activation)
        self.lambda_1, self.lambda_2 = parameter(scope, num_features), parameter(scope, num_features)

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        x = x + self.lambda_1[...] * self.attention(self.layernorm_before(x), segments)
        return x + self.lambda_2[...] * self.mlp(self.layernorm_after(x))


class InternViTPatches(JaxModule):
    """The convolution over patches."""

    def __init__(self, scope: LayerScope, patch_size: int, num_features: int) -> None:
        self.projection = PatchConvolution(scope / "projection", patch_size, num_features, use_bias=True)


class InternViTEmbeddings(JaxModule):
    """Embeddings of patches and of the class token, plus embeddings of their positions.

    A view has `side` patches of a side.
    """

    def __init__(self, scope: LayerScope, patch_size: int, side: int, num_features: int) -> None:
        config = scope.config
        config.expect("use_mask_token", False)
        config.expect("use_absolute_position_embeddings", True)
        self.side = side
        self.cls_token = parameter(scope, 1, 1, num_features)
        self.position_embeddings = parameter(scope, 1, side * side + 1, num_features)
        self.patch_embeddings = InternViTPatches(scope / "patch_embeddings", patch_size, num_features)

    def __call__(self, patches: Patches) -> tuple[jax.Array, jax.Array]:
        """Patches -> the result of `add_class_token`."""
        places = self.position_embeddings[...][0]
        x = self.patch_embeddings.projection(patches.pixels) + places[1 + patches.rows * self.side + patches.columns]
        return add_class_token(x, self.cls_token[...][0, 0] + places[0], patches.num_patches)


class InternViTEncoder(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int) -> None:
        count = scope.config.get("num_hidden_layers", 24)
        self.layer = [InternViTLayer(scope / "layer" / str(i), num_features) for i in range(count)]


class InternViT(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("model_type", "internvl_vision")
        config.expect("num_channels", 3)
        for key in ("attention_dropout", "hidden_dropout_prob", "projection_dropout"):
            config.expect(key, 0.0)
        config.expect("use_mean_pooling", True)
        config.ignore("layer_scale_init_value", because="the checkpoint has the scales")
        self.patch_size = one_side(config.get("patch_size", 14), config.source)
        side = one_side(config.get("image_size", 448), config.source) // self.patch_size
        self.hidden_size: int = config.get("hidden_size", 1024)
        self.embeddings = InternViTEmbeddings(scope / "embeddings", self.patch_size, side, self.hidden_size)
        self.encoder = InternViTEncoder(scope / "encoder", self.hidden_size)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        x, segments = self.embeddings(patches)
        for layer in self.encoder.layer:
            x = run_layer(layer, x, segments)
        return x[: patches.pixels.shape[0]]


class InternVLVision(VisionTower):
    config_keys = (
        *("vision_config", "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy"),
        *("downsample_ratio", "text_config.hidden_size"),
    )
    prefixes = ("vision_tower.", "multi_modal_projector.")
    names = CheckpointNames((("layer_norm", "pre_norm"),))

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        config = scope.config
        config.expect("vision_feature_layer", -1)
        config.expect("vision_feature_select_strategy", "default")
        self.vision_tower = InternViT(vision_scope(scope / "vision_tower"))
        self.patch_size, self.merge_size = self.vision_tower.patch_size, int(1 / config.get("downsample_ratio", 0.5))
        self.multi_modal_projector = VisionProjector(
            scope / "multi_modal_projector",
            self.vision_tower.hidden_size,
            num_merged=self.merge_size**2,
            make_norm=layer_norm,
            norms_merged=True,
        )

    def __call__(self, patches: Patches) -> jax.Array:
        return self.multi_modal_projector(self.vision_tower(patches))
