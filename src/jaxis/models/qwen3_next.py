"""Qwen3-Next and Qwen3-Coder-Next: Qwen3.5 MoE with projections that are packed by key head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.layers.gated_delta_net import GatedDeltaNet, Projections
from jaxis.layers.leaves import linear
from jaxis.layers.linear import apply_together
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.models.common.family import Family
from jaxis.models.common.qwen_hybrid import TINY_DELTA_NET, QwenHybridCausalLM, QwenHybridLayer, qwen_hybrid_moe


class Qwen3NextDeltaNet(GatedDeltaNet):
    """Linear attention with rows grouped by key head: its query, key, values and gates; b and a likewise."""

    def make_projections(self, scope: LayerScope) -> None:
        size_in, axes = scope.config["hidden_size"], ("heads", "embed")
        qkvz_size, ba_size = 2 * (self.keys_size + self.values_size), 2 * self.num_value_heads
        self.in_proj_qkvz = linear(scope / "in_proj_qkvz", size_in, qkvz_size, axes=axes)
        self.in_proj_ba = linear(never_quantized(scope / "in_proj_ba"), size_in, ba_size, axes=axes)

    def project(self, x: jax.Array) -> Projections:
        num_tokens, shared_by = x.shape[0], self.num_value_heads // self.num_key_heads
        by_key_head = (num_tokens, self.num_key_heads, -1)
        qkvz, ba = (rows.reshape(by_key_head) for rows in apply_together(x, self.in_proj_qkvz, self.in_proj_ba))
        values_size = shared_by * self.value_dim
        q, k, v, z = jnp.split(qkvz, [self.key_dim, 2 * self.key_dim, 2 * self.key_dim + values_size], axis=-1)
        b, a = jnp.split(ba, 2, axis=-1)
        qkv = jnp.concatenate([part.reshape(num_tokens, -1) for part in (q, k, v)], axis=-1)
        return Projections(qkv, *(part.reshape(num_tokens, -1) for part in (z, b, a)))


class Qwen3NextDecoderLayer(QwenHybridLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, mlp=_feed_forward(scope), delta_net=Qwen3NextDeltaNet)


class Qwen3NextForCausalLM(QwenHybridCausalLM):
    layer_class = Qwen3NextDecoderLayer
    router_aux_loss_coef = 0.001

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
            config.ignore(key, because="sparse layers do not have it, or dense ones do not")


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    is_listed_as_dense = scope.layer_index in config.get("mlp_only_layers", [])
    if is_listed_as_dense or (scope.layer_index + 1) % config.get("decoder_sparse_step", 1):
        return GatedMLP(scope / "mlp")
    return qwen_hybrid_moe(scope, renormalize=config.get("norm_topk_prob", True), stack_layout=None)


FAMILY = Family(
    "Qwen3-Next, Qwen3-Coder-Next",
    (Qwen3NextForCausalLM,),
    "gated delta networks in three of four layers, whose state has a fixed size; a gate on attention's "
    "output; 512 experts and a shared one behind a gate",
    gguf=("qwen3next",),
    tiny=TINY_DELTA_NET,
)
