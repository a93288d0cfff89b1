"""Jamba (arXiv:2403.19887): Mamba layers, some of attention without positions, and experts in every other block."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mamba1 import Mamba1, Mamba1Sizes, time_step_rank
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mamba import check_mamba_keys, ignore_rope


class JambaDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        if _has_attention(scope.config, scope.layer_index):
            name, mixer = "self_attn", GroupedQueryAttention(scope / "self_attn", use_rope=False)
        else:
            name, mixer = "mamba", _mamba(scope / "mamba")
        super().__init__(scope, self_attn=mixer, mlp=_feed_forward(scope), mixer_name=name)


class JambaForCausalLM(CausalLM):
    layer_class = JambaDecoderLayer
    router_aux_loss_coef = 0.001
    renames = (
        ("model.final_layernorm", "model.norm"),
        ("pre_ff_layernorm", "post_attention_layernorm"),
        ("feed_forward", "mlp"),
        ("mlp.router", "mlp.gate"),
    )
    unadaptable = ("dt_proj",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_mamba_keys(config)
        ignore_rope(config)
        config.expect_all(hidden_act="silu", sliding_window=None, layers_block_type=_block_types(config))
        config.ignore("layers_num_experts", because="periods of layers say which have experts")
        for key in ("num_experts_per_tok", "expert_layer_period", "expert_layer_offset"):
            config.ignore(key, because="it matters only with several experts")
        config.ignore("num_attention_heads", "num_key_value_heads", because="there may be no layer of attention")


def _mamba(scope: LayerScope) -> Mamba1:
    config = scope.config
    sizes = Mamba1Sizes(
        num_channels=config.get("mamba_expand", 2) * config["hidden_size"],
        state_size=config.get("mamba_d_state", 16),
        time_step_rank=time_step_rank(config, "mamba_dt_rank"),
        conv_width=config.get("mamba_d_conv", 4),
    )
    return Mamba1(
        scope,
        sizes,
        conv_bias=config.get("mamba_conv_bias", True),
        use_bias=config.get("mamba_proj_bias", False),
        norm_epsilon=config["rms_norm_eps"],
    )


def _feed_forward(scope: LayerScope) -> FeedForward:
    config, num_experts = scope.config, scope.config.get("num_experts", 16)
    block = scope / "mlp"
    if num_experts == 1 or not _has_experts(config, scope.layer_index):
        return GatedMLP(block)
    routing = Routing(num_experts=num_experts, num_experts_per_token=config.get("num_experts_per_tok", 2))
    return SparseMoE(block, routing, intermediate_size=config["intermediate_size"])


def _has_attention(config: HFConfig, layer_index: int) -> bool:
    return _is_one_of_a_period(config, layer_index, "attn_layer", default_period=8, default_offset=4)


def _has_experts(config: HFConfig, layer_index: int) -> bool:
    return _is_one_of_a_period(config, layer_index, "expert_layer", default_period=2, default_offset=1)


def _is_one_of_a_period(
    config: HFConfig, layer_index: int, name: str, *, default_period: int, default_offset: int
) -> bool:
    """Returns whether the layer is the one in its period, by `name`'s period and offset in config.json.

    Raises ConfigError if the period or the offset is invalid.
    """
    period, offset = config.get(f"{name}_period", default_period), config.get(f"{name}_offset", default_offset)
    if type(period) is not int or type(offset) is not int or not 0 <= offset < period:
        why = "expected an offset from 0 to less than the period: correct the file"
        raise config.fault(f"{name}_period", f"{name}_offset", why=why)
    return layer_index % period == offset


def _block_types(config: HFConfig) -> list[str]:
    """Returns the types of the layers, which some config.json files also list."""
    layers = range(config["num_hidden_layers"])
    return ["attention" if _has_attention(config, layer) else "mamba" for layer in layers]


FAMILY = Family(
    "Jamba, Jamba 1.5, Jamba2, Jamba Reasoning",
    (JambaForCausalLM,),
    "Mamba with norms on its time steps, B and C; attention without RoPE in one of eight layers or fewer; 16 "
    "experts in every other layer, or none",
    gguf=("jamba",),
)
