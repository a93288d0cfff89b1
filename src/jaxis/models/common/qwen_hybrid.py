"""Code shared by Qwen3-Next and Qwen3.5: layers of linear attention, every fourth of gated full attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.gated_delta_net import GatedDeltaNet
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward
from jaxis.layers.moe import SparseMoE
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import TinySizes
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.qwen import QWEN_MOE_RENAMES

_norm = partial(rms_norm, add_unit_offset=True)


class QwenHybridLayer(PreNormDecoderLayer):
    """A decoder layer with linear attention of this class, or full attention, and a feed-forward block."""

    def __init__(self, scope: LayerScope, *, mlp: FeedForward, delta_net: type[GatedDeltaNet]) -> None:
        config = scope.config
        if kind_of_layer(config, scope.layer_index) == LINEAR_ATTENTION:
            name, mixer = "linear_attn", delta_net(scope / "linear_attn")
        else:
            name, mixer = "self_attn", gated_attention(scope / "self_attn")
        super().__init__(scope, self_attn=mixer, mlp=mlp, mixer_name=name)


def kind_of_layer(config: HFConfig, index: int, *others: str) -> str:
    """Returns LINEAR_ATTENTION, FULL_ATTENTION, or another type that the family's `layer_types` may have."""
    kind = listed_layer_type(config, index, LINEAR_ATTENTION, FULL_ATTENTION, *others)
    if kind is not None:
        return kind
    return FULL_ATTENTION if (index + 1) % config.get("full_attention_interval", 4) == 0 else LINEAR_ATTENTION


def gated_attention(
    scope: LayerScope, make: Callable[..., GroupedQueryAttention] = GroupedQueryAttention
) -> GroupedQueryAttention:
    use_bias = scope.config.get("attention_bias", False)
    return make(
        scope,
        head_dim=256,
        rope_settings=rope_config(scope.config, default_partial_rotary_factor=0.25),
        qkv_bias=use_bias,
        o_bias=use_bias,
        qk_norm=lambda _, head_dim: _norm(scope, head_dim),
        output_gate=OutputGate(),
    )


class QwenHybridCausalLM(CausalLM):
    """The models of these layers.

    Attributes:
      gate_types: Accepted values of `output_gate_type`.
    """

    renames = QWEN_MOE_RENAMES
    make_norm = _norm
    default_prediction_layers = 1
    prediction_modules = ("mtp.",)
    gate_types: ClassVar[tuple[str, ...]] = ("swish", "silu")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.expect("attn_output_gate", True)
        config.expect("output_gate_type", *cls.gate_types)
        config.ignore("mamba_ssm_dtype", because="states are float32")
        config.ignore("full_attention_interval", because="layer_types names each layer's type")
        for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
            config.ignore(key, because="layers that draft tokens do not change logits")

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        """Returns the prediction layer, which is like the model's first full-attention layer; None without one."""
        layers = range(config["num_hidden_layers"])
        full = next((i for i in layers if kind_of_layer(config, i) == FULL_ATTENTION), None)
        return None if full is None else PredictionNames.separate(full, make_norm=_norm)


def qwen_hybrid_moe(scope: LayerScope, *, renormalize: bool, stack_layout: StackLayout | None) -> SparseMoE:
    """A mixture of experts with a shared expert behind its own gate."""
    return SparseMoE(
        scope / "mlp",
        Routing.of(scope.config, renormalize=renormalize),
        stack_layout=stack_layout,
        shared_size=scope.config["shared_expert_intermediate_size"],
        use_shared_gate=True,
    )


# `Family.tiny` of gated delta networks. Two value heads share a key head. The large epsilon keeps the norm of a nearly
# silent head from amplifying the rounding of the reference, which sums by chunks.
TINY_DELTA_NET: TinySizes = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 1e-2,
}
