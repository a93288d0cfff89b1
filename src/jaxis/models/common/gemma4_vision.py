"""Image encoder of Gemma 4: its own transformer, averages of squares, and a product. The 12B has the product alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import (
    attend_within,
    axial_rope_theta,
    one_segment,
    parameter,
    rotate_halves,
    run_layer,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig


class ClippedLinear(JaxModule):
    """A product whose input and output may be clipped to limits in the checkpoint."""

    def __init__(self, scope: LayerScope, input_size: int, output_size: int) -> None:
        self.linear = linear(scope / "linear", input_size, output_size, axes=(None, None))
        self.is_clipped: bool = scope.config.get("use_clipped_linears", False)
        if self.is_clipped:
            lowest, highest = nnx.initializers.constant(-jnp.inf), nnx.initializers.constant(jnp.inf)
            self.input_min = make_parameter(scope.rngs, lowest, (), scope.dtype, axes=())
            self.input_max = make_parameter(scope.rngs, highest, (), scope.dtype, axes=())
            self.output_min = make_parameter(scope.rngs, lowest, (), scope.dtype, axes=())
            self.output_max = make_parameter(scope.rngs, highest, (), scope.dtype, axes=())

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, in] -> [P, out]."""
        if not self.is_clipped:
            return self.linear(x)
        x = self.linear(jnp.clip(x, self.input_min[...], self.input_max[...]))
        return jnp.clip(x, self.output_min[...], self.output_max[...])


