"""Image encoders of LLaVA 1.5 (arXiv:2310.03744) and related models.

A projector follows CLIP's, SigLIP's or Pixtral's transformer without its last layers. It reads several layers in
ViP-LLaVA (arXiv:2312.00784) and in Granite Vision (arXiv:2502.09927).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import parameter
from jaxis.models.common.towers.options import Make, VisionOptions, of_model, of_vision
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.pixtral import PIXTRAL, PixtralVision
from jaxis.models.common.towers.positions import Positions, learned
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.siglip import BASE, PROJECTOR, siglip_names
from jaxis.models.common.towers.tower import VisionTower

_CLIP_TYPE = "clip_vision_model"
_CLIP = VisionOptions(
    *(768, 3072, 12, 12, 32, "quick_gelu"),
    epsilon=of_vision("layer_norm_eps", 1e-5),
    positions=Positions(learned, image_size=224, class_place=0),
    class_shape=(),
    norms=("pre_norm",),
    ignored=dict.fromkeys(("projection_dim", "vocab_size"), "it is about CLIP's other half"),
)
_TRANSFORMERS = {_CLIP_TYPE: _CLIP, "siglip_vision_model": dataclasses.replace(BASE, norms=())}
_HAS_BIAS = of_model("multimodal_projector_bias", True)
_SIGLIP_NAMES = siglip_names("vision_tower")


class LlavaVision(VisionTower):
    """The vision tower of LLaVA 1.5 and Pixtral, with its projector, which may read several layers.

    Attributes:
      default_layers: Layers whose output the projector reads, if config.json does not say.
    """

    unused = ("tower.post_norm.", "tower.head.", "tower.embeddings.position_ids")
    names = CheckpointNames(
        (
            *_SIGLIP_NAMES.renames,
            *(("tower.embeddings.class_embedding", "tower.class_token"), ("tower.pre_layrnorm", "tower.pre_norm")),
            *(PROJECTOR, ("projector.projector_layernorm", "projector.pre_norm")),
        ),
        other_names=(*_SIGLIP_NAMES.other_names, *PixtralVision.names.renames),
    )
    make_projector: ClassVar[Make] = Projection(joins_states=True, use_bias=_HAS_BIAS)
    default_layers: ClassVar[Sequence[int]] = (-2,)

    @classmethod
    def names_of(cls, config: HFConfig) -> CheckpointNames:
        kind = str(config["vision_config"].get("model_type", _CLIP_TYPE))
        return cls.names if kind in _TRANSFORMERS else PixtralVision.names

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        kind = str(config["vision_config"].get("model_type", _CLIP_TYPE))
        options = _TRANSFORMERS.get(kind, PIXTRAL).read(config)
        config.expect("projector_layernorm_eps", 1e-5)
        # Without a class token, "default" would drop a patch.
        config.expect("vision_feature_select_strategy", "default" if kind == _CLIP_TYPE else "full")
        if kind not in _TRANSFORMERS:
            config.expect("vision_feature_layer", -1)
            return options
        key = "vision_feature_layers" if "vision_feature_layers" in config else "vision_feature_layer"
        chosen = config.get(key, cls.default_layers)
        layers = [chosen] if isinstance(chosen, int) else chosen
        return dataclasses.replace(options, outputs=[_layer(config, each, options.num_layers) for each in layers])


class LlavaNextVision(LlavaVision):
    """The vision tower of LLaVA-NeXT, Granite Vision and LLaVA-OneVision, with an embedding of a line's end."""

    prefixes = (*LlavaVision.prefixes, "image_newline")
    ends_lines = True

    def add_parts(self, scope: LayerScope) -> None:
        scope.config.expect("use_image_newline_parameter", True)
        self.image_newline = parameter(scope, scope.config["text_config"]["hidden_size"])

    def __call__(self, patches: Patches) -> jax.Array:
        x = super().__call__(patches)
        return jnp.concatenate([x, self.image_newline[...].astype(x.dtype)[None]])


class VipLlavaVision(LlavaVision):
    """The vision tower of ViP-LLaVA, whose projector has a norm."""

    make_projector = Projection(joins_states=True, use_bias=_HAS_BIAS, make_norm=layer_norm)
    default_layers = (-2, -5, -8, -11, 6)


def _layer(config: HFConfig, layer: object, most: int) -> int:
    """Converts an entry of `vision_feature_layer` to a number of layers: -1 is all, -2 all but the last."""
    if not isinstance(layer, int) or not -most - 1 <= layer <= most:
        raise config.fault("vision_feature_layer", why=f"expected some of the tower's {most} layers")
    return layer % (most + 1)
