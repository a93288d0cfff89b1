"""Image encoder of Gemma 3 (arXiv:2503.19786): SigLIP's transformer, averages of squares, one product."""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.weights import matmul
from jaxis.layers.leaves import rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import averaged, parameter
from jaxis.models.common.towers.options import VisionOptions
from jaxis.models.common.towers.siglip import BASE, PROJECTOR, siglip_names
from jaxis.models.common.towers.tower import VisionTower


class Gemma3Projector(JaxModule):
    """Projection of averages to embeddings of the text."""

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        self.num_merged, size = options.num_merged, options.hidden_size
        self.mm_input_projection_weight = parameter(scope, size, scope.config["text_config"]["hidden_size"])
        self.mm_soft_emb_norm = rms_norm(scope, size, epsilon=options.epsilon, add_unit_offset=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [P, C] -> [P / merge_size ** 2, E]."""
        return matmul(self.mm_soft_emb_norm(averaged(x, self.num_merged)), self.mm_input_projection_weight[...].T)


class Gemma3Vision(VisionTower):
    unused = ("tower.head.",)
    names = siglip_names("vision_tower", PROJECTOR)
    vision = BASE
    make_projector = Gemma3Projector

    @classmethod
    def options(cls, config: HFConfig) -> VisionOptions:
        options = super().options(config)
        assert options.positions is not None
        side = math.isqrt(*options.positions.shape)
        return dataclasses.replace(options, merge_size=side // math.isqrt(config.get("mm_tokens_per_image", 256)))
