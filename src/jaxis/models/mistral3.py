"""Ministral 3: Mistral with queries scaled by position; and Mistral Small 3.1 to 4 and Medium 3.5, which see images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mistral import Ministral3DecoderLayer, Mistral4DecoderLayer
from jaxis.models.common.pixtral import PixtralProjector, PixtralTower
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.vision_layers import vision_scope
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig


class Ministral3ForCausalLM(CausalLM):
    layer_class = Ministral3DecoderLayer


def _layer_of_text(scope: LayerScope) -> PreNormDecoderLayer:
    is_mistral4 = scope.config.get("model_type") == "mistral4"
    return Mistral4DecoderLayer(scope) if is_mistral4 else Ministral3DecoderLayer(scope)


class Mistral3Vision(VisionTower):
    """The vision tower of Mistral 3, with its projector.

    Args:
      vllm_config: Its config is what `config_keys` name.
      rng: For the initial weights.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

    config_keys = (
        *("vision_config", "projector_hidden_act", "vision_feature_layer", "spatial_merge_size"),
        *("multimodal_projector_bias", "text_config.hidden_size", "text_config.rms_norm_eps"),
    )
    prefixes = ("vision_tower.", "multi_modal_projector.")

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng)
        scope.config.expect("vision_feature_layer", -1, [-1])
        self.vision_tower = PixtralTower(vision_scope(scope / "vision_tower"))
        self.multi_modal_projector = PixtralProjector(scope / "multi_modal_projector", self.vision_tower.hidden_size)
        self.patch_size, self.merge_size = self.vision_tower.patch_size, self.multi_modal_projector.merge_size

    def __call__(self, patches: Patches) -> jax.Array:
        """See `VisionTower`."""
        return self.multi_modal_projector(self.vision_tower(patches))


class Mistral3ForConditionalGeneration(TextPart, CausalLM):
    """The text of the multimodal checkpoints, and what encodes images for it."""

    tower = Mistral3Vision
    layer_class = _layer_of_text
    text_model_types = ("mistral", "ministral3", "mistral4")
    other_parts = ("vision_tower", "multi_modal_projector")
    other_keys = (
        *("vision_config", "image_token_index", "projector_hidden_act", "vision_feature_layer", "spatial_merge_size"),
        *("multimodal_projector_bias",),
    )


FAMILY = Family(
    "Ministral 3; Mistral Small 3.1, 3.2, Medium 3.5",
    (Ministral3ForCausalLM, Mistral3ForConditionalGeneration),
    "queries scaled by position (Ministral 3), YaRN; Pixtral's vision tower",
    formats=("fp8",),
    gguf=("mistral3",),
)
