"""Image encoder of LFM2-VL: SigLIP 2's transformer (arXiv:2502.14786), joined neighbours, a projector."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxis.layers.leaves import layer_norm
from jaxis.models.common.towers.options import converted, of_model, of_vision
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import Positions, square
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.siglip import BASE, PROJECTOR, siglip_names
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import patch_product


def antialiased(table: jax.Array, patches: Patches) -> jax.Array:
    """Resizes the table of a square to the image by an antialiased linear filter -> float32 [P, C]."""
    side = square(table).shape[0]

    def weights(places: jax.Array) -> jax.Array:
        """Returns [P, side]: weights of the table's rows or columns for each patch."""
        scale = side / (jnp.max(places) + 1).astype(jnp.float32)
        center = (places.astype(jnp.float32) + 0.5) * scale - 0.5
        distance = jnp.abs(jnp.arange(side, dtype=jnp.float32) - center[:, None])
        weights = jnp.maximum(1 - distance / jnp.maximum(scale, 1), 0)
        return weights / jnp.sum(weights, axis=-1, keepdims=True)

    by_place = weights(patches.rows)[:, :, None] * weights(patches.columns)[:, None]
    return by_place.reshape(by_place.shape[0], -1) @ table.astype(jnp.float32)


class Lfm2Vision(VisionTower):
    unused = ("tower.head.",)
    names = siglip_names("vision_tower", PROJECTOR, ("projector.layer_norm", "projector.pre_norm"))
    vision = dataclasses.replace(
        BASE,
        merge_size=of_model("downsample_factor", 2),
        embed_patches=patch_product,
        positions=Positions(antialiased, (of_vision("num_patches", 256),)),
        expected={"model_type": ("siglip2_vision_model",)},
        ignored={},
    )
    make_projector = Projection(
        inner_sizes=(of_model("projector_hidden_size", 2560),),
        use_bias=of_model("projector_bias", True),
        make_norm=converted(
            of_model("projector_use_layernorm", True), lambda is_normed: layer_norm if is_normed else None
        ),
        norms_merged=True,
    )
