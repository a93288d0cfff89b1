"""DeepSeek V2 and V2 Lite: latent attention, a mixture of experts in all layers but the first few."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flax import nnx

from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import PreNormDecoderLayer, mlp_from_config
from jaxis.layers.mla import LatentAttentionSizes, MultiHeadLatentAttention
from jaxis.layers.module import JaxModule
from jaxis.layers.moe import moe_from_config
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.routing import Routing
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.quantization.config import QuantizationConfig


def latent_attention_from_config(
    vllm_config: VllmConfig,
    rng: nnx.Rngs,
    quant_config: QuantizationConfig | None,
    prefix: str,
    *,
    interleaved_rope: bool = True,
) -> MultiHeadLatentAttention:
    """Latent attention whose sizes, rope and scale are config.json's.

    Args:
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      interleaved_rope: How the rope's dimensions pair up.

    Raises:
      ConfigError: The numbers do not go together.
    """
    config = vllm_config.model_config.hf_config
    sizes = LatentAttentionSizes(
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
    )
    # What transformers writes besides, from the others.
    for key, value in (
        ("num_key_value_heads", sizes.num_heads),
        ("qk_head_dim", sizes.qk_head_dim),
        ("head_dim", sizes.qk_rope_head_dim),
    ):
        require_value(config, key, value)
    rope = rope_config(config)
    return MultiHeadLatentAttention(
        sizes,
        rng,
        rope=make_rotary_embedding(
            rope,
            head_dim=sizes.qk_rope_head_dim,
            max_model_len=vllm_config.model_config.max_model_len,
            interleaved=interleaved_rope,
        ),
        scale=sizes.qk_head_dim**-0.5 * _mscale(rope) ** 2,
        use_bias=config.get("attention_bias", False),
        dtype=vllm_config.model_config.dtype,
        quant_config=quant_config,
        prefix=prefix,
    )


def _mscale(rope: RopeConfig) -> float:
    """What a context stretched by YaRN multiplies queries and keys by."""
    if rope.mscale_all_dim is None or rope.factor is None or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def require_value(config: HFConfig, key: str, value: object) -> None:
    """Reads a key that says nothing new.

    Raises:
      ConfigError: It says something else.
    """
    if (found := config.get(key, value)) != value:
        raise ConfigError(f"{key}={found!r} in {config.source} is not supported by this family; supported: {value!r}")


def deepseek_v2_routing(config: HFConfig) -> Routing:
    """Softmax scores that are not renormalised; the best experts of all, or of the best groups.

    Raises:
      ConfigError: config.json asks for another way.
    """
    require_value(config, "scoring_func", "softmax")
    # The reference reads it and goes on as if it were false; the publisher's own code does not.
    require_value(config, "norm_topk_prob", False)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"topk_method={method!r} in {config.source} is not supported by this family; "
            "supported: 'greedy', 'group_limited_greedy'"
        )
    num_groups, num_allowed_groups = config.get("n_group", 1), config.get("topk_group", 1)
    if method == "greedy":
        num_groups = num_allowed_groups = 1
    return Routing(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        scaling_factor=config.get("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_allowed_groups=num_allowed_groups,
        group_score="max",
        float32_logits=True,
    )


class DeepseekDecoderLayer(PreNormDecoderLayer):
    """Latent attention, then a dense block or a mixture of experts beside one wide block of shared ones.

    Args:
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      routing: Of the mixture.
      use_selection_bias: Whether its router has one.
      is_sparse: Whether the layer has a mixture.
      interleaved_rope: How the rope's dimensions pair up.
      mlp_bias: Whether the dense and the shared block have biases.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        *,
        prefix: str,
        routing: Routing,
        use_selection_bias: bool,
        is_sparse: bool,
        interleaved_rope: bool = True,
        mlp_bias: bool = False,
    ) -> None:
        config = vllm_config.model_config.hf_config
        expert_size, num_shared = config["moe_intermediate_size"], config["n_shared_experts"]

        def dense(name: str, size: int) -> JaxModule:
            return mlp_from_config(
                vllm_config, rng, quant_config, f"{prefix}.{name}", intermediate_size=size, use_bias=mlp_bias
            )

        def sparse() -> JaxModule:
            return moe_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.mlp",
                routing=routing,
                intermediate_size=expert_size,
                use_selection_bias=use_selection_bias,
                shared_experts=dense("mlp.shared_experts", num_shared * expert_size),
            )

        super().__init__(
            vllm_config,
            rng,
            self_attn=latent_attention_from_config(
                vllm_config, rng, quant_config, f"{prefix}.self_attn", interleaved_rope=interleaved_rope
            ),
            mlp=sparse() if is_sparse else dense("mlp", config["intermediate_size"]),
        )


class DeepseekV2DecoderLayer(DeepseekDecoderLayer):
    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        *,
        layer_index: int,
        prefix: str,
    ) -> None:
        config = vllm_config.model_config.hf_config
        require_value(config, "moe_layer_freq", 1)
        super().__init__(
            vllm_config,
            rng,
            quant_config,
            prefix=prefix,
            routing=deepseek_v2_routing(config),
            use_selection_bias=False,
            is_sparse=layer_index >= config["first_k_dense_replace"],
            mlp_bias=config.get("mlp_bias", False),
        )


class DeepseekV2ForCausalLM(CausalLM):
    layer_class = DeepseekV2DecoderLayer
