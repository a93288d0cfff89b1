"""Image encoder of Llama 4: a transformer over squares, joined neighbours, a projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.leaves import layer_norm, linear
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import (
    CLASS_ROWS,
    VisionMLP,
    add_class_token,
    attend_within,
    axial_rope_theta,
    one_side,
    parameter,
    rotate_pairs,
    run_layer,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_EPSILON = 1e-5


class Llama4VisionAttention(JaxModule):
    """Attention among all patches of a square and its class token."""

    def __init__(self, scope: LayerScope, num_features: int, num_heads: int) -> None:
        self.num_heads, sizes = num_heads, (num_features, num_features)
        self.q_proj = linear(scope / "q_proj", *sizes, axes=("heads", "embed"), use_bias=True)
        self.k_proj = linear(scope / "k_proj", *sizes, axes=("heads", "embed"), use_bias=True)
        self.v_proj = linear(scope / "v_proj", *sizes, axes=("heads", "embed"), use_bias=True)
        self.o_proj = linear(scope / "o_proj", *sizes, axes=("embed", "heads"), use_bias=True)

    def __call__(self, x: jax.Array, angles: jax.Array, segments: jax.Array) -> jax.Array:
        """x [P, C], angles [P, D / 2], segments i32 [P] -> [P, C]. Rows see rows of the same segment."""
        q, k, v = (
            layer(x).reshape(x.shape[0], self.num_heads, -1) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate_pairs(each, angles) for each in (q, k))
        return self.o_proj(attend_within(segments, q, k, v))


class Llama4VisionLayer(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int) -> None:
        config = scope.config
        self.input_layernorm = layer_norm(scope, num_features, epsilon=_EPSILON)
        self.self_attn = Llama4VisionAttention(scope / "self_attn", num_features, config.get("num_attention_heads", 16))
        self.post_attention_layernorm = layer_norm(scope, num_features, epsilon=_EPSILON)
        self.mlp = VisionMLP(scope / "mlp", num_features, config.get("intermediate_size", 5632), "gelu")

    def __call__(self, x: jax.Array, angles: jax.Array, segments: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), angles, segments)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama4VisionEncoder(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int) -> None:
        count = scope.config.get("num_hidden_layers", 34)
        self.layers = [Llama4VisionLayer(scope.layer(i), num_features) for i in range(count)]


class Llama4PatchEmbedding(JaxModule):
    """A product with each patch, whose pixels are first sorted by channel."""

    def __init__(self, scope: LayerScope, patch_size: int, num_features: int) -> None:
        self.linear = linear(scope / "linear", 3 * patch_size**2, num_features, axes=("embed", None))

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """pixels [P, patch * patch * 3], channels last -> [P, C]."""
        by_channel = pixels.reshape(pixels.shape[0], -1, 3).swapaxes(1, 2)
        return self.linear(by_channel.reshape(pixels.shape))


class Llama4AdapterMLP(JaxModule):
    """`act(fc2(act(fc1(x))))`."""

    def __init__(self, scope: LayerScope, num_features: int, size: int) -> None:
        config = scope.config
        inner = config.get("projector_input_dim", 4096)
        self.fc1 = linear(scope / "fc1", num_features, inner, axes=("mlp", "embed"))
        self.act = activation_function("gelu")
        self.fc2 = linear(scope / "fc2", inner, size, axes=("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, features] -> [N, size]."""
        return self.act(self.fc2(self.act(self.fc1(x))))


class Llama4Adapter(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int, size: int) -> None:
        self.mlp = Llama4AdapterMLP(scope / "mlp", num_features, size)


class Llama4VisionModel(JaxModule):
    """The vision transformer, with its adapter."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("model_type", "llama4_vision_model")
        config.expect("num_channels", 3)
        config.expect("hidden_act", "gelu")
        config.expect("vision_feature_select_strategy", "default")
        config.expect("multi_modal_projector_bias", False)
        for key in ("attention_dropout", "projector_dropout"):
            config.expect(key, 0.0)
        config.ignore("norm_eps", because="the reference's norms have 1e-5, whatever it says")
        self.patch_size = one_side(config.get("patch_size", 14), config.source)
        self.merge_size = round(1 / config.get("pixel_shuffle_ratio", 0.5))
        self.hidden_size: int = config.get("hidden_size", 768)
        self.side = one_side(config.get("image_size", 448), config.source) // self.patch_size
        self.head_dim = self.hidden_size // config.get("num_attention_heads", 16)
        self.rope_theta = axial_rope_theta(config, config.get("rope_theta", 10_000.0))
        self.output_size: int = config.get("projector_output_dim", 4096)
        config.expect("vision_output_dim", self.output_size)
        inside = self.hidden_size * self.merge_size**2
        config.expect("intermediate_size", inside)
        self.patch_embedding = Llama4PatchEmbedding(scope / "patch_embedding", self.patch_size, self.hidden_size)
        self.class_embedding = parameter(scope, self.hidden_size)
        self.positional_embedding_vlm = parameter(scope, self.side**2 + 1, self.hidden_size)
        self.layernorm_pre = layer_norm(scope, self.hidden_size, epsilon=_EPSILON)
        self.layernorm_post = layer_norm(scope, self.hidden_size, epsilon=_EPSILON)
        self.model = Llama4VisionEncoder(scope / "model", self.hidden_size)
        self.vision_adapter = Llama4Adapter(scope / "vision_adapter", inside, self.output_size)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P / merge_size ** 2, output]."""
        num_rows, places = patches.pixels.shape[0], self.positional_embedding_vlm[...]
        x = self.patch_embedding(patches.pixels) + places[patches.rows * self.side + patches.columns]
        x, segments = add_class_token(x, self.class_embedding[...] + places[-1], patches.num_patches)
        x, angles = self.layernorm_pre(x), jnp.pad(self._angles(patches), ((0, CLASS_ROWS), (0, 0)))
        for layer in self.model.layers:
            x = run_layer(layer, x, angles, segments)
        x = self.layernorm_post(x)[:num_rows]
        return self.vision_adapter.mlp(x.reshape(num_rows // self.merge_size**2, -1))

    def _angles(self, patches: Patches) -> jax.Array:
        """Returns [P, D / 2]: the first half of the pairs goes by columns, the other by rows, both counted from 1."""
        half = self.head_dim // 2
        inverse = 1.0 / self.rope_theta ** (jnp.arange(0, half, 2, dtype=jnp.float32) / half)
        places = (patches.columns, patches.rows)
        return jnp.concatenate([(each + 1).astype(jnp.float32)[:, None] * inverse for each in places], axis=-1)


class Llama4Projector(JaxModule):
    def __init__(self, scope: LayerScope, num_features: int) -> None:
        size = scope.config["text_config"]["hidden_size"]
        self.linear_1 = linear(scope / "linear_1", num_features, size, axes=("embed", "mlp"))


class Llama4Vision(VisionTower):
    config_keys = ("vision_config", "text_config.hidden_size")
    prefixes = ("vision_model.", "multi_modal_projector.")

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        self.vision_model = Llama4VisionModel(vision_scope(scope / "vision_model"))
        self.patch_size, self.merge_size = self.vision_model.patch_size, self.vision_model.merge_size
        self.multi_modal_projector = Llama4Projector(scope / "multi_modal_projector", self.vision_model.output_size)

    def __call__(self, patches: Patches) -> jax.Array:
        return self.multi_modal_projector.linear_1(self.vision_model(patches))
