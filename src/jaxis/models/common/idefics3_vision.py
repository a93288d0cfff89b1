"""Image encoder of Idefics3 and SmolVLM: SigLIP's transformer, joined neighbours, one product."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from jaxis.layers.leaves import linear
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.siglip import BASE, siglip_names, siglip_options
from jaxis.models.common.vision_layers import merged
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions

if TYPE_CHECKING:
    from jaxis.config.hf_config import HFConfig

_DEFAULTS = dataclasses.replace(BASE, hidden_size=1152, num_heads=16, patch_size=32)


class Idefics3Projector(JaxModule):
    """Projection of joined neighbours to embeddings of the text."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.num_merged, size = options.num_merged, scope.config["text_config"]["hidden_size"]
        self.proj = linear(scope / "proj", options.merged_size, size, axes=("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        return self.proj(merged(x, self.num_merged))


class Idefics3Vision(TransformerTower):
    config_keys = ("vision_config", "scale_factor", "text_config.hidden_size")
    names = siglip_names("vision_model", ("connector.modality_projection", "projector"))
    make_projector = Idefics3Projector

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        kinds = ("idefics3", "idefics3_vision", "smolvlm_vision")
        defaults = dataclasses.replace(_DEFAULTS, merge_size=config.get("scale_factor", 2))
        return siglip_options(config["vision_config"], defaults, *kinds)
