"""Granite 3 MoE: Granite's layer with a mixture of experts, with one tensor per projection.

Granite MoE Shared adds a block that every token goes through, and Granite MoE SWA windows and attention sinks.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.granite import (
    GRANITE_MOE_RENAMES,
    GraniteBaseDecoderLayer,
    GraniteCausalLM,
    granite_moe,
    granite_window_arguments,
)


class GraniteMoeDecoderLayer(GraniteBaseDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, granite_moe(scope / "mlp"))


class GraniteMoeSharedDecoderLayer(GraniteBaseDecoderLayer):
    """`x = x + multiplier * self_attn(norm(x))`
    `x = x + multiplier * (experts(norm(x)) + shared_mlp(norm(x)))`
    """

    def __init__(self, scope: LayerScope, **attention: Any) -> None:
        super().__init__(scope, granite_moe(scope / "mlp"), **attention)
        size = scope.config.get("shared_intermediate_size", 0)
        self.shared_mlp = None
        if size:
            self.shared_mlp = GatedMLP(scope / "shared_mlp", intermediate_size=size, packed_gate_up=True)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        kv_cache, attended = self.mixer(kv_cache, self.input_layernorm(x), metadata)
        x = x + scaled(attended, self.residual_multiplier)
        normalised = self.post_attention_layernorm(x)
        fed = self.mlp(normalised, metadata)
        if self.shared_mlp is not None:
            fed = fed + self.shared_mlp(normalised)
        return kv_cache, x + scaled(fed, self.residual_multiplier)


class GraniteMoeSWADecoderLayer(GraniteMoeSharedDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, **granite_window_arguments(scope))


class GraniteMoeForCausalLM(GraniteCausalLM):
    layer_class = GraniteMoeDecoderLayer
    router_aux_loss_coef = 0.001
    renames = GRANITE_MOE_RENAMES
    supported_values = (("norm_topk_prob", True),)


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    layer_class = GraniteMoeSharedDecoderLayer
    renames = (
        *GRANITE_MOE_RENAMES,
        ("shared_mlp.input_linear", "shared_mlp.gate_up_proj"),
        ("shared_mlp.output_linear", "shared_mlp.down_proj"),
    )


class GraniteMoeSWAForCausalLM(GraniteMoeSharedForCausalLM):
    layer_class = GraniteMoeSWADecoderLayer
    # Names in files of newer versions of the reference.
    other_names = (
        ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    )


FAMILY = Family(
    "Granite 3 MoE",
    (GraniteMoeForCausalLM,),
    "as Granite 3, with experts stored in one tensor a projection",
    gguf=("granitemoe",),
)

SHARED_FAMILY = Family(
    "Granite MoE Shared, Granite MoE SWA",
    (GraniteMoeSharedForCausalLM, GraniteMoeSWAForCausalLM),
    "as Granite 3 MoE, with a block that every token goes through; SWA: as Granite SWA",
    gguf=("granitemoe",),
)
