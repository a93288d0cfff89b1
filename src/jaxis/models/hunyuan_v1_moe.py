"""Hunyuan A13B: norms on heads after the rope, and experts beside one shared block of the same size."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config_with_alpha
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.hunyuan import HUNYUAN_RENAMES, check_hunyuan_keys


class HunYuanMoEV1DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        use_bias, mlp = config.get("attention_bias", False), scope / "mlp"
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        routing = Routing(
            num_experts=_of_layer(scope, "num_experts"),
            num_experts_per_token=_of_layer(scope, "moe_topk"),
            renormalize=True,
            float32_logits=True,
        )
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config_with_alpha(config, head_dim),
                use_bias=use_bias,
                qk_norm=True,
                norm_after_rope=True,
            ),
            mlp=SparseMoE(
                mlp,
                routing,
                intermediate_size=config["intermediate_size"],
                shared_size=config["intermediate_size"],
            ),
        )


class HunYuanMoEV1ForCausalLM(CausalLM):
    layer_class = HunYuanMoEV1DecoderLayer
    renames = (*HUNYUAN_RENAMES, ("mlp.gate.wg", "mlp.gate"), ("mlp.shared_mlp", "mlp.shared_experts"))

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        num_layers = config["num_hidden_layers"]
        for key, value in (("num_shared_expert", 1), ("moe_intermediate_size", config["intermediate_size"])):
            config.expect(key, value, [value] * num_layers)
        check_hunyuan_keys(config)
        config.expect_all(use_mixed_mlp_moe=True, norm_topk_prob=True, use_mla=False, position_embedding_xdrope=False)
        config.expect_all(group_limited_greedy=False, moe_layer_num_skipped=0)
        for key in ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token"):
            config.ignore(key, because="no token is dropped")


def _of_layer(scope: LayerScope, key: str) -> int:
    """Returns a setting that is one number, or a list with one number per layer."""
    value = scope.config[key]
    return value[scope.layer_index] if isinstance(value, list) else value


FAMILY = Family(
    "Hunyuan A13B",
    (HunYuanMoEV1ForCausalLM,),
    "norms on heads after RoPE, 64 experts beside one shared block",
    gguf=("hunyuan-moe",),
)
