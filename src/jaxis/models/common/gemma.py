"""Code shared by Gemma's models: norms with a unit offset, the feed-forward block, scaled embeddings."""

from __future__ import annotations

from typing import ClassVar

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import layer_span, layer_type
from jaxis.kernels.weights import GatedUnit
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.norm import JaxRmsNorm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions


def gemma_norm(scope: LayerScope, num_features: int | None = None) -> JaxRmsNorm:
    """An RMS norm that multiplies by 1 + weight; `num_features` None means config.json's `hidden_size`."""
    return rms_norm(scope, num_features, add_unit_offset=True)


def gemma2_attention(scope: LayerScope) -> GroupedQueryAttention:
    """Gemma 2's attention: a window in every other layer, and scores with a soft cap."""
    config = scope.config
    return GroupedQueryAttention(
        scope,
        head_dim=256,
        scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        use_bias=config.get("attention_bias", False),
        span=layer_span(config, layer_type(config, scope.layer_index, full_every=2), default_window=4096),
        soft_cap=config.get("attn_logit_softcapping", 50.0),
    )


def gemma_mlp(
    scope: LayerScope, intermediate_size: int | None = None, *, gated_unit: GatedUnit | None = None
) -> GatedMLP:
    """The feed-forward block, with config.json's `intermediate_size` by default, and `gated_unit` as in `GatedMLP`.

    Raises ConfigError if `hidden_act`, which older software reads, names another activation than Gemma's own key.
    """
    activation = gemma_activation(scope.config)
    return GatedMLP(scope, intermediate_size=intermediate_size, activation=activation, gated_unit=gated_unit)


def gemma_activation(config: HFConfig) -> str:
    """Returns the name of the activation, for which Gemma has its own config key.

    Raises ConfigError if `hidden_act`, which older software reads, names another activation.
    """
    activation: str = config.get("hidden_activation", "gelu_pytorch_tanh")
    config.expect("hidden_act", activation)
    return activation


class GemmaCausalLM(CausalLM):
    """Base of Gemma's models; each sets its layer class, and its default soft cap of logits."""

    default_logits_soft_cap: ClassVar[float | None] = None
    supported_values = (("use_bidirectional_attention", False),)

    tied_by_default = True
    make_norm = gemma_norm

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            logits_soft_cap=scope.config.get("final_logit_softcapping", cls.default_logits_soft_cap),
            embed_scale=scope.config["hidden_size"] ** 0.5,
        )
