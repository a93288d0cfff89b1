"""What encodes images for LLaVA 1.5 (arXiv:2310.03744) and its kin: CLIP's, SigLIP's or Pixtral's transformer, cut off
before its last layers, and a projector; ViP-LLaVA's (arXiv:2312.00784) takes what several layers make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """Patches, the class token, and where they are.

    Args:
      scope: The embeddings' scope.
      patch_size: Pixels of a side of a patch.
      side: Patches of a side of a view.
      num_features: C.
    """

    def __init__(self, scope: LayerScope, patch_size: int, side: int, num_features: int) -> None:
        self.side = side
        self.class_embedding = parameter(scope, num_features)
        self.patch_embedding = PatchConvolution(scope / "patch_embedding", patch_size, num_features)
        self.position_embedding = PositionTable(scope / "position_embedding", side * side + 1, num_features)

    def __call__(self, patches: Patches) -> jax.Array:
        """The patches -> [P + CLASS_ROWS, C]: the class token is the row after those that are no padding."""
        places = 1 + patches.rows * self.side + patches.columns
        x = self.patch_embedding(patches.pixels) + self.position_embedding(places)
        whole = self.class_embedding[...] + self.position_embedding(jnp.zeros((), jnp.int32))
        rows = jnp.concatenate([x, jnp.zeros((CLASS_ROWS, x.shape[-1]), x.dtype)])
        return rows.at[patches.num_patches].set(whole.astype(x.dtype))


class ClipTower(JaxModule):
    """CLIP's vision transformer (arXiv:2103.00020).

    Args:
      scope: The tower's scope, with the checkpoint's `vision_config` as its config.

    Raises:
      ConfigError: The config asks for something that is not supported.
    """

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
        """The patches -> [P, C], as they are before the first layer and after each of so many."""
        x = self.pre_layrnorm(self.embeddings(patches))
        states = self.encoder(x, patches.num_patches + 1, num_layers)
        return [each[: patches.pixels.shape[0]] for each in states]


class LlavaVision(VisionTower):
    """The vision tower of LLaVA 1.5 and Pixtral, with its projector.

    Args:
      vllm_config: Its config is what `config_keys` name.
      rng: For the initial weights.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

    config_keys = (
        *("vision_config", "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy"),
        *("multimodal_projector_bias", "text_config.hidden_size"),
    )
    prefixes = ("vision_tower.", "multi_modal_projector.")
    unused = ("vision_tower.post_layernorm.", "vision_tower.head.", "vision_tower.embeddings.position_ids")
    names = CheckpointNames((("vision_tower.vision_model", "vision_tower"),))

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng)
        config, of_tower = scope.config, vision_scope(scope / "vision_tower")
        kind = of_tower.config.get("model_type", "clip_vision_model")
        self.vision_tower: ClipTower | SiglipTower | PixtralTower
        if kind == "clip_vision_model":
            config.expect("vision_feature_select_strategy", "default")
            self.vision_tower = ClipTower(of_tower)
            num_layers = len(self.vision_tower.encoder.layers)
        elif kind == "siglip_vision_model":
            # Without a class token, "default" would drop a patch.
            config.expect("vision_feature_select_strategy", "full")
            self.vision_tower = SiglipTower(of_tower, (kind,), _SIGLIP_DEFAULTS, is_normed=False)
            num_layers = len(self.vision_tower.encoder.layers)
        else:
            config.expect("vision_feature_select_strategy", "full")
            config.expect("vision_feature_layer", -1)
            self.vision_tower = PixtralTower(of_tower)
            num_layers = 0
        self.num_layers = _num_layers(config, num_layers)
        self.patch_size, self.merge_size = self.vision_tower.patch_size, 1
        use_bias = config.get("multimodal_projector_bias", True)
        self.multi_modal_projector = VisionProjector(
            scope / "multi_modal_projector", self.vision_tower.hidden_size, use_bias=use_bias
        )

    def __call__(self, patches: Patches) -> jax.Array:
        """See `VisionTower`."""
        tower = self.vision_tower
        x = tower(patches) if isinstance(tower, PixtralTower) else tower.states(patches, self.num_layers)[-1]
        return self.multi_modal_projector(x)


class LlavaNextVision(LlavaVision):
    """That of LLaVA-NeXT and LLaVA-OneVision: LLaVA 1.5's, and an embedding for the end of a line.

    Args:
      vllm_config: Its config is what `config_keys` name.
      rng: For the initial weights.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

    config_keys = (*LlavaVision.config_keys, "use_image_newline_parameter")
    prefixes = (*LlavaVision.prefixes, "image_newline")
    ends_lines = True

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        super().__init__(vllm_config, rng)
        scope = LayerScope(vllm_config, rng)
        scope.config.expect("use_image_newline_parameter", True)
        self.image_newline = parameter(scope, scope.config["text_config"]["hidden_size"])

    def __call__(self, patches: Patches) -> jax.Array:
        """See `VisionTower`."""
        x = super().__call__(patches)
        return jnp.concatenate([x, self.image_newline[...].astype(x.dtype)[None]])


class VipLlavaVision(VisionTower):
    """The vision tower of ViP-LLaVA, with its projector.

    Args:
      vllm_config: Its config is what `config_keys` name.
      rng: For the initial weights.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

    config_keys = (
        *("vision_config", "projector_hidden_act", "projector_layernorm_eps", "text_config.hidden_size"),
        *("vision_feature_layer", "vision_feature_layers"),
    )
    prefixes = LlavaVision.prefixes
    unused = LlavaVision.unused
    names = CheckpointNames((*LlavaVision.names.renames, ("projector_layernorm", "pre_norm")))

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        scope = LayerScope(vllm_config, rng)
        config = scope.config
        config.expect("projector_layernorm_eps", 1e-5)
        self.vision_tower = ClipTower(vision_scope(scope / "vision_tower"))
        key = "vision_feature_layers" if "vision_feature_layers" in config else "vision_feature_layer"
        chosen = config.get(key, [-2, -5, -8, -11, 6])
        most = len(self.vision_tower.encoder.layers)
        self.after_layers = [_layer(config, each, most) for each in (chosen if isinstance(chosen, list) else [chosen])]
        self.patch_size, self.merge_size = self.vision_tower.patch_size, 1
        num_features = self.vision_tower.hidden_size * len(self.after_layers)
        self.multi_modal_projector = VisionProjector(
            scope / "multi_modal_projector", num_features, make_norm=layer_norm
        )

    def __call__(self, patches: Patches) -> jax.Array:
        """See `VisionTower`."""
        states = self.vision_tower.states(patches, max(self.after_layers))
        return self.multi_modal_projector(jnp.concatenate([states[i] for i in self.after_layers], axis=-1))


def _num_layers(config: HFConfig, most: int) -> int:
    """How many of a tower's layers `vision_feature_layer` says to run: -1 is all, -2 all but the last."""
    return _layer(config, config.get("vision_feature_layer", -2), most)


def _layer(config: HFConfig, layer: object, most: int) -> int:
    if not isinstance(layer, int) or not -most - 1 <= layer <= most:
        raise ConfigError(
            f"{config.source} has vision_feature_layer={layer!r}; expected one of the tower's {most} layers"
        )
    return layer % (most + 1)
