"""OLMo 1 (arXiv:2402.00838): the Llama layer with layer norms that have no weights, and clipped projections."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.norms import layer_norm
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class _UnweightedLayerNorm(JaxModule):
    def __init__(self, _scope: LayerScope) -> None: ...

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, jnp.ones(x.shape[-1], jnp.float32), None, epsilon=1e-5)


class OlmoDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        use_bias = config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", use_bias=use_bias, qkv_clip=config.get("clip_qkv")),
            mlp=GatedMLP(scope / "mlp"),
        )


class OlmoForCausalLM(CausalLM):
    layer_class = OlmoDecoderLayer
    make_norm = _UnweightedLayerNorm


FAMILY = Family(
    "OLMo", (OlmoForCausalLM,), "LayerNorm without weights, clipped queries, keys and values", gguf=("olmo",)
)
