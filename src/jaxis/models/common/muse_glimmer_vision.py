"""Image encoder of Muse Glimmer: a transformer with windows in most layers, joined neighbours, products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.layer_types import FULL_ATTENTION, listed_layer_type
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.qwen_vision import FlatFrameConvolution, QwenVisionBlock
from jaxis.models.common.siglip import SiglipAttention
from jaxis.models.common.vision_layers import (
    PositionTable,
    VisionMLP,
    Windows,
    attend_to_visible,
    axial_angles,
    axial_rope_theta,
    one_segment,
    one_side,
    rotate_halves,
    run_layer,
    stretched_positions,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

_EPSILON = 1e-5
_WINDOW_ATTENTION = "window_attention"


class MuseGlimmerAttention(SiglipAttention):
    """Attention among an image's patches, or among those of a window."""

    def __call__(self, x: jax.Array, angles: jax.Array, visible: jax.Array | Windows) -> jax.Array:
        """x [P, C], angles [P, D / 2], visible: segments i32 [P] or windows -> [P, C]."""
        heads = x.shape[0], self.num_heads, -1
        q, k, v = (layer(x).reshape(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate_halves(q, angles), rotate_halves(k, angles)
        return self.out_proj(attend_to_visible(visible, q, k, v))


class MuseGlimmerPatchEmbedder(JaxModule):
    """Embeddings of patches plus embeddings of positions from a table that is interpolated over the image."""

    def __init__(self, scope: LayerScope, patch_size: int, side: int, num_features: int) -> None:
        self.side = side
        self.patch_embedding = FlatFrameConvolution(
            scope / "patch_embedding",
            num_features,
            scope.config.get("patch_temporal", 2),
            patch_size,
            has_frames_first=True,
        )
        self.position_embedding_table = PositionTable(scope / "position_embedding_table", side * side, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P, C]."""
        x = self.patch_embedding(patches.pixels)
        # Padding is in the first row and column.
        width, height = jnp.max(patches.columns) + 1, jnp.max(patches.rows) + 1
        # Training counted positions line by line in the image, and read the counts as those of the transposed image.
        index = patches.rows * width + patches.columns
        on_its_side = patches._replace(rows=index // height, columns=index % height)
        table = self.position_embedding_table.weight[...].reshape(self.side, self.side, -1)
        return x + stretched_positions(table, on_its_side, is_zero_beyond=True).astype(x.dtype)


class MuseGlimmerTower(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("model_type", "muse_glimmer_vision")
        config.expect("layer_norm_eps", _EPSILON)
        self.patch_size = one_side(config.get("patch_size", 14), config.source)
        self.merge_size = one_side(config.get("merge_size", 2), config.source)
        self.side: int = config.get("pos_emb_height", 32)
        config.expect("pos_emb_width", self.side)
        config.ignore("max_position_embeddings", because="the table of positions has as many places as its sides say")
        self.hidden_size: int = config.get("hidden_size", 1536)
        num_heads, num_layers = config.get("num_attention_heads", 16), config.get("num_hidden_layers", 50)
        self.head_dim = self.hidden_size // num_heads
        self.rope_theta = axial_rope_theta(config, 10_000.0)
        self.patch_embedder = MuseGlimmerPatchEmbedder(
            scope / "patch_embedder", self.patch_size, self.side, self.hidden_size
        )
        self.ln_pre = layer_norm(scope, self.hidden_size, epsilon=_EPSILON)
        size, activation = config.get("intermediate_size", 8960), config.get("hidden_act", "gelu")
        self.layers = [
            QwenVisionBlock(
                each,
                self.hidden_size,
                layer_norm,
                _EPSILON,
                attn=MuseGlimmerAttention(each / "attn", self.hidden_size, num_heads),
                mlp=VisionMLP(each / "mlp", self.hidden_size, size, activation),
            )
            for each in map(scope.layer, range(num_layers))
        ]
        kinds = [listed_layer_type(config, i, FULL_ATTENTION, _WINDOW_ATTENTION) for i in range(num_layers)]
        self.sees_all = [
            (i % 4 == 3 or i == num_layers - 1) if kind is None else kind == FULL_ATTENTION
            for i, kind in enumerate(kinds)
        ]
        self.ln_post = layer_norm(scope, self.hidden_size, epsilon=_EPSILON)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P / merge_size ** 2, C * merge_size ** 2], sorted by feature, then by neighbour."""
        x = self.ln_pre(self.patch_embedder(patches))
        # Columns first, and counted from one.
        turned = patches._replace(rows=patches.columns + 1, columns=patches.rows + 1)
        angles = axial_angles(turned, self.head_dim, self.rope_theta)
        whole = one_segment(x.shape[0], patches.num_patches)
        windows = Windows.of(patches, self.side, self.merge_size)
        for layer, sees_all in zip(self.layers, self.sees_all, strict=True):
            x = run_layer(layer, x, angles, whole if sees_all else windows)
        x = self.ln_post(x).reshape(-1, self.merge_size**2, self.hidden_size)
        return x.swapaxes(1, 2).reshape(x.shape[0], -1)


class MuseGlimmerAdapter(JaxModule):
    """`act(fc2(act(fc1(x))))`."""

    def __init__(self, scope: LayerScope, num_features: int, size: int) -> None:
        self.fc1 = linear(scope / "fc1", num_features, size, axes=("mlp", "embed"))
        self.act = activation_function(scope.config.get("projector_hidden_act", "gelu"))
        self.fc2 = linear(scope / "fc2", size, size, axes=("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, features] -> [N, size]."""
        return self.act(self.fc2(self.act(self.fc1(x))))


class MuseGlimmerVision(VisionTower):
    config_keys = (
        *("vision_config", "out_hidden_size", "projector_hidden_size", "projector_hidden_act"),
        *("text_config.hidden_size", "text_config.rms_norm_eps"),
    )
    prefixes = ("vision_tower.", "vision_adapter.", "vision_projection.")
    names = CheckpointNames((("attn.proj", "attn.out_proj"),))

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        config = scope.config
        self.vision_tower = MuseGlimmerTower(vision_scope(scope / "vision_tower"))
        self.patch_size, self.merge_size = self.vision_tower.patch_size, self.vision_tower.merge_size
        num_features = self.vision_tower.hidden_size * self.merge_size**2
        config.expect("out_hidden_size", num_features)
        size, text = config.get("projector_hidden_size", 4096), config["text_config"]
        self.vision_adapter = MuseGlimmerAdapter(scope / "vision_adapter", num_features, size)
        self.vision_projection = linear(scope / "vision_projection", size, text["hidden_size"], axes=("embed", "mlp"))
        epsilon = text.get("rms_norm_eps", 1e-6)
        self.norm = rms_norm(scope, text["hidden_size"], epsilon=epsilon, use_weight=False)

    def __call__(self, patches: Patches) -> jax.Array:
        return self.norm(self.vision_projection(self.vision_adapter(self.vision_tower(patches))))
