"""Image encoder of Gemma 4: its own transformer, averages of squares, and a product. The 12B has the product alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import averaged, parameter
from jaxis.models.common.towers.options import VisionOptions, of_vision
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import AxialRope, Positions, rotate_halves_in_type
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import VisionAttention, patch_product


class ClippedLinear(JaxModule):
    """A product whose input and output may be clipped to limits in the checkpoint."""

    def __init__(self, scope: LayerScope, input_size: int, output_size: int, **_: Any) -> None:
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


class Gemma4VisionAttention(VisionAttention):
    """Attention with norms on queries, keys and values."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        super().__init__(scope, options)
        self.v_norm = rms_norm(scope, self.head_dim, epsilon=options.epsilon, use_weight=False)

    def heads(self, x: jax.Array) -> list[jax.Array]:
        q, k, v = super().heads(x)
        return [q, k, self.v_norm(v)]


def rotate_each_half(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the halves of x [P, H, D] separately: the first by the first half of angles [P, D / 2]."""
    halves = zip(jnp.split(x, 2, axis=-1), jnp.split(angles, 2, axis=-1), strict=True)
    return jnp.concatenate([rotate_halves_in_type(half, each) for half, each in halves], axis=-1)


class Gemma4VisionMLP(JaxModule):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        num_features, size = options.hidden_size, options.intermediate_size
        self.gate_proj = ClippedLinear(scope / "gate_proj", num_features, size)
        self.up_proj = ClippedLinear(scope / "up_proj", num_features, size)
        self.down_proj = ClippedLinear(scope / "down_proj", size, num_features)
        self.act = activation_function(options.activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def by_column_and_row(tables: jax.Array, patches: Patches) -> jax.Array:
    """Adds the embeddings of each patch's column and of its row, of two tables -> [P, C]."""
    by_column, by_row = tables
    return by_column[patches.columns] + by_row[patches.rows]


def by_place(tables: jax.Array, patches: Patches) -> jax.Array:
    """Adds embeddings as `by_column_and_row`, of tables [places, 2, C]."""
    return tables[patches.columns, 0] + tables[patches.rows, 1]


def norm_of_update(scope: LayerScope, options: VisionOptions) -> JaxModule:
    return rms_norm(scope, options.hidden_size, epsilon=options.epsilon)


class Gemma4Embedder(JaxModule):
    """A norm and a product."""

    def __init__(self, scope: LayerScope, num_features: int) -> None:
        config = scope.config
        size, epsilon = config["text_config"]["hidden_size"], config["vision_config"].get("rms_norm_eps", 1e-6)
        self.embedding_pre_projection_norm = rms_norm(scope, num_features, epsilon=epsilon, use_weight=False)
        self.embedding_projection = linear(scope / "embedding_projection", num_features, size, axes=(None, None))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, C] -> [N, E]."""
        return self.embedding_projection(self.embedding_pre_projection_norm(x))


class Gemma4Projector(Gemma4Embedder):
    """Averages of squares, which may be standardized, and their projection."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        size, self.num_merged = options.hidden_size, options.num_merged
        super().__init__(scope, size)
        self.std_bias = self.std_scale = None
        if scope.config["vision_config"].get("standardize", False):
            self.std_bias, self.std_scale = parameter(scope, size), parameter(scope, size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        pooled = averaged(x, self.num_merged).astype(jnp.float32) * x.shape[-1] ** 0.5
        if self.std_bias is not None and self.std_scale is not None:
            pooled = (pooled - self.std_bias[...].astype(jnp.float32)) * self.std_scale[...].astype(jnp.float32)
        return super().__call__(pooled.astype(x.dtype))


class Gemma4Vision(VisionTower):
    names = CheckpointNames(
        (
            *(("vision_tower", "tower"), ("tower.patch_embedder.input_proj", "tower.patch_embed")),
            ("tower.patch_embedder.position_embedding_table", "tower.position_embed.weight"),
            *(("tower.encoder.layers", "tower.layers"), ("input_layernorm", "norm1"), ("self_attn", "attn")),
            *(("post_attention_layernorm", "after_attn"), ("pre_feedforward_layernorm", "norm2")),
            *(("post_feedforward_layernorm", "after_mlp"), ("embed_vision", "projector")),
            *(("tower.std_bias", "projector.std_bias"), ("tower.std_scale", "projector.std_scale")),
        )
    )
    make_projector = Gemma4Projector

    vision = VisionOptions(
        *(768, 3072, 16, 12, 16, of_vision("hidden_activation", "gelu_pytorch_tanh")),
        head_size=of_vision("head_dim", 64),
        merge_size=of_vision("pooling_kernel_size", 3),
        make_norm=rms_norm,
        epsilon=of_vision("rms_norm_eps", 1e-6),
        embed_patches=patch_product,
        positions=Positions(by_column_and_row, (2, of_vision("position_embedding_size", 10 * 1024))),
        rope=AxialRope(theta=100.0, rotate=rotate_each_half, columns_first=True),
        qk_norm_epsilon=of_vision("rms_norm_eps", 1e-6),
        attention_scale=1.0,
        make_linear=ClippedLinear,
        make_mixer=Gemma4VisionAttention,
        make_mlp=Gemma4VisionMLP,
        make_after=norm_of_update,
        expected={
            **{"model_type": ("gemma4_vision",), "attention_bias": (False,)},
            "num_key_value_heads": lambda options: options.num_heads,
        },
        ignored={
            **dict.fromkeys(
                ("max_position_embeddings", "default_output_length", "image_seq_length", "video_seq_length"),
                "the processor limits how many patches there are",
            ),
            "global_head_dim": "it is of the text's layers: all of the tower's are alike",
        },
    )


class Gemma4PatchEmbedding(JaxModule):
    """A product with large patches between norms, which the 12B has instead of a transformer."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        size, num_pixels, epsilon = options.hidden_size, 3 * options.patch_size**2, options.epsilon
        self.patch_ln1 = layer_norm(scope, num_pixels, epsilon=epsilon)
        self.patch_dense = linear(scope / "patch_dense", num_pixels, size, axes=(None, None), use_bias=True)
        self.patch_ln2 = layer_norm(scope, size, epsilon=epsilon)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """pixels [P, patch * patch * 3], channels last -> [P, C]."""
        return self.patch_ln2(self.patch_dense(self.patch_ln1(pixels)))


class Gemma4UnifiedVision(VisionTower):
    names = CheckpointNames(
        (
            ("vision_embedder.pos_embedding", "tower.position_embed.weight"),
            *(("vision_embedder.pos_norm", "tower.post_norm"), ("vision_embedder", "tower.patch_embed")),
            ("embed_vision", "projector"),
        )
    )

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        vision.expect("model_type", "gemma4_unified_vision")
        vision.ignore("num_soft_tokens", because="the processor limits how many patches there are")
        patch_size = vision.get("patch_size", 16) * vision.get("pooling_kernel_size", 3)
        vision.expect("model_patch_size", patch_size)
        size = vision.get("mm_embed_dim", 3840)
        vision.expect("output_proj_dims", size)
        positions = Positions(by_place, (vision.get("mm_posemb_size", 1120), 2))
        parts: dict[str, Any] = {"embed_patches": Gemma4PatchEmbedding, "positions": positions, "norms": ("post_norm",)}
        return VisionOptions(size, 0, 0, 1, patch_size, "gelu", epsilon=1e-5, **parts)

    @staticmethod
    def make_projector(scope: LayerScope, options: VisionOptions) -> Gemma4Embedder:
        return Gemma4Embedder(scope, options.hidden_size)
