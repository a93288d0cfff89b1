"""Phi-3.5-MoE (arXiv:2404.14219): layer norms and biases throughout, and experts chosen one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.config.layer_types import uniform_span
from jaxis.config.rope_config import rope_config
from jaxis.kernels.gates import softmax
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import layer_norm
from jaxis.layers.moe import SparseMoE
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family


class PhimoeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        routing = SparseMixer.of(config, jitter=config.get("router_jitter_noise", 0.01))
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config(config, default_theta=1_000_000.0),
                use_bias=config.get("attention_bias", False),
                span=uniform_span(config, config.get("sliding_window")),
            ),
            mlp=SparseMoE(scope / "mlp", routing, intermediate_size=config["intermediate_size"]),
        )


@dataclass(frozen=True, kw_only=True)
class SparseMixer(Routing):
    """Routing to experts that are chosen one after the other (arXiv:2409.12136).

    The weight of each is a softmax over the experts that were not chosen before and whose logits are near its own.

    Attributes:
      jitter: Logits are near the best one if their difference to it is at most twice this share of the larger of their
        magnitude and the best one.
    """

    jitter: float

    def choose(self, logits: jax.Array, selection_bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        del selection_bias
        expert_ids, weights = [], []
        remaining = logits
        for _ in range(self.num_experts_per_token):
            best = remaining.max(-1, keepdims=True)
            is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * self.jitter
            chosen = remaining.argmax(-1, keepdims=True)
            scores = softmax(jnp.where(is_far, -jnp.inf, remaining))
            expert_ids.append(chosen)
            weights.append(jnp.take_along_axis(scores, chosen, axis=-1))
            remaining = jnp.where(jnp.arange(self.num_experts) == chosen, -jnp.inf, remaining)
        return jnp.concatenate(expert_ids, -1).astype(jnp.int32), jnp.concatenate(weights, -1)


def _norm(scope: LayerScope) -> JaxLayerNorm:
    return layer_norm(scope, epsilon=scope.config["rms_norm_eps"])


class PhimoeForCausalLM(CausalLM):
    layer_class = PhimoeDecoderLayer
    make_norm = _norm
    router_aux_loss_coef = 0.001
    renames = (("block_sparse_moe", "mlp"),)
    supported_values = (("num_experts_per_tok", 2),)  # the reference always chooses two
    ignored_keys = (("input_jitter_noise", "it is added in training only"),)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(head_bias=scope.config.get("lm_head_bias", False))


FAMILY = Family(
    "Phi-3.5-MoE",
    (PhimoeForCausalLM,),
    "experts by SparseMixer, LayerNorm, biases, LongRoPE",
    gguf=("phimoe",),
    same_code={"PhiMoEForCausalLM": "PhimoeForCausalLM"},
    other_names={"PhiMoEForCausalLM": PhimoeForCausalLM},
)
