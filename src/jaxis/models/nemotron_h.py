"""Nemotron-H and Nemotron 3: each layer is one of Mamba2, attention without positions, a dense block or experts."""

from __future__ import annotations

from typing import ClassVar

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import MixerLayer
from jaxis.layers.glu import Ungated
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mamba2 import Mamba2, Mamba2Sizes
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.moe import ROUTER_BIAS, SparseMoE
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.mamba import MAMBA_TENSOR_NAMES, check_mamba_keys, ignore_rope
from jaxis.models.common.sparse_layers import ignore_sizes_of_other_layers, sigmoid_routing


class NemotronHDecoderLayer(MixerLayer):
    def __init__(self, scope: LayerScope) -> None:
        make = _MIXERS[_layer_kinds(scope.config)[scope.layer_index]]
        super().__init__(scope, make(scope / "mixer"), epsilon=scope.config.get("layer_norm_epsilon", 1e-5))


class NemotronHForCausalLM(CausalLM):
    layer_class = NemotronHDecoderLayer
    decoder_name = "backbone"
    tensor_names: ClassVar = MAMBA_TENSOR_NAMES

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_mamba_keys(config)
        ignore_rope(config)
        ignore_sizes_of_other_layers(config)
        config.expect("rms_norm_eps", config.get("layer_norm_epsilon", 1e-5))
        config.expect("mamba_hidden_act", "silu")
        config.expect("mamba_proj_bias", config.get("use_bias", False))
        config.expect("attention_bias", False)
        config.expect("sliding_window", None)
        config.expect("n_shared_experts", 1)
        for key in _KEYS_OF_ONE_KIND:
            config.ignore(key, because="layers of another kind do not have it")
        config.ignore("expand", because="Mamba2's heads and their size are given")
        config.ignore("moe_shared_expert_overlap", because="it says what runs at the same time")
        for key in ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"):
            config.ignore(key, because="layers that draft tokens are not loaded")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            norm=rms_norm(scope, epsilon=scope.config.get("layer_norm_epsilon", 1e-5)),
            num_layers=len(_layer_kinds(scope.config)),
            prediction_modules=("mtp.",),
        )


def _mamba(scope: LayerScope) -> Mamba2:
    config = scope.config
    use_bias = config.get("use_bias", False)
    sizes = Mamba2Sizes(
        num_heads=config.get("mamba_num_heads", 128),
        head_dim=config.get("mamba_head_dim", 64),
        state_size=config.get("ssm_state_size", 128),
        num_groups=config.get("n_groups", 8),
        conv_width=config.get("conv_kernel", 4),
    )
    return Mamba2(
        scope,
        sizes,
        conv_bias=config.get("use_conv_bias", True),
        in_bias=use_bias,
        out_bias=use_bias,
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
    )


def _attention(scope: LayerScope) -> GroupedQueryAttention:
    return GroupedQueryAttention(scope, head_dim=scope.config.get("attention_head_dim", 128), use_rope=False)


def _mlp(scope: LayerScope, intermediate_size: int | None = None) -> UngatedMLP:
    config = scope.config
    return UngatedMLP(
        scope,
        activation=activation_function(config.get("mlp_hidden_act", "relu2")),
        intermediate_size=intermediate_size,
        use_bias=config.get("mlp_bias", False),
    )


def _moe(scope: LayerScope) -> SparseMoE:
    config = scope.config
    config.expect("mlp_bias", False)
    routing = sigmoid_routing(
        config,
        config["n_routed_experts"],
        renormalize=config.get("norm_topk_prob", True),
        scaling_factor=config.get("routed_scaling_factor", 1.0),
    )
    return SparseMoE(
        scope,
        routing=routing,
        intermediate_size=config["moe_intermediate_size"],
        gated_unit=Ungated(activation_function(config.get("mlp_hidden_act", "relu2"))),
        shared_experts=_mlp(scope / "shared_experts", config["moe_shared_expert_intermediate_size"]),
        selection_bias_name=ROUTER_BIAS,
        latent_size=config.get("moe_latent_size"),
    )


# What only attention, Mamba2, dense blocks or experts read, since a model may lack any of them.
_KEYS_OF_ONE_KIND = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_head_dim"),
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_bias", "use_conv_bias"),
    *("mlp_hidden_act", "mlp_bias", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "norm_topk_prob", "routed_scaling_factor"),
)
_MIXERS = {"M": _mamba, "*": _attention, "-": _mlp, "E": _moe}
_LETTERS = {
    **{"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"},
    **{"mlp": "-", "moe": "E"},
}


def _layer_kinds(config: HFConfig) -> str:
    """A letter for each layer, as in `hybrid_override_pattern`; config.json may list names instead.

    Raises:
      ConfigError: There is no such key, a layer has an unknown kind, or there are not as many as there are layers.
    """
    listed = config.get("layers_block_type")
    if listed is None:
        kinds = config["hybrid_override_pattern"]
    else:
        config.ignore("hybrid_override_pattern", because="layers_block_type names each layer's kind")
        kinds = "".join(_LETTERS.get(name, "?") for name in listed)
    if not set(kinds) <= set(_MIXERS):
        raise ConfigError(
            f"{config.source} has layers of an unknown kind in {kinds if listed is None else listed!r}, expected those "
            f"of {', '.join(_MIXERS)} or {', '.join(_LETTERS)}"
        )
    if config.get("num_hidden_layers", len(kinds)) != len(kinds):
        raise ConfigError(
            f"{config.source} names the kinds of {len(kinds)} layers, but has "
            f"num_hidden_layers={config['num_hidden_layers']}: correct the file"
        )
    return kinds
