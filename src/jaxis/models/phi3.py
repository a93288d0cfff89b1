"""Phi-3 (arXiv:2404.14219), Phi-3.5 and Phi-4 (dense, text): the Llama layer with packed projections and LongRoPE."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import uniform_span
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class Phi3DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                packing=PACKED,
                span=uniform_span(scope.config, scope.config.get("sliding_window")),
            ),
            mlp=GatedMLP(scope / "mlp", packed_gate_up=True),
        )


class Phi3ForCausalLM(CausalLM):
    layer_class = Phi3DecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1)
        config.expect("interpolate_factor", 1)
        # In the family's first release "yarn" meant LongRoPE; it means something else now.
        if rope_config(config).rope_type not in ("default", "longrope"):
            key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
            raise config.fault(key, why="expected the type 'longrope' or none")


FAMILY = Family(
    "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    (Phi3ForCausalLM,),
    "packed projections, LongRoPE, partial RoPE",
    gguf=("phi3",),
)
