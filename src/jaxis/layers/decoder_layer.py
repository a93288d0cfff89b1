"""The pre-norm decoder layer of the Llama lineage: norm, attention, add; norm, feed-forward, add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import jax
from flax import nnx

from jaxis.layers.attention import GroupedQueryAttention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import JaxRmsNorm
from jaxis.layers.rope import make_rotary_embedding
from jaxis.rope_config import rope_config

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class PreNormDecoderLayer(JaxModule):
    """`x + self_attn(norm(x))`, then `x + mlp(norm(x))`; which attention and which feed-forward, the family says.

    Attributes:
      feed_forward_name: What the checkpoint calls `mlp`.

    Args:
      vllm_config: The engine's configuration; sizes and epsilon come from its config.json.
      rng: For the initial weights.
      self_attn: Takes (kv_cache, x [T, E], metadata), gives the updated cache and [T, E].
      mlp: Takes x [T, E], gives [T, E].
    """

    feed_forward_name: ClassVar[str] = "mlp"

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, *, self_attn: JaxModule, mlp: JaxModule) -> None:
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        size, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = JaxRmsNorm(size, rng, epsilon=epsilon, dtype=dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = JaxRmsNorm(size, rng, epsilon=epsilon, dtype=dtype)
        setattr(self, self.feed_forward_name, mlp)

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + attended
        feed_forward = getattr(self, self.feed_forward_name)
        return kv_cache, x + feed_forward(self.post_attention_layernorm(x))


def attention_from_config(
    vllm_config: VllmConfig,
    rng: nnx.Rngs,
    quant_config: QuantizationConfig | None,
    prefix: str,
    *,
    attention_class: type[GroupedQueryAttention] = GroupedQueryAttention,
    head_dim: int | None = None,
    qk_norm: bool = False,
    **options: Any,
) -> GroupedQueryAttention:
    """Grouped-query attention whose sizes and rope are config.json's.

    Args:
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      attention_class: What to make.
      head_dim: D where config.json names none; None is hidden_size / num_attention_heads.
      qk_norm: Whether queries and keys get an RMS norm a head.
      options: Of `attention_class`, as they are.
    """
    config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", head_dim or hidden_size // num_heads)
    if "rope" not in options:
        options["rope"] = make_rotary_embedding(
            rope_config(config), head_dim=head_dim, max_model_len=vllm_config.model_config.max_model_len
        )
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            options[name] = JaxRmsNorm(head_dim, rng, epsilon=config["rms_norm_eps"], dtype=dtype)
    return attention_class(
        hidden_size,
        num_heads,
        config.get("num_key_value_heads", num_heads),
        head_dim,
        rng,
        dtype=dtype,
        quant_config=quant_config,
        prefix=prefix,
        **options,
    )


def mlp_from_config(
    vllm_config: VllmConfig,
    rng: nnx.Rngs,
    quant_config: QuantizationConfig | None,
    prefix: str,
    *,
    intermediate_size: int | None = None,
    use_bias: bool = False,
) -> GatedMLP:
    """The gated feed-forward block whose sizes and activation are config.json's.

    Args:
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      intermediate_size: F; None is config.json's `intermediate_size`.
      use_bias: Whether the three projections have biases.
    """
    config = vllm_config.model_config.hf_config
    return GatedMLP(
        config["hidden_size"],
        config["intermediate_size"] if intermediate_size is None else intermediate_size,
        rng,
        activation=activation_function(config.get("hidden_act", "silu")),
        use_bias=use_bias,
        dtype=vllm_config.model_config.dtype,
        quant_config=quant_config,
        prefix=prefix,
    )
