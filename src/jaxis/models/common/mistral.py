"""Code shared by the checkpoints of Mistral: the decoder layers of Mistral, Ministral 3 and Mistral 4."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import uniform_span
from jaxis.config.rope_config import llama_4_scaling_beta, rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.query_scale import QueryScale
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.deepseek import DeepseekDecoderLayer, latent_attention
from jaxis.models.common.sparse_layers import num_dense_layers


class MistralDecoderLayer(PreNormDecoderLayer):
    """The Llama layer, with a sliding window in all layers if config.json has one; a null means none.

    `default_window` is for a config.json without the key. `query_scale` is that of `GroupedQueryAttention`.
    """

    def __init__(
        self, scope: LayerScope, *, default_window: int | None = 4096, query_scale: QueryScale | None = None
    ) -> None:
        # A config.json without the key means the first release, whose window is 4096.
        span = uniform_span(scope.config, scope.config.get("sliding_window", default_window))
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", span=span, query_scale=query_scale),
            mlp=GatedMLP(scope / "mlp"),
        )


class Ministral3DecoderLayer(MistralDecoderLayer):
    """Mistral's layer, for `ministral3` with queries scaled by position."""

    def __init__(self, scope: LayerScope) -> None:
        if scope.config.get("model_type") == "mistral":
            super().__init__(scope)
        else:
            super().__init__(scope, default_window=None, query_scale=mistral_query_scale(scope.config))


class Mistral4DecoderLayer(DeepseekDecoderLayer):
    """DeepSeek V3's layer with queries scaled by position, and experts chosen by a softmax."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        self_attn = latent_attention(
            scope / "self_attn",
            interleaved_rope=config.get("rope_interleave", True),
            query_scale=mistral_query_scale(config),
        )
        super().__init__(
            scope,
            routing=mistral_routing(config),
            is_sparse=scope.layer_index >= num_dense_layers(config, 0),
            stack_layout=StackLayout(transposed=False),
            self_attn=self_attn,
        )


def mistral_routing(config: HFConfig, *, float32_logits: bool = False) -> Routing:
    """Softmax scores of experts in groups; `float32_logits` is that of `Routing`."""
    return Routing.of(
        config,
        renormalize=config.get("norm_topk_prob", True),
        scaling_factor=config.get("routed_scaling_factor", 1.0),
        num_groups=config.get("n_group", 1),
        num_allowed_groups=config.get("topk_group", 1),
        group_score="top2_sum",
        float32_logits=float32_logits,
    )


def mistral_query_scale(config: HFConfig) -> QueryScale | None:
    """Returns the factors of queries for config.json's rope settings; None if the settings ask for none."""
    beta = llama_4_scaling_beta(config)
    if beta is None:
        return None
    original = rope_config(config).original_max_position_embeddings or config["max_position_embeddings"]
    return QueryScale(beta, original, config["max_position_embeddings"] - 1)
