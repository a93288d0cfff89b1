"""StableLM 2 (arXiv:2402.17834) and StableLM Zephyr 3B: layer norms, a gated block, a rope of a quarter of a head."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import ParallelDecoderLayer, PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.norm import HeadLayerNorms
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import biased_layer_norm


def _layer(scope: LayerScope) -> PreNormDecoderLayer | ParallelDecoderLayer:
    config = scope.config

    def head_norms(heads: int, head_dim: int) -> HeadLayerNorms:
        epsilon = config.get("layer_norm_eps", 1e-5)
        return HeadLayerNorms(heads, head_dim, scope.rngs, epsilon=epsilon, dtype=scope.dtype)

    layer_class = ParallelDecoderLayer if config.get("use_parallel_residual", False) else PreNormDecoderLayer
    return layer_class(
        scope,
        self_attn=GroupedQueryAttention(
            scope / "self_attn",
            rope_settings=rope_config(config, default_partial_rotary_factor=0.25),
            qkv_bias=config.get("use_qkv_bias", False),
            qk_norm=head_norms if config.get("qk_layernorm", False) else False,
        ),
        mlp=GatedMLP(scope / "mlp"),
    )


class StableLmForCausalLM(CausalLM):
    layer_class = _layer
    make_norm = biased_layer_norm
    renames = (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm"))


FAMILY = Family(
    "StableLM 2 1.6B, 12B, Zephyr 3B",
    (StableLmForCausalLM,),
    "LayerNorm, partial RoPE; attention and feed-forward in parallel if config.json says so; 12B: norms on heads",
    gguf=("stablelm",),
    names={"stablelm": {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"}},
    other_names={"StableLMEpochForCausalLM": StableLmForCausalLM},
)
