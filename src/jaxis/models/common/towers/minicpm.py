"""Image encoder of MiniCPM-V 4.6: SigLIP's transformer, which merges neighbours midway, and a projector."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.layers.leaves import layer_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.attention import one_segment
from jaxis.models.common.towers.layers import averaged
from jaxis.models.common.towers.options import VisionOptions
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import Positions, square
from jaxis.models.common.towers.projector import JOINED, Projection, VisionProjector
from jaxis.models.common.towers.siglip import BASE, siglip_names
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import VisionAttention, VisionTransformer, run_layer

_MERGED = 4  # patches that each of the two mergers joins
_PROJECTION = Projection(
    num_merged=_MERGED,
    inner_sizes=(JOINED,),
    activation="gelu",
    make_norm=layer_norm,
    epsilon=1e-6,
    norms_merged=True,
)


def nearest(table: jax.Array, patches: Patches) -> jax.Array:
    """Looks up the nearest position above and to the left in the table of a square -> [P, C]."""
    side = square(table).shape[0]
    # Padding is in the first row and column.
    rows, columns = (places * side // (jnp.max(places) + 1) for places in (patches.rows, patches.columns))
    return table[rows * side + columns]


class GroupAttention(VisionAttention):
    """Attention within groups of adjacent patches."""

    def __call__(self, x: jax.Array, *_: object) -> jax.Array:
        """x [P, C] -> [P, C]."""
        q, k, v = (each.reshape(-1, _MERGED, *each.shape[1:]) for each in self.heads(x))
        scores = jnp.einsum("wqhd,wkhd->whqk", q, k, preferred_element_type=jnp.float32) * self.head_dim**-0.5
        attended = jnp.einsum("whqk,wkhd->wqhd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
        return self.o_proj(attended.reshape(x.shape))


class MiniCPMVMerger(VisionProjector):
    """Merges neighbours: attention among them, then their average plus a projection of them."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        size = options.hidden_size
        projection = dataclasses.replace(
            _PROJECTION,
            size=size,
            inner_sizes=(_MERGED * options.intermediate_size,),
            activation="gelu_pytorch_tanh",
            epsilon=options.epsilon,
        )
        super().__init__(scope, options, projection)
        self.norm1 = layer_norm(scope, size, epsilon=options.epsilon)
        self.attn = GroupAttention(scope / "attn", options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], neighbours next to each other -> [P / 4, C]."""
        x = x + self.attn(self.norm1(x))
        return super().__call__(x) + averaged(x, _MERGED)


class MiniCPMVTransformer(VisionTransformer):
    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        super().__init__(scope, options)
        self.vit_merger = MiniCPMVMerger(scope / "vit_merger", options)

    def __call__(self, patches: Patches) -> list[jax.Array]:
        """Patches -> a state [P / 4, C] with merging, else [P, C]."""
        (x, segments), count = self.embed(patches), patches.num_patches
        if self.options.merges_after is not None:
            # Of the sixteen patches that become one, the four that the first merger joins lie next to each other.
            x = x.reshape(-1, 2, 2, 2, 2, x.shape[-1]).swapaxes(2, 3).reshape(x.shape)
        for i, layer in enumerate(self.layers):
            x = run_layer(layer, x, None, segments)
            if i == self.options.merges_after:
                x = self.vit_merger(x)
                segments = one_segment(x.shape[0], count // _MERGED)
        return [x if self.post_norm is None else self.post_norm(x)]


class MiniCPMVision(VisionTower):
    unused = ("tower.embeddings.position_ids",)
    names = siglip_names("vision_tower", ("merger.mlp.0", "merger"), ("merger", "projector"))
    vision = dataclasses.replace(
        BASE,
        positions=Positions(nearest, image_size=224),
        expected={"model_type": ("minicpmv4_6_vision",), "window_kernel_size": ([2, 2],)},
        expected_outside={
            **{"drop_vision_last_layer": (False,), "merge_kernel_size": ([2, 2],), "merger_times": (1,)},
            "downsample_mode": ("16x", "4x"),
        },
        ignored={**BASE.ignored, "insert_layer_id": "the checkpoint's own is read"},
    )
    make_projector = _PROJECTION
    tower_class = MiniCPMVTransformer

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        options, after = super().options(config), config.get("insert_layer_id", 6)
        if config.get("downsample_mode", "16x") == "4x":
            return dataclasses.replace(options, merge_size=2)
        return dataclasses.replace(options, merge_size=4, merges_after=after)
