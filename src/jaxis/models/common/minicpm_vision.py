"""Image encoder of MiniCPM-V 4.6: SigLIP's transformer, which merges neighbours midway, and a projector."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.layers.leaves import layer_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import BASE, siglip_names, siglip_options
from jaxis.models.common.vision_attention import one_segment
from jaxis.models.common.vision_layers import averaged
from jaxis.models.common.vision_positions import square
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_tower import Patches
from jaxis.models.common.vision_transformer import (
    TransformerTower,
    VisionAttention,
    VisionOptions,
    VisionTransformer,
    run_layer,
)

_MERGED = 4  # patches that each of the two mergers joins


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
        size, norm = options.hidden_size, {"make_norm": layer_norm, "epsilon": options.epsilon, "norms_merged": True}
        inner = {"inner_sizes": (_MERGED * options.intermediate_size,), "activation": "gelu_pytorch_tanh"}
        super().__init__(scope, options, size, num_merged=_MERGED, **inner, **norm)
        self.norm1 = layer_norm(scope, size, epsilon=options.epsilon)
        self.attn = GroupAttention(scope / "attn", options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C], neighbours next to each other -> [P / 4, C]."""
        x = x + self.attn(self.norm1(x))
        return super().__call__(x) + averaged(x, _MERGED)


@dataclass(frozen=True)
class MiniCPMVOptions(VisionOptions):
    """Options of the vision transformer.

    Attributes:
      merges_after: Index of the layer after which neighbours are merged; None for none.
    """

    merges_after: int | None = field(default=None, kw_only=True)


_DEFAULTS = MiniCPMVOptions(**vars(BASE))


class MiniCPMVTransformer(VisionTransformer):
    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        super().__init__(scope, options)
        assert isinstance(options, MiniCPMVOptions)
        self.merges_after = options.merges_after
        self.vit_merger = MiniCPMVMerger(scope / "vit_merger", options)

    def __call__(self, patches: Patches) -> list[jax.Array]:
        """Patches -> a state [P / 4, C] with merging, else [P, C]."""
        (x, segments), count = self.embed(patches), patches.num_patches
        if self.merges_after is not None:
            # Of the sixteen patches that become one, the four that the first merger joins lie next to each other.
            x = x.reshape(-1, 2, 2, 2, 2, x.shape[-1]).swapaxes(2, 3).reshape(x.shape)
        for i, layer in enumerate(self.layers):
            x = run_layer(layer, x, None, segments)
            if i == self.merges_after:
                x = self.vit_merger(x)
                segments = one_segment(x.shape[0], count // _MERGED)
        return [x if self.post_norm is None else self.post_norm(x)]


class MiniCPMVision(TransformerTower):
    unused = ("tower.embeddings.position_ids",)
    names = siglip_names("vision_tower", ("merger.mlp.0", "merger"), ("merger", "projector"))
    tower_class = MiniCPMVTransformer

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        for key, expected in (("drop_vision_last_layer", False), ("merge_kernel_size", [2, 2]), ("merger_times", 1)):
            config.expect(key, expected)
        config.expect("downsample_mode", "16x", "4x")
        vision.expect("window_kernel_size", [2, 2])
        vision.ignore("insert_layer_id", because="the checkpoint's own is read")
        merges_twice, after = config.get("downsample_mode", "16x") == "16x", config.get("insert_layer_id", 6)
        changes = {"merge_size": 4 if merges_twice else 2, "merges_after": after if merges_twice else None}
        return siglip_options(vision, _DEFAULTS, "minicpmv4_6_vision", look_up=nearest, **changes)

    @staticmethod
    def make_projector(scope: LayerScope, options: VisionOptions) -> VisionProjector:
        norm = {"make_norm": layer_norm, "epsilon": 1e-6, "norms_merged": True}
        inner = {"inner_sizes": (options.hidden_size * _MERGED,), "activation": "gelu"}
        return VisionProjector(scope, options, num_merged=_MERGED, **inner, **norm)
