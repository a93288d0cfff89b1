"""Code shared by Kimi Linear and Ling 3: Kimi Delta Attention, some layers of latent attention, experts."""

from __future__ import annotations

from jaxis.config.checkpoint_values import value_of_either
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, listed_layer_type
from jaxis.layers.decay_gate import DecayGate
from jaxis.layers.delta_attention import DeltaAttention, DeltaAttentionSizes
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.sparse_layers import sigmoid_routing


def listed_as_linear(config: HFConfig, layer_index: int) -> bool | None:
    """True if the layer has linear attention, by `layer_types`; None if config.json has no such list.

    Raises ConfigError if `layer_types` has an unknown type.
    """
    kind = listed_layer_type(config, layer_index, LINEAR_ATTENTION, FULL_ATTENTION)
    return None if kind is None else kind == LINEAR_ATTENTION


def kimi_delta_attention(
    scope: LayerScope,
    *,
    num_heads: int,
    head_dim: int,
    conv_width: int,
    lower_bound: float | None,
    decay_names: tuple[str, ...],
    gate_names: tuple[str, ...],
) -> DeltaAttention:
    """A `DeltaAttention` with equal numbers and sizes of key and value heads."""
    return DeltaAttention(
        scope,
        DeltaAttentionSizes(num_heads, num_heads, head_dim, head_dim, conv_width),
        decay=DecayGate(per_channel=True, lower_bound=lower_bound),
        decay_names=decay_names,
        gate_names=gate_names,
        gate_activation="sigmoid",
        norm_epsilon=scope.config["rms_norm_eps"],
    )


def hybrid_routing(config: HFConfig) -> Routing:
    """DeepSeek V3's routing. Most keys have two names: the makers' and the reference's."""
    return sigmoid_routing(
        config,
        renormalize=value_of_either(config, "norm_topk_prob", "moe_renormalize"),
        scaling_factor=config["routed_scaling_factor"],
        num_groups=value_of_either(config, "n_group", "num_expert_group"),
        num_allowed_groups=config["topk_group"],
    )
