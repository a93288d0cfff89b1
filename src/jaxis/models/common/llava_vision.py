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
from flax import nnx

from jaxis.config import VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.pixtral import PixtralVision, pixtral_options
from jaxis.models.common.siglip import BASE, PROJECTOR, siglip_names, siglip_options
from jaxis.models.common.vision_layers import num_places, parameter
from jaxis.models.common.vision_positions import Positions, learned
from jaxis.models.common.vision_projector import VisionProjector
from jaxis.models.common.vision_tower import Patches
from jaxis.models.common.vision_transformer import TransformerTower, VisionOptions

_CLIP_TYPE, _SIGLIP_TYPE = "clip_vision_model", "siglip_vision_model"
_CLIP = VisionOptions(768, 3072, 12, 12, 32, "quick_gelu", epsilon=1e-5, norms=("pre_norm",))
_SIGLIP = dataclasses.replace(BASE, norms=())
_SIGLIP_NAMES = siglip_names("vision_tower")


def clip_options(vision: HFConfig) -> VisionOptions:
    """Reads a `vision_config` of CLIP (arXiv:2103.00020). Raises ConfigError if a setting is not supported."""
    options = _CLIP.read(vision, epsilon="layer_norm_eps")
    for key in ("projection_dim", "vocab_size"):
        vision.ignore(key, because="it is about CLIP's other half")
    positions = Positions((num_places(vision, 224, options.patch_size) + 1,), learned, class_place=0)
    return dataclasses.replace(options, positions=positions, class_shape=(options.hidden_size,))


class LlavaVision(TransformerTower):
    """The vision tower of LLaVA 1.5 and Pixtral, with its projector, which may read several layers.

    Attributes:
      default_layers: Layers whose output the projector reads, if config.json does not say.
      is_normed: True if the projector has a norm.
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
    default_layers: ClassVar[Sequence[int]] = (-2,)
    is_normed: ClassVar[bool] = False

    @classmethod
    def names_of(cls, config: HFConfig) -> CheckpointNames:
        kind = config["vision_config"].get("model_type", _CLIP_TYPE)
        return cls.names if kind in (_CLIP_TYPE, _SIGLIP_TYPE) else PixtralVision.names

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        vision = config["vision_config"]
        config.expect("projector_layernorm_eps", 1e-5)
        kind = vision.get("model_type", _CLIP_TYPE)
        # Without a class token, "default" would drop a patch.
        config.expect("vision_feature_select_strategy", "default" if kind == _CLIP_TYPE else "full")
        if kind not in (_CLIP_TYPE, _SIGLIP_TYPE):
            config.expect("vision_feature_layer", -1)
            return pixtral_options(vision)
        options = clip_options(vision) if kind == _CLIP_TYPE else siglip_options(vision, _SIGLIP)
        key = "vision_feature_layers" if "vision_feature_layers" in config else "vision_feature_layer"
        chosen = config.get(key, cls.default_layers)
        layers = [chosen] if isinstance(chosen, int) else chosen
        return dataclasses.replace(options, outputs=[_layer(config, each, options.num_layers) for each in layers])

    @classmethod
    def make_projector(cls, scope: LayerScope, options: VisionOptions) -> VisionProjector:
        num_states, use_bias = max(len(options.outputs), 1), scope.config.get("multimodal_projector_bias", True)
        make_norm = layer_norm if cls.is_normed else None
        return VisionProjector(scope, options, num_states=num_states, use_bias=use_bias, make_norm=make_norm)


class LlavaNextVision(LlavaVision):
    """The vision tower of LLaVA-NeXT, Granite Vision and LLaVA-OneVision, with an embedding of a line's end."""

    prefixes = (*LlavaVision.prefixes, "image_newline")
    ends_lines = True

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        super().__init__(vllm_config, rng)
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        scope.config.expect("use_image_newline_parameter", True)
        self.image_newline = parameter(scope, scope.config["text_config"]["hidden_size"])

    def __call__(self, patches: Patches) -> jax.Array:
        x = super().__call__(patches)
        return jnp.concatenate([x, self.image_newline[...].astype(x.dtype)[None]])


class VipLlavaVision(LlavaVision):
    """The vision tower of ViP-LLaVA, whose projector has a norm."""

    default_layers = (-2, -5, -8, -11, 6)
    is_normed = True


def _layer(config: HFConfig, layer: object, most: int) -> int:
    """Converts an entry of `vision_feature_layer` to a number of layers: -1 is all, -2 all but the last."""
    if not isinstance(layer, int) or not -most - 1 <= layer <= most:
        raise config.fault("vision_feature_layer", why=f"expected some of the tower's {most} layers")
    return layer % (most + 1)
