"""Image encoder of Kimi K2.5 to K2.7: MoonViT (arXiv:2504.07491), joined neighbours, a projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen_vision import QwenVisionAttention, QwenVisionBlock
from jaxis.models.common.vision_layers import (
    PatchConvolution,
    VisionMLP,
    VisionProjector,
    axial_rope_theta,
    one_segment,
    one_side,
    parameter,
    rotate_pairs,
    run_layer,
    stretched_positions,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig

_EPSILON = 1e-5


class MoonViTPositions(JaxModule):
    """Embeddings of positions from a table that is interpolated over the image (bicubic)."""

    def __init__(self, scope: LayerScope, side: int, num_features: int) -> None:
        self.weight = parameter(scope, side, side, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        return stretched_positions(self.weight[...], patches, is_cubic=True)


class MoonViTPatchEmbed(JaxModule):
    """Embeddings of patches plus embeddings of their positions, from a table of `side` * `side`."""

    def __init__(self, scope: LayerScope, patch_size: int, side: int, num_features: int) -> None:
        self.proj = PatchConvolution(scope / "proj", patch_size, num_features, use_bias=True)
        self.pos_emb = MoonViTPositions(scope / "pos_emb", side, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        x = self.proj(patches.pixels)
        return x + self.pos_emb(patches).astype(x.dtype)


class MoonViTEncoder(JaxModule):
    def __init__(
        self, scope: LayerScope, num_layers: int, num_features: int, size: int, num_heads: int, activation: str
    ) -> None:
        self.blocks = [
            QwenVisionBlock(
                each,
                num_features,
                layer_norm,
                _EPSILON,
                attn=QwenVisionAttention(each / "attn", num_features, num_heads, rotate=rotate_pairs),
                mlp=VisionMLP(each / "mlp", num_features, size, activation),
            )
            for each in (scope / "blocks" / str(i) for i in range(num_layers))
        ]
        self.final_layernorm = layer_norm(scope, num_features, epsilon=_EPSILON)


class MoonViT(JaxModule):
    """The vision transformer."""

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
        """Patches -> [P, C]."""
        x, angles = self.patch_embed(patches), self._angles(patches)
        segments = one_segment(x.shape[0], patches.num_patches)
        for block in self.encoder.blocks:
            x = run_layer(block, x, angles, segments)
        return self.encoder.final_layernorm(x)

    def _angles(self, patches: Patches) -> jax.Array:
        """Returns [P, D / 2]: pairs are rotated by column and by row in turns."""
        inverse = 1.0 / self.rope_theta ** (jnp.arange(0, self.head_dim, 4, dtype=jnp.float32) / self.head_dim)
        places = jnp.stack([patches.columns, patches.rows], axis=-1).astype(jnp.float32)
        return (places[:, None] * inverse[:, None]).reshape(places.shape[0], -1)


class KimiVision(VisionTower):
    config_keys = ("vision_config", "projection_hidden_size", "projection_layer_norm_eps", "text_config.hidden_size")
    prefixes = ("vision_tower.", "mm_projector.")
    names = CheckpointNames(
        (
            *(("norm1", "norm2"), ("norm0", "norm1"), ("mlp.fc1", "mlp.fc2"), ("mlp.fc0", "mlp.fc1")),
            *(("wqkv", "attn.qkv"), ("wo", "attn.proj")),
            *(("mm_projector.proj.0", "mm_projector.in_proj"), ("mm_projector.proj.2", "mm_projector.out_proj")),
            *(("in_proj", "linear_1"), ("out_proj", "linear_2")),
        )
    )

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        self.vision_tower = MoonViT(vision_scope(scope / "vision_tower"))
        num_features = self.vision_tower.hidden_size
        scope.config.expect("projection_hidden_size", num_features)
        vision = scope.config["vision_config"]
        vision.expect("mm_hidden_size", num_features)
        self.patch_size, self.merge_size = self.vision_tower.patch_size, self.vision_tower.merge_size
        self.mm_projector = VisionProjector(
            scope / "mm_projector",
            num_features,
            num_merged=self.merge_size**2,
            inner_size=num_features * self.merge_size**2,
            activation=vision.get("projector_hidden_act", "gelu"),
            make_norm=layer_norm,
            epsilon=vision.get("projector_ln_eps", scope.config.get("projection_layer_norm_eps", _EPSILON)),
        )

    def __call__(self, patches: Patches) -> jax.Array:
        return self.mm_projector(self.vision_tower(patches))


def _either(config: HFConfig, published: str, own: str, default: int) -> int:
    """Reads a setting under its published name or under transformers' name."""
    return config.get(published, config.get(own, default))
