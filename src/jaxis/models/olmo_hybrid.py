"""OLMo Hybrid: gated delta networks, normed before, and OLMo 3's attention, normed after, in every fourth layer."""

from __future__ import annotations

from collections.abc import Sequence

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, listed_layer_type
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decay_gate import DecayGate
from jaxis.layers.decoder_layer import PostNormDecoderLayer, PreNormDecoderLayer
from jaxis.layers.delta_attention import DeltaAttention, DeltaAttentionSizes
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mamba import ignore_rope
from jaxis.models.common.olmo import olmo_attention


class OlmoHybridLinearLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        mixer = _delta_net(scope / "linear_attn")
        super().__init__(scope, self_attn=mixer, mlp=GatedMLP(scope / "mlp"), mixer_name="linear_attn")


class OlmoHybridAttentionLayer(PostNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        attention = olmo_attention(scope / "self_attn", use_rope=_has_rope(scope.config))
        super().__init__(scope, self_attn=attention, mlp=GatedMLP(scope / "mlp"))


def _layer(scope: LayerScope) -> OlmoHybridLinearLayer | OlmoHybridAttentionLayer:
    is_linear = _is_linear(scope.config, scope.layer_index)
    return OlmoHybridLinearLayer(scope) if is_linear else OlmoHybridAttentionLayer(scope)


def _is_linear(config: HFConfig, index: int) -> bool:
    kind = listed_layer_type(config, index, LINEAR_ATTENTION, FULL_ATTENTION)
    return (index + 1) % 4 != 0 if kind is None else kind == LINEAR_ATTENTION


def _delta_net(scope: LayerScope) -> DeltaAttention:
    config = scope.config
    num_heads: int = config["num_attention_heads"]
    num_key_heads: int = config.get("linear_num_key_heads", num_heads)
    key_dim: int = config.get("linear_key_head_dim", int(0.75 * config["hidden_size"] / num_key_heads))
    return DeltaAttention(
        scope,
        DeltaAttentionSizes(
            num_key_heads,
            config.get("linear_num_value_heads", num_heads),
            key_dim,
            config.get("linear_value_head_dim", 2 * key_dim),
            config.get("linear_conv_kernel_dim", 4),
        ),
        decay=DecayGate(per_channel=False),
        decay_names=("a_proj",),
        gate_names=("g_proj",),
        gate_activation="silu",
        norm_epsilon=1e-5,  # the reference's, whatever config.json says of other norms
        beta_scale=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )


def _has_rope(config: HFConfig) -> bool:
    """Returns whether config.json names a base; the published models have null, and no positions."""
    values = config.to_dict()
    return (values.get("rope_parameters") or values).get("rope_theta") is not None


class OlmoHybridForCausalLM(CausalLM):
    layer_class = staticmethod(_layer)
    renames = (("attention_layer_norm", "input_layernorm"),)

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """Also renames the norm before the feed-forward block, whose name differs in linear layers."""
        linear = [i for i in range(config["num_hidden_layers"]) if _is_linear(config, i)]
        norms = ("feedforward_layer_norm", "post_attention_layernorm")
        return *cls.renames, *((f"layers.{i}.{norms[0]}", f"layers.{i}.{norms[1]}") for i in linear)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("linear_use_gate", True)
        if not _has_rope(config):
            ignore_rope(config)
        for key in ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"):
            config.ignore(key, because="it says how weights are initialized")


FAMILY = Family(
    "OLMo Hybrid",
    (OlmoHybridForCausalLM,),
    "gated delta networks, normed before, in three of four layers; OLMo 3's attention, without RoPE, in the fourth",
)
