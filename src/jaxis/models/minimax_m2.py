"""MiniMax M2: norms over all query heads and all key heads, a rope on half of each head, sigmoid-routed experts."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class MiniMaxM2DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        head_dim = config.get("head_dim", 128)
        rotary_share = config.get("rotary_dim", head_dim) / head_dim
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=head_dim,
                rope_settings=rope_config(
                    config, default_theta=5_000_000.0, default_partial_rotary_factor=rotary_share
                ),
                qk_norm=lambda heads, head_dim: rms_norm(scope, heads * head_dim),
            ),
            mlp=SparseMoE(
                scope / "mlp",
                Routing.of(config, score_function="sigmoid", renormalize=True),
                intermediate_size=config["intermediate_size"],
                use_selection_bias=True,
            ),
        )


class MiniMaxM2ForCausalLM(CausalLM):
    layer_class = MiniMaxM2DecoderLayer
    router_aux_loss_coef = 0.001
    renames = (("block_sparse_moe", "mlp"), ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"))

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True)
        config.expect_all(norm_topk_prob=True, shared_intermediate_size=0)
        config.expect("attn_type_list", [1] * config["num_hidden_layers"])  # 0 was MiniMax M1's lightning attention
        config.ignore("use_mtp", "mtp_transformer_layers", because="layers that predict later tokens are not loaded")


FAMILY = Family(
    "MiniMax M2 to M2.7",
    (MiniMaxM2ForCausalLM,),
    "256 experts by sigmoid with a selection bias, partial RoPE, norms on all heads together",
    formats=("fp8",),
    gguf=("minimax-m2",),
    names={"minimax_m2": {"num_mtp_modules": "num_nextn_predict_layers"}},
)
