"""A family's vision tower: the vision transformer that families share, and a projector to the text.

Parameters have the same names in all families; `names` is the only mapping to a checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config import VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.interfaces import LoadableWithIterator
from jaxis.models.common.towers.layers import vision_scope
from jaxis.models.common.towers.options import Make, VisionOptions
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.transformer import VisionTransformer

_NOT_OF_TOWERS = "the tower has no such setting: it is the processor's, a head's or a video's"


class VisionTower(JaxModule, LoadableWithIterator):
    """Computes embeddings of the text model from a view of an image, by a `VisionTransformer` and a projector.

    Its parameters are the checkpoint's besides those of the text. A family declares the names, `vision` and
    `make_projector`. The constructor raises a `ConfigError` for settings that are not supported.

    Attributes:
      prefixes: Name prefixes of the tower's tensors.
      unused: Name prefixes of tensors among them that do not affect embeddings and are skipped.
      names: Renames from checkpoint names to parameter names. They apply before `prefixes` and `unused`, which
        therefore have parameter names.
      vision: Options of the transformer.
      make_projector: Factory of the projector.
      tower_class: Class of the transformer, or of what takes its place.
      outside: Value of pixels beside the image, before the processor's scale, where it is none of a pixel: views have
        a fourth channel then, which is 0 there; None: views have three.
      ends_lines: True if an embedding of the end of a line of patches follows all others.
      num_additions: Number of the text's first layers that receive additions at an image's tokens (DeepStack,
        arXiv:2406.04334). The additions follow the embeddings.
      patch_size, merge_size, num_frames: Options that the encoder needs.
      checkpoint_names: Table of names of this model's checkpoint.
      tower: The transformer.
      projector: Module that maps the transformer's states, joined to one, to [P / merge_size ** 2, E].

    Args:
      vllm_config: Configuration whose config.json has the keys of the text too.
      rng: Source of initial weights.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("tower.", "projector.")
    unused: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[CheckpointNames] = CheckpointNames()
    vision: ClassVar[VisionOptions]
    make_projector: ClassVar[Make] = Projection()
    tower_class: ClassVar[Make] = VisionTransformer
    outside: ClassVar[float | None] = None
    ends_lines: ClassVar[bool] = False
    num_additions: int = 0

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs) -> None:
        self.checkpoint_names = self.names_of(vllm_config.model_config.hf_config)
        scope = LayerScope(vllm_config, rng, vllm_config.quant_config, names=self.checkpoint_names)
        of_tower = vision_scope(scope / "tower")
        for key in ("vision_use_head", "tie_word_embeddings", "temporal_patch_size", "tokens_per_second"):
            of_tower.config.ignore(key, because=_NOT_OF_TOWERS)
        options = self.options(scope.config)
        self.patch_size, self.merge_size, self.num_frames = options.patch_size, options.merge_size, options.num_frames
        self.tower = type(self).tower_class(of_tower, options)
        self.projector = type(self).make_projector(scope / "projector", options)
        self.add_parts(scope)

    def add_parts(self, scope: LayerScope) -> None:
        """Creates modules besides the transformer and the projector."""

    @classmethod
    def names_of(cls, config: HFConfig) -> CheckpointNames:
        """Returns the names of a config's checkpoint; those of its kind if `names` has several."""
        del config
        return cls.names

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        """Returns the options of a config.json. Raises ConfigError if a setting is not supported."""
        return cls.vision.read(config)

    def __call__(self, patches: Patches) -> jax.Array:
        """Returns embeddings [P / merge_size ** 2, E * (1 + num_additions)] of merged patches in order, padding last.

        With `ends_lines`, one more row follows.
        """
        return self.projector(jnp.concatenate(self.tower(patches), axis=-1))

    @classmethod
    def has_tensor(cls, name: str) -> bool:
        """True if a checkpoint's tensor of this name is the tower's."""
        name = cls._plain_name(name)
        return name.startswith(cls.prefixes) and not name.startswith(cls.unused)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Fills the tower's parameters; ignores other tensors."""
        return super().load_weights((self._plain_name(name), each) for name, each in weights if self.has_tensor(name))

    @classmethod
    def _plain_name(cls, name: str) -> str:
        # transformers' names; files have the text and the tower on one level.
        return cls.names.name_here(name.removeprefix("model."))
