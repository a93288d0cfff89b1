"""MiMo V2 Flash: windows and attention sinks in five of six layers, values smaller than keys, experts by sigmoid."""

from __future__ import annotations

from typing import Any

import jax

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_settings import value_of_layer
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.norm import Norm
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.sparse_layers import dense_or_sparse, is_sparse_layer, sigmoid_routing


class MiMoV2FlashDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        routing = sigmoid_routing(config)
        super().__init__(
            scope,
            self_attn=_attention(scope),
            mlp=dense_or_sparse(scope, routing, is_sparse=_is_sparse(scope), num_shared_experts=0),
        )


def _epsilon(config: HFConfig) -> float:
    """Returns the epsilon of the norms, under its published name or the reference's."""
    epsilon = config.get("rms_norm_eps", config.get("layernorm_epsilon", 1e-5))
    config.expect("layernorm_epsilon", epsilon)
    return epsilon


def _norm(scope: LayerScope) -> Norm:
    return rms_norm(scope, epsilon=_epsilon(scope.config))


class MiMoV2FlashForCausalLM(CausalLM):
    layer_class = MiMoV2FlashDecoderLayer
    make_norm = _norm
    default_prediction_layers = 3
    prediction_modules = ("model.mtp.",)
    renames = (("self_attn.attention_sink_bias", "self_attn.sinks"),)
    # A name in layers that predict later tokens.
    other_names = (("pre_mlp_layernorm", "post_attention_layernorm"),)
    supported_values = (("n_shared_experts", None, 0),)
    ignored_keys = (("attention_chunk_size", "windows slide: sliding_window_size says how far they reach"),)

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        """Returns the first of three prediction layers: with a window, and dense, as in SGLang's `MiMoV2MTP`."""
        return PredictionNames.numbered(
            config,
            module="model.mtp.layers.0",
            norm="final_layernorm",
            shared=(),
            layer_index=config["num_hidden_layers"],
            make_norm=_norm,
        )


def _predicts(scope: LayerScope) -> bool:
    """Returns whether the layer comes after the model's own layers, to predict later tokens."""
    return scope.layer_index >= scope.config["num_hidden_layers"]


class MiMoAttention(GroupedQueryAttention):
    """Attention with values smaller than keys, which are multiplied by `attention_value_scale`."""

    def __init__(self, scope: LayerScope, **options: Any) -> None:
        super().__init__(scope, **options)
        self.value_scale = scope.config.get("attention_value_scale", 0.707) or 1.0

    def values(self, v: jax.Array) -> jax.Array:
        return scaled(v, self.value_scale)

    def size_of_values(self, scope: LayerScope) -> int:
        *_, value_dim = _head_sizes(scope)
        if value_dim > self.head_dim:
            raise ConfigError(
                f"{scope.config.source} has values of {value_dim} dimensions, more than the {self.head_dim} of keys, "
                "which is not supported"
            )
        return value_dim


def _attention(scope: LayerScope) -> MiMoAttention:
    config = scope.config
    has_window = _has_window(scope)
    num_heads, num_kv_heads, head_dim, _ = _head_sizes(scope)
    sink_key = "add_swa_attention_sink_bias" if has_window else "add_full_attention_sink_bias"
    use_bias = config.get("attention_bias", False)
    return MiMoAttention(
        scope / "self_attn",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        layer_head_dim=head_dim,
        rope_settings=rope_config(
            config,
            SLIDING_ATTENTION if has_window else FULL_ATTENTION,
            default_theta=5_000_000.0,
            default_local_theta=config.get("swa_rope_theta", 10_000.0),
            default_partial_rotary_factor=0.334,
        ),
        qkv_bias=use_bias,
        span=_window(config) if has_window else FULL_CONTEXT,
        use_sinks=config.get(sink_key, has_window),
    )


def _head_sizes(scope: LayerScope) -> tuple[int, int, int, int]:
    """Returns the numbers of heads of queries and of keys, and the sizes of a key and of a value."""
    config = scope.config
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, value_dim = config.get("head_dim", 192), config.get("v_head_dim", 128)
    with_window = (
        config.get("swa_num_attention_heads", num_heads),
        config.get("swa_num_key_value_heads", 2 * num_kv_heads),
        config.get("swa_head_dim", head_dim),
        config.get("swa_v_head_dim", value_dim),
    )
    return with_window if _has_window(scope) else (num_heads, num_kv_heads, head_dim, value_dim)


def _has_window(scope: LayerScope) -> bool:
    """Returns whether the layer has a window, by `layer_types` or the published `hybrid_layer_pattern`.

    Without both, every sixth layer and the first have full attention.
    """
    config, index = scope.config, scope.layer_index
    if _predicts(scope):
        return True
    if (kind := listed_layer_type(config, index, FULL_ATTENTION, SLIDING_ATTENTION)) is not None:
        config.ignore("hybrid_layer_pattern", because="layer_types names each layer's kind")
        return kind == SLIDING_ATTENTION
    flag = value_of_layer(config, "hybrid_layer_pattern", index)
    return index > 0 and (index + 1) % 6 != 0 if flag is None else bool(flag)


def _window(config: HFConfig) -> AttentionSpan:
    """Returns the window. `sliding_window` counts the token itself, the published `sliding_window_size` does not."""
    num_earlier = config.get("sliding_window_size")
    if num_earlier is None:
        return AttentionSpan(config.get("sliding_window", 129))
    config.ignore("sliding_window", because="sliding_window_size says how far windows reach")
    return AttentionSpan(num_earlier + 1)


def _is_sparse(scope: LayerScope) -> bool:
    """Returns whether the layer has experts: by `mlp_layer_types`, `moe_layer_freq`, or else all but the first."""
    if _predicts(scope):
        return False
    if "mlp_layer_types" in scope.config:
        scope.config.ignore("moe_layer_freq", because="mlp_layer_types names each layer's kind")
        return is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=1)
    flag = value_of_layer(scope.config, "moe_layer_freq", scope.layer_index)
    return scope.layer_index > 0 if flag is None else bool(flag)


FAMILY = Family(
    "MiMo V2 Flash",
    (MiMoV2FlashForCausalLM,),
    "a window with attention sinks and twice the key-value heads in five of six layers; values of 128 beside "
    "keys of 192, cached as 192; partial RoPE; 256 experts by sigmoid with a selection bias",
    tiny={
        # The reference takes the sizes of heads with windows from the other layers'.
        "swa_num_attention_heads": lambda twin: twin["num_attention_heads"],
        "swa_num_key_value_heads": lambda twin: 2 * twin["num_key_value_heads"],
        "swa_head_dim": lambda twin: twin["head_dim"],
        "swa_v_head_dim": lambda twin: twin["v_head_dim"],
    },
)
