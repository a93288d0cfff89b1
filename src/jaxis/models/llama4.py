"""Llama 4 (text): chunked attention with rope, full-context layers without rope, experts that scale their input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import CHUNKED_ATTENTION, FULL_ATTENTION, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.kernels.rms_norm import rms_norm
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.text_part import TextPart


class Llama4Attention(GroupedQueryAttention):
    """Grouped-query attention with an L2 norm or a temperature between rope and scores.

    Args:
      scope: The layer's scope.
      l2_norm_epsilon: If set, query and key heads are divided by their root mean square, with this epsilon.
      temperatures: If set, (floor_scale, factors): queries at position p are multiplied by
        `factors[(p + 1) // floor_scale]` (arXiv:2501.19399).
      options: Further arguments of `GroupedQueryAttention`.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        l2_norm_epsilon: float | None,
        temperatures: tuple[int, tuple[float, ...]] | None,
        **options: Any,
    ) -> None:
        super().__init__(scope, **options)
        self.l2_norm_epsilon = l2_norm_epsilon
        self.temperatures = temperatures

    def after_rope(self, q: jax.Array, k: jax.Array, metadata: AttentionMetadata) -> tuple[jax.Array, jax.Array]:
        """Norms or scales queries [T, H, D] and keys [T, K, D]."""
        if self.l2_norm_epsilon is not None:
            no_weight = jnp.ones(self.head_dim, jnp.float32)
            q, k = (rms_norm(x, no_weight, epsilon=self.l2_norm_epsilon) for x in (q, k))
        if self.temperatures is not None:
            floor_scale, factors = self.temperatures
            stretch = (metadata.input_positions + 1) // floor_scale
            factor = jnp.take(np.asarray(factors, np.float32), stretch, mode="clip")
            q = (q * factor[:, None, None]).astype(q.dtype)
        return q, k


class Llama4DecoderLayer(PreNormDecoderLayer):
    feed_forward_name = "feed_forward"

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=_attention(scope), mlp=_feed_forward(scope))


class Llama4ForCausalLM(CausalLM):
    layer_class = Llama4DecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.ignore("attention_chunk_size", because="layers without chunks see everything")
        config.ignore("no_rope_layer_interval", because="no_rope_layers, where there is one, says it of each layer")
        for key in ("floor_scale", "attn_scale"):
            config.ignore(key, because="only layers without a rope have a temperature")
        config.ignore("interleave_moe_layer_step", because="moe_layers, where there is one, names the sparse layers")
        config.ignore("intermediate_size", because="dense layers do not have it")
        config.ignore("intermediate_size_mlp", because="sparse layers do not have it")


class Llama4ForConditionalGeneration(TextPart):
    """The published multimodal checkpoints; images are not supported."""

    language_model_class = Llama4ForCausalLM
    other_parts = ("vision_model", "multi_modal_projector")
    other_keys = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")


def _attention(scope: LayerScope) -> Llama4Attention:
    """Attention with a rope, an L2 norm and chunks, or with a temperature."""
    config = scope.config
    use_bias, has_rope = config.get("attention_bias", False), _has_rope(scope)
    has_norm, has_temperature = config.get("use_qk_norm", True), config.get("attn_temperature_tuning", True)
    return Llama4Attention(
        scope / "self_attn",
        head_dim=128,
        use_rope=has_rope,
        rope_settings=rope_config(config),
        interleaved_rope=True,
        l2_norm_epsilon=config["rms_norm_eps"] if has_norm and has_rope else None,
        temperatures=_temperatures(config) if has_temperature and not has_rope else None,
        span=_span(scope),
        qkv_bias=use_bias,
        o_bias=use_bias,
    )


def _temperatures(config: HFConfig) -> tuple[int, tuple[float, ...]]:
    """`floor_scale`, and one factor for each run of `floor_scale` positions."""
    floor_scale, attn_scale = config.get("floor_scale", 8192), config.get("attn_scale", 0.1)
    num_factors = config["max_position_embeddings"] // floor_scale + 1
    factors = 1 + attn_scale * np.log1p(np.arange(num_factors, dtype=np.float32))
    return floor_scale, tuple(factors.astype(np.float32).tolist())


def _has_rope(scope: LayerScope) -> bool:
    """Whether the layer has a rope: 1 in `no_rope_layers`, despite its name; an empty list counts as absent."""
    if layers := scope.config.get("no_rope_layers"):
        return bool(layers[scope.layer_index])
    return (scope.layer_index + 1) % scope.config.get("no_rope_layer_interval", 4) != 0


def _span(scope: LayerScope) -> AttentionSpan:
    """Chunks in the layers that `layer_types` says or, without it, in those that have a rope."""
    kind = listed_layer_type(scope.config, scope.layer_index, CHUNKED_ATTENTION, FULL_ATTENTION)
    if kind == FULL_ATTENTION or (kind is None and not _has_rope(scope)):
        return FULL_CONTEXT
    return AttentionSpan(attention_chunk_size=scope.config.get("attention_chunk_size", 8192))


def _feed_forward(scope: LayerScope) -> FeedForward:
    config, block = scope.config, scope / "feed_forward"
    routing = Routing(
        num_experts=config["num_local_experts"],
        num_experts_per_token=config.get("num_experts_per_tok", 1),
        score_function="sigmoid",
        scales_input=True,
    )
    if (sparse_layers := config.get("moe_layers")) is not None:
        is_sparse = scope.layer_index in sparse_layers
    else:
        is_sparse = (scope.layer_index + 1) % config.get("interleave_moe_layer_step", 1) == 0
    if not is_sparse:
        return GatedMLP(block, intermediate_size=config["intermediate_size_mlp"])
    expert_size = config["intermediate_size"]
    return SparseMoE(
        block,
        routing=routing,
        intermediate_size=expert_size,
        stack_layout=StackLayout(transposed=True),
        router_name="router",
        shared_experts_name="shared_expert",
        shared_experts=GatedMLP(block / "shared_expert", intermediate_size=expert_size),
    )
