"""What encodes images for Kimi K2.5 to K2.7: MoonViT (arXiv:2504.07491), and neighbours joined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.leaves import layer_norm, linear
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.vision_layers import (
    PatchConvolution,
    attend_within,
    axial_rope_theta,
    cubic_positions,
    one_segment,
    one_side,
    parameter,
    rotate_pairs,
    run_layer,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig

_EPSILON = 1e-5


class MoonViTPositions(JaxModule):
    """A table that is stretched over the image.

    Args:
      scope: The table's scope.
      side: Places of a side of the table.
      num_features: C.
    """

    def __init__(self, scope: LayerScope, side: int, num_features: int) -> None:
        self.weight = parameter(scope, side, side, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """[P, C]."""
        return cubic_positions(self.weight[...], patches)


class MoonViTPatchEmbed(JaxModule):
    """Patches, and where they are.

    Args:
      scope: The embeddings' scope.
      patch_size: Pixels of a side of a patch.
      side: Places of a side of the table of positions.
      num_features: C.
    """

    def __init__(self, scope: LayerScope, patch_size: int, side: int, num_features: int) -> None:
        self.proj = PatchConvolution(scope / "proj", patch_size, num_features, use_bias=True)
        self.pos_emb = MoonViTPositions(scope / "pos_emb", side, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """The patches -> [P, C]."""
        x = self.proj(patches.pixels)
        return x + self.pos_emb(patches).astype(x.dtype)


class MoonViTMLP(JaxModule):
    """`fc1(act(fc0(x)))`.

    Args:
      scope: The layer's scope.
      num_features: C.
      size: F.
      activation: Its name.
    """

    def __init__(self, scope: LayerScope, num_features: int, size: int, activation: str) -> None:
        self.fc0 = linear(scope / "fc0", num_features, size, axes=("mlp", "embed"), use_bias=True)
        self.act = activation_function(activation)
        self.fc1 = linear(scope / "fc1", size, num_features, axes=("embed", "mlp"), use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, C] -> [P, C]."""
        return self.fc1(self.act(self.fc0(x)))


class MoonViTBlock(JaxModule):
    """A pre-norm layer, in which all patches see each other.

    Args:
      scope: The layer's scope.
      num_features: C.
      size: F.
      num_heads: H.
      activation: Its name.
    """

    def __init__(self, scope: LayerScope, num_features: int, size: int, num_heads: int, activation: str) -> None:
        self.num_heads = num_heads
        self.norm0 = layer_norm(scope, num_features, epsilon=_EPSILON)
        self.wqkv = linear(scope / "wqkv", num_features, 3 * num_features, axes=("heads", "embed"), use_bias=True)
        self.wo = linear(scope / "wo", num_features, num_features, axes=("embed", "heads"), use_bias=True)
        self.norm1 = layer_norm(scope, num_features, epsilon=_EPSILON)
        self.mlp = MoonViTMLP(scope / "mlp", num_features, size, activation)

    def __call__(self, x: jax.Array, angles: jax.Array, num_patches: jax.Array) -> jax.Array:
        """x [P, C], the first `num_patches` of which are seen, and angles [P, D / 2] -> [P, C]."""
        q, k, v = jnp.moveaxis(self.wqkv(self.norm0(x)).reshape(x.shape[0], 3, self.num_heads, -1), 1, 0)
        q, k = (rotate_pairs(each, angles) for each in (q, k))
        x = x + self.wo(attend_within(one_segment(x.shape[0], num_patches), q, k, v))
        return x + self.mlp(self.norm1(x))


class MoonViTEncoder(JaxModule):
    """The layers.

    Args:
      scope: The encoder's scope.
      num_layers: How many.
      num_features: C.
      settings: Of each layer, beside these.
    """

    def __init__(self, scope: LayerScope, num_layers: int, num_features: int, *settings: Any) -> None:
        self.blocks = [MoonViTBlock(scope / "blocks" / str(i), num_features, *settings) for i in range(num_layers)]
        self.final_layernorm = layer_norm(scope, num_features, epsilon=_EPSILON)


