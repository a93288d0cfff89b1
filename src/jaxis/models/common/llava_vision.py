"""Image encoders of LLaVA 1.5 (arXiv:2310.03744) and related models.

A projector follows CLIP's, SigLIP's or Pixtral's transformer without its last layers. It reads several layers in
ViP-LLaVA (arXiv:2312.00784) and in Granite Vision (arXiv:2502.09927).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import layer_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.pixtral import PixtralTower
from jaxis.models.common.siglip import SiglipEncoder, SiglipTower
from jaxis.models.common.vision_layers import (
    CLASS_ROWS,
    PatchConvolution,
    PositionTable,
    VisionProjector,
    one_side,
    parameter,
    vision_scope,
)
from jaxis.models.common.vision_tower import Patches, VisionTower

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig

_CLIP_DEFAULTS = {
    **{"intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
_SIGLIP_DEFAULTS = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 16},
}


class ClipEmbeddings(JaxModule):
    """Embeddings of patches and of the class token, plus embeddings of their positions.

    A view has `side` patches of a side.
    """

    def __init__(self, scope: LayerScope, patch_size: int, side: int, num_features: int) -> None:
        self.side = side
        self.class_embedding = parameter(scope, num_features)
        self.patch_embedding = PatchConvolution(scope / "patch_embedding", patch_size, num_features)
        self.position_embedding = PositionTable(scope / "position_embedding", side * side + 1, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """Patches -> [P + CLASS_ROWS, C]. The class token is the row after the last real patch."""
        places = 1 + patches.rows * self.side + patches.columns
        x = self.patch_embedding(patches.pixels) + self.position_embedding(places)
        whole = self.class_embedding[...] + self.position_embedding(jnp.zeros((), jnp.int32))
        rows = jnp.concatenate([x, jnp.zeros((CLASS_ROWS, x.shape[-1]), x.dtype)])
        return rows.at[patches.num_patches].set(whole.astype(x.dtype))


class ClipTower(JaxModule):
    """CLIP's vision transformer (arXiv:2103.00020)."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        config.expect("num_channels", 3)
        config.expect("attention_dropout", 0.0)
        for key in ("projection_dim", "vocab_size"):
            config.ignore(key, because="it is about CLIP's other half")
        self.patch_size = one_side(config.get("patch_size", 32), config.source)
        self.hidden_size: int = config.get("hidden_size", 768)
        side = one_side(config.get("image_size", 224), config.source) // self.patch_size
        self.embeddings = ClipEmbeddings(scope / "embeddings", self.patch_size, side, self.hidden_size)
        epsilon = config.get("layer_norm_eps", _CLIP_DEFAULTS["layer_norm_eps"])
        self.pre_layrnorm = layer_norm(scope, self.hidden_size, epsilon=epsilon)
        self.encoder = SiglipEncoder(scope / "encoder", self.hidden_size, _CLIP_DEFAULTS)

    def states(self, patches: Patches, num_layers: int) -> list[jax.Array]:
        """Patches -> states [P, C] before the first layer and after each of the first `num_layers` layers."""
        x = self.pre_layrnorm(self.embeddings(patches))
        states = self.encoder(x, patches.num_patches + 1, num_layers)
        return [each[: patches.pixels.shape[0]] for each in states]


class LlavaVision(VisionTower):
    """The vision tower of LLaVA 1.5 and Pixtral, with its projector, which may read several layers."""

    config_keys = (
        *("vision_config", "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy"),
        *("vision_feature_layers", "multimodal_projector_bias", "text_config.hidden_size"),
    )
    prefixes = ("vision_tower.", "multi_modal_projector.")
    unused = ("vision_tower.post_layernorm.", "vision_tower.head.", "vision_tower.embeddings.position_ids")
    names = CheckpointNames((("vision_tower.vision_model", "vision_tower"),))
    # Layers whose output the projector reads, if config.json does not say.
    default_layers: ClassVar[Sequence[int]] = (-2,)
    is_normed: ClassVar[bool] = False

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config)
        config, of_tower = scope.config, vision_scope(scope / "vision_tower")
        kind = of_tower.config.get("model_type", "clip_vision_model")
        self.vision_tower: ClipTower | SiglipTower | PixtralTower
        if kind == "clip_vision_model":
            config.expect("vision_feature_select_strategy", "default")
            self.vision_tower = ClipTower(of_tower)
        elif kind == "siglip_vision_model":
            # Without a class token, "default" would drop a patch.
            config.expect("vision_feature_select_strategy", "full")
            self.vision_tower = SiglipTower(of_tower, (kind,), _SIGLIP_DEFAULTS, is_normed=False)
        else:
            config.expect("vision_feature_select_strategy", "full")
            config.expect("vision_feature_layer", -1)
            self.vision_tower = PixtralTower(of_tower)
        tower = self.vision_tower
        most = 0 if isinstance(tower, PixtralTower) else len(tower.encoder.layers)
        key = "vision_feature_layers" if "vision_feature_layers" in config else "vision_feature_layer"
        chosen = config.get(key, self.default_layers)
        self.after_layers = [_layer(config, each, most) for each in ([chosen] if isinstance(chosen, int) else chosen)]
        self.patch_size, self.merge_size = tower.patch_size, 1
        self.multi_modal_projector = VisionProjector(
            scope / "multi_modal_projector",
            tower.hidden_size * len(self.after_layers),
            use_bias=config.get("multimodal_projector_bias", True),
            make_norm=layer_norm if self.is_normed else None,
        )

    def __call__(self, patches: Patches) -> jax.Array:
        tower = self.vision_tower
        if isinstance(tower, PixtralTower):
            return self.multi_modal_projector(tower(patches))
        states = tower.states(patches, max(self.after_layers))
        return self.multi_modal_projector(jnp.concatenate([states[i] for i in self.after_layers], axis=-1))


class LlavaNextVision(LlavaVision):
    """The vision tower of LLaVA-NeXT, Granite Vision and LLaVA-OneVision, with an embedding of a line's end."""

    config_keys = (*LlavaVision.config_keys, "use_image_newline_parameter")
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

    config_keys = (*LlavaVision.config_keys, "projector_layernorm_eps")
    names = CheckpointNames((*LlavaVision.names.renames, ("projector_layernorm", "pre_norm")))
    default_layers = (-2, -5, -8, -11, 6)
    is_normed = True

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        super().__init__(vllm_config, rng)
        LayerScope(vllm_config, rng).config.expect("projector_layernorm_eps", 1e-5)


def _layer(config: HFConfig, layer: object, most: int) -> int:
    """Converts an entry of `vision_feature_layer` to a number of layers: -1 is all, -2 all but the last."""
    if not isinstance(layer, int) or not -most - 1 <= layer <= most:
        raise ConfigError(
            f"{config.source} has vision_feature_layer={layer!r}; expected one of the tower's {most} layers"
        )
    return layer % (most + 1)
