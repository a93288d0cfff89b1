"""Code shared by Mistral and Ministral 3: the decoder layer."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import uniform_span
from jaxis.config.rope_config import llama_4_scaling_beta, rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.query_scale import QueryScale
from jaxis.layers.scope import LayerScope


class MistralDecoderLayer(PreNormDecoderLayer):
    """The Llama layer, with a sliding window in all layers if config.json has one.

    Args:
      scope: The layer's scope.
      default_window: The window of a config.json without the key; null there means none.
      query_scale: See `GroupedQueryAttention`.
    """

    def __init__(
        self, scope: LayerScope, *, default_window: int | None = 4096, query_scale: QueryScale | None = None
    ) -> None:
        # A config.json without the key means the first release, whose window is 4096.
        span = uniform_span(scope.config, scope.config.get_nullable("sliding_window", default_window))
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", span=span, query_scale=query_scale),
            mlp=GatedMLP(scope / "mlp"),
        )


class Ministral3DecoderLayer(MistralDecoderLayer):
    """Mistral's layer with queries scaled by position, for `ministral3`; as it is, for a config of `mistral`."""

    def __init__(self, scope: LayerScope) -> None:
        if scope.config.get("model_type") == "mistral":
            super().__init__(scope)
        else:
            super().__init__(scope, default_window=None, query_scale=_query_scale(scope.config))


def _query_scale(config: HFConfig) -> QueryScale | None:
    beta = llama_4_scaling_beta(config)
    if beta is None:
        return None
    original = rope_config(config).original_max_position_embeddings or config["max_position_embeddings"]
    return QueryScale(beta, original, config["max_position_embeddings"] - 1)
