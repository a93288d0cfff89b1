"""Command R and R+ (Cohere): parallel attention and MLP after one layer norm, a rope that pairs neighbours."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import ParallelDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.cohere import CohereCausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import unbiased_layer_norm


class CohereDecoderLayer(ParallelDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config

        def head_norm(heads: int, head_dim: int) -> JaxLayerNorm:
            return unbiased_layer_norm(scope, (heads, head_dim))

        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config(config, default_theta=500_000.0),
                interleaved_rope=True,
                use_bias=config.get("attention_bias", False),
                qk_norm=head_norm if config.get("use_qk_norm", False) else False,
            ),
            mlp=GatedMLP(scope / "mlp"),
        )


class CohereForCausalLM(CohereCausalLM):
    layer_class = CohereDecoderLayer


FAMILY = Family(
    "Command R, R+",
    (CohereForCausalLM,),
    "parallel attention and feed-forward, LayerNorm (R+: on heads too), interleaved RoPE, scaled logits",
    gguf=("command-r",),
)
