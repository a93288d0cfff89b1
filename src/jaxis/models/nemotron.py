"""Nemotron 4 and Minitron (arXiv:2402.16819): layer norms of 1 + weight, squared ReLU without a gate, partial rope."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.config.rope_config import rope_config
from jaxis.kernels.norms import layer_norm
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class _OffsetLayerNorm(JaxLayerNorm):
    """A layer norm whose checkpoint has `weight - 1`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        assert self.bias is not None
        return layer_norm(x, 1.0 + self.weight[...].astype(jnp.float32), self.bias[...], epsilon=self.epsilon)


def _norm(scope: LayerScope) -> JaxLayerNorm:
    epsilon = scope.config.get("norm_eps", 1e-5)
    return _OffsetLayerNorm(scope.config["hidden_size"], scope.rngs, epsilon=epsilon, dtype=scope.dtype)


class NemotronDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config(config, default_partial_rotary_factor=0.5),
                use_bias=config.get("attention_bias", False),
            ),
            mlp=UngatedMLP(
                scope / "mlp",
                activation=activation_function(config.get("hidden_act", "relu2")),
                use_bias=config.get("mlp_bias", False),
            ),
        )


class NemotronForCausalLM(CausalLM):
    layer_class = NemotronDecoderLayer
    make_norm = _norm


FAMILY = Family(
    "Nemotron 4, Minitron",
    (NemotronForCausalLM,),
    "LayerNorm of 1 + weight, squared ReLU without a gate, partial RoPE",
    gguf=("nemotron",),
)