class Gemma4VisionAttention(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int, head_dim: int) -> None:
        config = scope.config
        self.num_heads: int = config.get("num_attention_heads", 12)
        config.expect("num_key_value_heads", self.num_heads)
        size, epsilon = self.num_heads * head_dim, config.get("rms_norm_eps", 1e-6)
        self.q_proj = ClippedLinear(scope / "q_proj", num_features, size)
        self.k_proj = ClippedLinear(scope / "k_proj", num_features, size)
        self.v_proj = ClippedLinear(scope / "v_proj", num_features, size)
        self.o_proj = ClippedLinear(scope / "o_proj", size, num_features)
        self.q_norm = rms_norm(scope, head_dim, epsilon=epsilon)
        self.k_norm = rms_norm(scope, head_dim, epsilon=epsilon)
        self.v_norm = rms_norm(scope, head_dim, epsilon=epsilon, use_weight=False)

    def __call__(self, x: jax.Array, angles: jax.Array, num_patches: jax.Array) -> jax.Array:
        """x [P, C], of which the first `num_patches` are seen, angles [2, P, D / 4] by column and row -> [P, C]."""
        heads = x.shape[0], self.num_heads, -1
        q, k, v = (layer(x).reshape(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(self.q_norm(q), angles), _rotate(self.k_norm(k), angles)
        return self.o_proj(attend_within(one_segment(x.shape[0], num_patches), q, k, self.v_norm(v), scale=1.0))


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates x [P, H, D]: the first half of a head by the first angles, the second half by the others."""
    halves = zip(jnp.split(x, 2, axis=-1), angles, strict=True)
    return jnp.concatenate([rotate_halves(half, each, x.dtype) for half, each in halves], axis=-1)


class Gemma4VisionMLP(JaxModule):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`."""

    def __init__(self, scope: LayerScope, num_features: int) -> None:
        size = scope.config.get("intermediate_size", 3072)
        self.gate_proj = ClippedLinear(scope / "gate_proj", num_features, size)
        self.up_proj = ClippedLinear(scope / "up_proj", num_features, size)
        self.down_proj = ClippedLinear(scope / "down_proj", size, num_features)
        self.act = activation_function(scope.config.get("hidden_activation", "gelu_pytorch_tanh"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Gemma4VisionLayer(JaxModule):
    """A layer with norms before and after each block."""

    def __init__(self, scope: LayerScope, num_features: int, head_dim: int) -> None:
        epsilon = scope.config.get("rms_norm_eps", 1e-6)
        self.input_layernorm = rms_norm(scope, num_features, epsilon=epsilon)
        self.self_attn = Gemma4VisionAttention(scope / "self_attn", num_features, head_dim)
        self.post_attention_layernorm = rms_norm(scope, num_features, epsilon=epsilon)
        self.pre_feedforward_layernorm = rms_norm(scope, num_features, epsilon=epsilon)
        self.mlp = Gemma4VisionMLP(scope / "mlp", num_features)
        self.post_feedforward_layernorm = rms_norm(scope, num_features, epsilon=epsilon)

    def __call__(self, x: jax.Array, angles: jax.Array, num_patches: jax.Array) -> jax.Array:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), angles, num_patches))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma4VisionEncoder(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int, head_dim: int) -> None:
        count = scope.config.get("num_hidden_layers", 16)
        self.layers = [Gemma4VisionLayer(scope.layer(i), num_features, head_dim) for i in range(count)]


class Gemma4PatchEmbedder(JaxModule):
    """Embeddings of patches plus embeddings of their column and of their row."""

    def __init__(self, scope: LayerScope, patch_size: int, num_features: int) -> None:
        self.input_proj = linear(scope / "input_proj", 3 * patch_size**2, num_features, axes=(None, None))
        places = scope.config.get("position_embedding_size", 10 * 1024)
        self.position_embedding_table = parameter(scope, 2, places, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        by_column, by_row = self.position_embedding_table[...]
        return self.input_proj(patches.pixels) + (by_column[patches.columns] + by_row[patches.rows])


class Gemma4VisionModel(JaxModule):
    """The vision transformer, and averages of its output over squares."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("model_type", "gemma4_vision")
        config.expect("attention_bias", False)
        config.expect("attention_dropout", 0.0)
        for key in ("max_position_embeddings", "default_output_length", "image_seq_length", "video_seq_length"):
            config.ignore(key, because="the processor limits how many patches there are")
        config.ignore("global_head_dim", because="it is of the text's layers: all of the tower's are alike")
        self.patch_size: int = config.get("patch_size", 16)
        self.merge_size: int = config.get("pooling_kernel_size", 3)
        self.hidden_size: int = config.get("hidden_size", 768)
        self.head_dim: int = config.get("head_dim", 64)
        self.rope_theta = axial_rope_theta(config, 100.0)
        self.patch_embedder = Gemma4PatchEmbedder(scope / "patch_embedder", self.patch_size, self.hidden_size)
        self.encoder = Gemma4VisionEncoder(scope / "encoder", self.hidden_size, self.head_dim)
        self.is_standardized: bool = config.get("standardize", False)
        if self.is_standardized:
            self.std_bias, self.std_scale = parameter(scope, self.hidden_size), parameter(scope, self.hidden_size)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P / merge_size ** 2, C]."""
        x = self.patch_embedder(patches)
        quarter = jnp.arange(0, self.head_dim // 2, 2, dtype=jnp.float32) / (self.head_dim // 2)
        places = jnp.stack([patches.columns, patches.rows]).astype(jnp.float32)
        angles = places[:, :, None] * (1.0 / self.rope_theta**quarter)
        for layer in self.encoder.layers:
            x = run_layer(layer, x, angles, patches.num_patches)
        squares = x.reshape(-1, self.merge_size**2, self.hidden_size).astype(jnp.float32)
        pooled = jnp.mean(squares, axis=1).astype(x.dtype).astype(jnp.float32) * self.hidden_size**0.5
        if self.is_standardized:
            pooled = (pooled - self.std_bias[...].astype(jnp.float32)) * self.std_scale[...].astype(jnp.float32)
        return pooled.astype(x.dtype)


class Gemma4Embedder(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int) -> None:
        config = scope.config
        size, epsilon = config["text_config"]["hidden_size"], config["vision_config"].get("rms_norm_eps", 1e-6)
        self.embedding_pre_projection_norm = rms_norm(scope, num_features, epsilon=epsilon, use_weight=False)
        self.embedding_projection = linear(scope / "embedding_projection", num_features, size, axes=(None, None))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, C] -> [N, E]."""
        return self.embedding_projection(self.embedding_pre_projection_norm(x))


class Gemma4Vision(VisionTower):
    config_keys = ("vision_config", "text_config.hidden_size")
    prefixes = ("vision_tower.", "embed_vision.")

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        self.vision_tower = Gemma4VisionModel(vision_scope(scope / "vision_tower"))
        self.patch_size, self.merge_size = self.vision_tower.patch_size, self.vision_tower.merge_size
        self.embed_vision = Gemma4Embedder(scope / "embed_vision", self.vision_tower.hidden_size)

    def __call__(self, patches: Patches) -> jax.Array:
        return self.embed_vision(self.vision_tower(patches))


class Gemma4PixelEmbedder(JaxModule):
    """A product with large patches between norms, which the 12B has instead of a transformer."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config["vision_config"]
        config.expect("model_type", "gemma4_unified_vision")
        config.ignore("num_soft_tokens", because="the processor limits how many patches there are")
        self.patch_size: int = config.get("patch_size", 16) * config.get("pooling_kernel_size", 3)
        config.expect("model_patch_size", self.patch_size)
        size, num_pixels = config.get("mm_embed_dim", 3840), 3 * self.patch_size**2
        config.expect("output_proj_dims", size)
        self.patch_ln1 = layer_norm(scope, num_pixels, epsilon=1e-5)
        self.patch_dense = linear(scope / "patch_dense", num_pixels, size, axes=(None, None), use_bias=True)
        self.patch_ln2 = layer_norm(scope, size, epsilon=1e-5)
        self.pos_embedding = parameter(scope, config.get("mm_posemb_size", 1120), 2, size)
        self.pos_norm = layer_norm(scope, size, epsilon=1e-5)
        self.multimodal_embedder = Gemma4Embedder(scope / "multimodal_embedder", size)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, E]."""
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(patches.pixels)))
        places = self.pos_embedding[...]
        x = x + (places[patches.columns, 0] + places[patches.rows, 1])
        return self.multimodal_embedder(self.pos_norm(x))


class Gemma4UnifiedVision(VisionTower):
    config_keys = ("vision_config", "text_config.hidden_size")
    prefixes = ("embed_vision.",)
    names = CheckpointNames(
        (
            ("vision_embedder", "embed_vision"),
            ("embed_vision.embedding_projection", "embed_vision.multimodal_embedder.embedding_projection"),
        )
    )
    merge_size = 1

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        self.embed_vision = Gemma4PixelEmbedder(LayerScope(vllm_config, rng, vllm_config.quant_config) / "embed_vision")
        self.patch_size = self.embed_vision.patch_size

    def __call__(self, patches: Patches) -> jax.Array:
        return self.embed_vision(patches)