class MoonViT(JaxModule):
    """The vision transformer.

    Args:
      scope: The tower's scope, with the checkpoint's `vision_config` as its config.

    Raises:
      ConfigError: The config asks for something that is not supported.
    """

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("pos_emb_type", "divided_fixed")
        config.expect("merge_type", "sd2_tpool")
        config.expect("mm_projector_type", "patchmerger")
        for key in ("video_attn_type", "init_pos_emb_time", "pos_emb_time", "model_type", "text_hidden_size"):
            config.ignore(key, because="it is about video, or says again what is said elsewhere")
        self.patch_size = one_side(config.get("patch_size", 14), config.source)
        self.merge_size = one_side(config.get("merge_kernel_size", [2, 2]), config.source)
        self.hidden_size: int = _either(config, "vt_hidden_size", "hidden_size", 1152)
        num_heads = _either(config, "vt_num_attention_heads", "num_attention_heads", 16)
        side = _either(config, "init_pos_emb_height", "pos_emb_height", 64)
        for key in ("init_pos_emb_width", "pos_emb_width"):
            config.expect(key, side)
        self.head_dim = self.hidden_size // num_heads
        self.rope_theta = axial_rope_theta(config, 10_000.0)
        self.patch_embed = MoonViTPatchEmbed(scope / "patch_embed", self.patch_size, side, self.hidden_size)
        self.encoder = MoonViTEncoder(
            scope / "encoder",
            _either(config, "vt_num_hidden_layers", "num_hidden_layers", 27),
            self.hidden_size,
            _either(config, "vt_intermediate_size", "intermediate_size", 4304),
            num_heads,
            config.get("hidden_act", "gelu_pytorch_tanh"),
        )

    def __call__(self, patches: Patches) -> jax.Array:
        """The patches -> [P, C]."""
        x, angles = self.patch_embed(patches), self._angles(patches)
        for block in self.encoder.blocks:
            x = run_layer(block, x, angles, patches.num_patches)
        return self.encoder.final_layernorm(x)

    def _angles(self, patches: Patches) -> jax.Array:
        """[P, D / 2]: pairs go by columns and by rows in turns."""
        inverse = 1.0 / self.rope_theta ** (jnp.arange(0, self.head_dim, 4, dtype=jnp.float32) / self.head_dim)
        places = jnp.stack([patches.columns, patches.rows], axis=-1).astype(jnp.float32)
        return (places[:, None] * inverse[:, None]).reshape(places.shape[0], -1)


class KimiProjector(JaxModule):
    """From neighbouring patches to embeddings of the text.

    Args:
      scope: The projector's scope, with all of config.json.
      num_features: C.
      num_merged: Patches that become one embedding.
    """

    def __init__(self, scope: LayerScope, num_features: int, num_merged: int) -> None:
        config = scope.config
        vision = config["vision_config"]
        epsilon = vision.get("projector_ln_eps", config.get("projection_layer_norm_eps", _EPSILON))
        self.merged_size = size = num_features * num_merged
        self.pre_norm = layer_norm(scope, num_features, epsilon=epsilon)
        embedding_size: int = config["text_config"]["hidden_size"]
        self.in_proj = linear(scope / "in_proj", size, size, axes=("mlp", "embed"), use_bias=True)
        self.act = activation_function(vision.get("projector_hidden_act", "gelu"))
        self.out_proj = linear(scope / "out_proj", size, embedding_size, axes=("embed", "mlp"), use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], those that are merged next to each other -> [P / num_merged, E]."""
        return self.out_proj(self.act(self.in_proj(self.pre_norm(x).reshape(-1, self.merged_size))))


class KimiVision(VisionTower):
    """The vision tower of Kimi K2.5 to K2.7, with its projector.

    Args:
      vllm_config: Its config is what `config_keys` name.
      rng: For the initial weights.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

    config_keys = ("vision_config", "projection_hidden_size", "projection_layer_norm_eps", "text_config.hidden_size")
    prefixes = ("vision_tower.", "mm_projector.")
    renames = (
        ("mm_projector.proj.0.", "mm_projector.in_proj."),
        ("mm_projector.proj.2.", "mm_projector.out_proj."),
    )

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng)
        self.vision_tower = MoonViT(vision_scope(scope / "vision_tower"))
        num_features = self.vision_tower.hidden_size
        scope.config.expect("projection_hidden_size", num_features)
        scope.config["vision_config"].expect("mm_hidden_size", num_features)
        self.patch_size, self.merge_size = self.vision_tower.patch_size, self.vision_tower.merge_size
        self.mm_projector = KimiProjector(scope / "mm_projector", num_features, self.merge_size**2)

    def __call__(self, patches: Patches) -> jax.Array:
        """See `VisionTower`."""
        return self.mm_projector(self.vision_tower(patches))


def _either(config: HFConfig, published: str, own: str, default: int) -> int:
    """A setting under its name in the published files, or in those that transformers writes."""
    return config.get(published, config.get(own, default))
