"""SigLIP's vision transformer (arXiv:2303.15343) over squares of one size, as in Idefics3 and Gemma 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.layers.leaves import layer_norm, linear
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import (
    PatchConvolution,
    PositionTable,
    VisionMLP,
    attend_within,
    one_segment,
    one_side,
    rotate_halves,
    run_layer,
)
from jaxis.models.common.vision_tower import Patches

_DEFAULTS: Mapping[str, Any] = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}


class SiglipAttention(JaxModule):
    """Attention among all patches of a view."""

    def __init__(self, scope: LayerScope, num_features: int, num_heads: int) -> None:
        self.num_heads = num_heads
        sizes = num_features, num_features
        self.q_proj = linear(scope / "q_proj", *sizes, axes=("heads", "embed"), use_bias=True)
        self.k_proj = linear(scope / "k_proj", *sizes, axes=("heads", "embed"), use_bias=True)
        self.v_proj = linear(scope / "v_proj", *sizes, axes=("heads", "embed"), use_bias=True)
        self.out_proj = linear(scope / "out_proj", *sizes, axes=("embed", "heads"), use_bias=True)

    def __call__(self, x: jax.Array, num_patches: jax.Array, angles: jax.Array | None = None) -> jax.Array:
        """x [P, C], of which the first `num_patches` are seen, rotated by angles [P, D / 2] if given -> [P, C]."""
        heads = x.shape[0], self.num_heads, -1
        q, k, v = (layer(x).reshape(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if angles is not None:
            q, k = rotate_halves(q, angles), rotate_halves(k, angles)
        return self.out_proj(attend_within(one_segment(x.shape[0], num_patches), q, k, v))

    def within_groups(self, x: jax.Array, size: int) -> jax.Array:
        """x [P, C] -> [P, C]: attention within groups of `size` adjacent patches."""
        heads = -1, size, self.num_heads, x.shape[-1] // self.num_heads
        q, k, v = (layer(x).reshape(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scores = jnp.einsum("wqhd,wkhd->whqk", q, k, preferred_element_type=jnp.float32) * heads[-1] ** -0.5
        attended = jnp.einsum("whqk,wkhd->wqhd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
        return self.out_proj(attended.reshape(x.shape))


class SiglipLayer(JaxModule):
    def __init__(
        self,
        scope: LayerScope,
        num_features: int,
        intermediate_size: int,
        num_heads: int,
        epsilon: float,
        activation: str,
    ) -> None:
        self.layer_norm1 = layer_norm(scope, num_features, epsilon=epsilon)
        self.self_attn = SiglipAttention(scope / "self_attn", num_features, num_heads)
        self.layer_norm2 = layer_norm(scope, num_features, epsilon=epsilon)
        self.mlp = VisionMLP(scope / "mlp", num_features, intermediate_size, activation)

    def __call__(self, x: jax.Array, num_patches: jax.Array, angles: jax.Array | None = None) -> jax.Array:
        x = x + self.self_attn(self.layer_norm1(x), num_patches, angles)
        return x + self.mlp(self.layer_norm2(x))


class SiglipEncoder(JaxModule):
    """The layers of the tower, with defaults of config.json's values, by key."""

    def __init__(self, scope: LayerScope, num_features: int, defaults: Mapping[str, Any]) -> None:
        values = {**_DEFAULTS, **defaults}
        keys = ("intermediate_size", "num_attention_heads", "layer_norm_eps", "hidden_act")
        settings = [scope.config.get(key, values[key]) for key in keys]
        count = scope.config.get("num_hidden_layers", values["num_hidden_layers"])
        self.layers = [SiglipLayer(scope.layer(i), num_features, *settings) for i in range(count)]

    def __call__(
        self,
        x: jax.Array,
        num_patches: jax.Array,
        num_layers: int | None = None,
        angles: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Returns x before the first layer and after each of the first `num_layers` layers (None: all)."""
        states = [x]
        for layer in self.layers[:num_layers]:
            states.append(run_layer(layer, states[-1], num_patches, angles))
        return states


class SiglipEmbeddings(JaxModule):
    """Embeddings of patches plus embeddings of their positions; a view has `side` patches of a side."""

    def __init__(self, scope: LayerScope, patch_size: int, side: int, num_features: int) -> None:
        self.side = side
        self.patch_embedding = PatchConvolution(scope / "patch_embedding", patch_size, num_features, use_bias=True)
        self.position_embedding = PositionTable(scope / "position_embedding", side * side, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        places = patches.rows * self.side + patches.columns
        return self.patch_embedding(patches.pixels) + self.position_embedding(places)


class SiglipTower(JaxModule):
    """The vision transformer.

    Args:
      model_types: Accepted values of the config's `model_type`.
      defaults: Defaults of config.json's values, by key.
      is_normed: True if a norm follows the layers.
      make_embeddings: Factory of the embeddings, called as `SiglipEmbeddings` is.
    """

    def __init__(
        self,
        scope: LayerScope,
        model_types: tuple[str, ...],
        defaults: Mapping[str, Any],
        *,
        is_normed: bool = True,
        make_embeddings: Callable[[LayerScope, int, int, int], SiglipEmbeddings] = SiglipEmbeddings,
    ) -> None:
        config = scope.config
        config.expect("model_type", *model_types)
        config.expect("num_channels", 3)
        config.expect("attention_dropout", 0.0)
        config.ignore("vision_use_head", because="only the patches are read, not what the head makes of them")
        for key in ("max_image_size", "size", "use_base_siglip", "tie_word_embeddings"):
            config.ignore(key, because="the tower has no such setting: the processor's are in its own file")
        self.image_size = one_side(config.get("image_size", defaults["image_size"]), config.source)
        self.patch_size = one_side(config.get("patch_size", defaults["patch_size"]), config.source)
        self.hidden_size: int = config.get("hidden_size", defaults["hidden_size"])
        self.side = self.image_size // self.patch_size
        self.embeddings = make_embeddings(scope / "embeddings", self.patch_size, self.side, self.hidden_size)
        self.encoder = SiglipEncoder(scope / "encoder", self.hidden_size, defaults)
        epsilon = config.get("layer_norm_eps", 1e-6)
        self.post_layernorm = layer_norm(scope, self.hidden_size, epsilon=epsilon) if is_normed else None

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        x = self.states(patches)[-1]
        return x if self.post_layernorm is None else self.post_layernorm(x)

    def states(self, patches: Patches, num_layers: int | None = None) -> list[jax.Array]:
        """Patches -> states [P, C] before the first layer and after each of `num_layers` layers (None: all)."""
        return self.encoder(self.embeddings(patches), patches.num_patches, num_layers)
