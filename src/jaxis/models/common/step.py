"""Code shared by Step 3.5, 3.7 and 5: windows with more heads and ropes of their own, gated heads, clamped experts.

Published config.json files and those that transformers writes have different keys; both are read here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.checkpoint_values import value_of_either
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_settings import settings_of_layer, value_of_layer
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, listed_layer_type
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.glu import CappedGLU
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.prediction_layers import PredictionNames, num_prediction_layers
from jaxis.models.common.sparse_layers import dense_or_sparse, is_sparse_layer

_norm = partial(rms_norm, add_unit_offset=True)


class StepDecoderLayer(PreNormDecoderLayer):
    """Pre-norm layer; `full_attention` creates the attention of layers that see everything."""

    def __init__(
        self, scope: LayerScope, *, full_attention: Callable[..., GroupedQueryAttention] = GroupedQueryAttention
    ) -> None:
        config, index = scope.config, scope.layer_index
        mlp = dense_or_sparse(
            scope,
            _routing(config),
            is_sparse=_is_sparse(scope),
            shared_size=value_of_either(config, "share_expert_dim", "share_expert_dims"),
            use_bias=config.get("mlp_bias", False),
            block_unit=_unit(config, "swiglu_limits_shared", index),
            gated_unit=_unit(config, "swiglu_limits", index),
        )
        super().__init__(scope, self_attn=_attention(scope, full_attention), mlp=mlp)


class StepCausalLM(CausalLM):
    layer_class = StepDecoderLayer
    make_norm = _norm
    # Sparse layers have `moe` and `share_expert`, others `mlp`.
    renames = (
        ("share_expert", "mlp.shared_experts"),
        ("moe.gate", "mlp.gate"),
        ("moe.router_bias", "mlp.gate.e_score_correction_bias"),
        ("moe.experts", "mlp.experts"),
        ("moe.gate_proj", "mlp.experts.gate_proj"),
        ("moe.up_proj", "mlp.experts.up_proj"),
        ("moe.down_proj", "mlp.experts.down_proj"),
    )
    other_names = (("model.language_model", "model"),)  # transformers', which has the text as a part only

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(use_moe=True, use_qk_norm=True, use_head_wise_attn_gate=True, zero_centered=True)
        config.expect_all(norm_expert_weight=True, use_moe_router_bias=True, moe_router_activation="sigmoid")
        config.expect_all(att_impl_type="GQA", sink=False)
        config.expect("use_rope_layers", [], None)
        config.expect("hidden_act", "silu")
        config.ignore("need_fp32_gate", because="the router multiplies in float32 in any case")
        for key in ("moe_layer_offset", "moe_every_n_layer"):
            config.ignore(key, because="moe_layers_enum or mlp_layer_types names the sparse layers")
        for key in ("mtp_layer_types", "mtp_mlp_layer_types", "mtp_per_layer_config"):
            config.ignore(key, because="layers that predict later tokens are read as published files describe them")
        config.ignore("sliding_window", because="layers that see everything do not have it")

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        """Returns the first prediction layer, which has entries in the lists of published files.

        As in SGLang's and vLLM's `Step3p5MTP`, the model hands on hidden states before the final norm; transformers
        does so after it. The head, `shared_head.output`, is a copy of the model's.
        """
        num_layers, kinds = config["num_hidden_layers"], config.get("layer_types")
        if isinstance(kinds, list) and len(kinds) < num_layers + num_prediction_layers(config):
            return None  # as transformers writes config.json
        return PredictionNames.numbered(
            config,
            norm="transformer.shared_head.norm",
            shared=("embed_tokens", "transformer.shared_head.output"),
            layer_index=num_layers,
            make_norm=_norm,
            hands_on_normed=False,
        )


def _attention(scope: LayerScope, full_attention: Callable[..., GroupedQueryAttention]) -> GroupedQueryAttention:
    config = scope.config
    kind = listed_layer_type(config, scope.layer_index, FULL_ATTENTION, SLIDING_ATTENTION) or FULL_ATTENTION
    use_bias, head_dim = config.get("attention_bias", False), config.get("head_dim", 128)
    make = GroupedQueryAttention if kind == SLIDING_ATTENTION else full_attention
    return make(
        scope / "self_attn",
        num_heads=_num_heads(config, scope.layer_index, kind),
        num_kv_heads=value_of_either(config, "num_attention_groups", "num_key_value_heads"),
        head_dim=head_dim,
        rope_settings=rope_of_layer(config, scope.layer_index, kind),
        scale=config.get("query_pre_attn_scalar", head_dim) ** -0.5,
        qkv_bias=use_bias,
        o_bias=use_bias,
        qk_norm=lambda _, size: _norm(scope, size),
        span=AttentionSpan(config["sliding_window"]) if kind == SLIDING_ATTENTION else FULL_CONTEXT,
        output_gate=OutputGate("g_proj", per_head=True),
    )


def _num_heads(config: HFConfig, layer_index: int, kind: str) -> int:
    """Returns H of the layer. Layers with windows may have more heads, which config.json says in one of three ways."""
    common: int = config["num_attention_heads"]
    of_windows = config.get("num_sliding_attention_heads", common)
    other = config.get("attention_other_setting")
    if isinstance(other, HFConfig):
        other.expect("attention_type", SLIDING_ATTENTION)
        for key in ("num_attention_groups", "num_key_value_heads"):
            other.expect(key, value_of_either(config, "num_attention_groups", "num_key_value_heads"))
        for key in ("head_dim", "true_head_dim"):
            other.expect(key, config.get("head_dim", 128))
        of_windows = other.get("num_attention_heads", of_windows)
    own = settings_of_layer(config, layer_index)
    return own.get("num_attention_heads", of_windows if kind == SLIDING_ATTENTION else common)


def rope_of_layer(config: HFConfig, layer_index: int, kind: str) -> RopeConfig:
    """Returns the rope of the layer, by `rope_parameters` of its kind or by lists with an entry per layer.

    With lists, `rope_scaling` applies to layers with full attention only.
    """
    if "rope_scaling" in config:
        config.expect("yarn_only_types", [FULL_ATTENTION])
    else:
        config.ignore("yarn_only_types", because="no rope is stretched")
    is_listed = isinstance(config.get("rope_theta"), list)
    share = value_of_layer(config, "partial_rotary_factors", layer_index)
    return rope_config(
        config,
        kind,
        theta=value_of_layer(config, "rope_theta", layer_index) if is_listed else None,
        default_partial_rotary_factor=1.0 if share is None else share,
    )


def _routing(config: HFConfig) -> Routing:
    return Routing(
        num_experts=value_of_either(config, "moe_num_experts", "n_routed_experts", "num_local_experts"),
        num_experts_per_token=value_of_either(config, "moe_top_k", "num_experts_per_tok"),
        score_function="sigmoid",
        renormalize=True,
        scaling_factor=config.get("moe_router_scaling_factor", 1.0),
        float32_logits=True,
    )


def _unit(config: HFConfig, key: str, layer_index: int) -> CappedGLU | None:
    """Returns the gated unit with the layer's limit; None if the limit is 0, null or missing."""
    limit = value_of_layer(config, key, layer_index)
    return CappedGLU(activation_function("silu"), float(limit)) if limit else None


def _is_sparse(scope: LayerScope) -> bool:
    """Returns whether the layer has experts: by `mlp_layer_types`, `moe_layers_enum`, or else from the fourth on."""
    config = scope.config
    if "mlp_layer_types" in config:
        config.ignore("moe_layers_enum", because="mlp_layer_types names each layer's kind")
        return is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=3)
    listed = config.get("moe_layers_enum")
    if listed is None:
        listed = config.get("moe_layer_list")
    config.ignore("moe_layer_list", because="moe_layers_enum names the sparse layers")
    if listed is None:
        return 3 <= scope.layer_index < config["num_hidden_layers"]
    numbers = listed.split(",") if isinstance(listed, str) else listed
    try:
        return scope.layer_index in {int(number) for number in numbers}
    except (TypeError, ValueError):
        raise config.fault(
            "moe_layers_enum", why="expected the numbers of layers, like '3,4,5': correct the file"
        ) from None
