"""Code shared by DeepSeek V2, V3 and later families: latent attention, and routed and shared experts."""

from __future__ import annotations

import math

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.mla import LatentAttentionSizes, MultiHeadLatentAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import ROUTER_BIAS, SparseMoE
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions


class DeepseekDecoderLayer(PreNormDecoderLayer):
    """`x = x + latent_attention(norm(x))`
    `x = x + mlp(norm(x))`, where mlp is a dense block, or a mixture of experts plus one wide block of shared experts.

    Args:
      scope: The layer's scope.
      routing: How the router chooses experts.
      is_sparse: Whether the layer has a mixture of experts.
      use_selection_bias: Whether the router has a selection bias.
      interleaved_rope: Whether the rope pairs neighbouring dimensions.
      mlp_bias: Whether the dense and the shared block have biases.

    Raises:
      ConfigError: config.json's sizes are inconsistent.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        routing: Routing,
        is_sparse: bool,
        use_selection_bias: bool = False,
        interleaved_rope: bool = True,
        mlp_bias: bool = False,
    ) -> None:
        self_attn = latent_attention(scope / "self_attn", interleaved_rope=interleaved_rope)
        mlp: FeedForward
        if is_sparse:
            scope.config.ignore("intermediate_size", because="sparse layers do not have it")
            mlp = _sparse(scope / "mlp", routing, use_selection_bias=use_selection_bias, use_bias=mlp_bias)
        else:
            for key in ("moe_intermediate_size", "n_shared_experts"):
                scope.config.ignore(key, because="dense layers do not have it")
            mlp = GatedMLP(scope / "mlp", use_bias=mlp_bias)
        super().__init__(scope, self_attn=self_attn, mlp=mlp)


class DeepseekCausalLM(CausalLM):
    """Base of models whose checkpoints may have multi-token-prediction layers; each sets its layer class."""

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(num_prediction_layers=scope.config.get("num_nextn_predict_layers", 0))


def _sparse(scope: LayerScope, routing: Routing, *, use_selection_bias: bool, use_bias: bool) -> SparseMoE:
    expert_size, num_shared = scope.config["moe_intermediate_size"], scope.config["n_shared_experts"]
    return SparseMoE(
        scope,
        routing=routing,
        intermediate_size=expert_size,
        selection_bias_name=ROUTER_BIAS if use_selection_bias else None,
        shared_experts=GatedMLP(
            scope / "shared_experts", intermediate_size=num_shared * expert_size, use_bias=use_bias
        ),
    )


def latent_attention(scope: LayerScope, *, interleaved_rope: bool = True) -> MultiHeadLatentAttention:
    """Latent attention with config.json's sizes, rope and scale.

    Args:
      scope: The attention's scope.
      interleaved_rope: Whether the rope pairs neighbouring dimensions.

    Raises:
      ConfigError: The sizes are inconsistent.
    """
    config = scope.config
    sizes = LatentAttentionSizes(
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
    )
    # Redundant keys that transformers derives from the others.
    config.expect("num_key_value_heads", sizes.num_heads)
    config.expect("qk_head_dim", sizes.qk_head_dim)
    config.expect("head_dim", sizes.qk_rope_head_dim)
    rope = rope_config(config)
    return MultiHeadLatentAttention(
        scope,
        sizes,
        rope=make_rotary_embedding(
            rope, head_dim=sizes.qk_rope_head_dim, max_model_len=scope.max_model_len, interleaved=interleaved_rope
        ),
        scale=sizes.qk_head_dim**-0.5 * _mscale(rope) ** 2,
        use_bias=config.get("attention_bias", False),
    )


def _mscale(rope: RopeConfig) -> float:
    """The factor on queries and keys for a context extended by YaRN."""
    if rope.mscale_all_dim is None or rope.factor is None or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def deepseek_v3_routing(config: HFConfig) -> Routing:
    """Routing by sigmoid scores, biased for the choice only; the best experts of the best groups.

    Raises:
      ConfigError: config.json asks for another method.
    """
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    return Routing(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        score_function="sigmoid",
        renormalize=config["norm_topk_prob"],
        scaling_factor=config["routed_scaling_factor"],
        num_groups=config["n_group"],
        num_allowed_groups=config["topk_group"],
        group_score="top2_sum",
        float32_logits=True,
    )
