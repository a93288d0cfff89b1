"""Decoder layers by where their norms stand, and what they are put together from, made from config.json."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from flax import nnx

from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.layers.attention import GroupedQueryAttention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import rms_norm_from_config
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.scale import scaled

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
      make_norm: Makes each of the two norms; None is an RMS norm with config.json's `rms_norm_eps`.
      residual_multiplier: Multiplies what is added to x.
    """

    feed_forward_name: ClassVar[str] = "mlp"

    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        *,
        self_attn: JaxModule,
        mlp: JaxModule,
        make_norm: Callable[[], JaxModule] | None = None,
        residual_multiplier: float = 1.0,
    ) -> None:
        make_norm = make_norm or functools.partial(rms_norm_from_config, vllm_config, rng)
        self.residual_multiplier = residual_multiplier
        self.input_layernorm = make_norm()
        self.self_attn = self_attn
        self.post_attention_layernorm = make_norm()
        setattr(self, self.feed_forward_name, mlp)

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + scaled(attended, self.residual_multiplier)
        feed_forward = getattr(self, self.feed_forward_name)
        return kv_cache, x + scaled(feed_forward(self.post_attention_layernorm(x)), self.residual_multiplier)


class PostNormDecoderLayer(JaxModule):
    """`x + norm(self_attn(x))`, then `x + norm(mlp(x))`: norms only on what is added.

    Args:
      vllm_config, rng, self_attn, mlp: As for `PreNormDecoderLayer`.
    """

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, *, self_attn: JaxModule, mlp: JaxModule) -> None:
        self.self_attn = self_attn
        self.mlp = mlp
        self.post_attention_layernorm = rms_norm_from_config(vllm_config, rng)
        self.post_feedforward_layernorm = rms_norm_from_config(vllm_config, rng)

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """As `PreNormDecoderLayer.__call__`."""
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = x + self.post_attention_layernorm(attended)
        return kv_cache, x + self.post_feedforward_layernorm(self.mlp(x))


class SandwichNormDecoderLayer(JaxModule):
    """`x + norm(self_attn(norm(x)))`, then `x + norm(mlp(norm(x)))`.

    Args:
      self_attn, mlp: As for `PreNormDecoderLayer`.
      make_norm: Makes each of the four norms.
    """

    def __init__(self, *, self_attn: JaxModule, mlp: JaxModule, make_norm: Callable[[], JaxModule]) -> None:
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = make_norm()
        self.post_attention_layernorm = make_norm()
        self.pre_feedforward_layernorm = make_norm()
        self.post_feedforward_layernorm = make_norm()

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """As `PreNormDecoderLayer.__call__`."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + self.post_attention_layernorm(attended)
        return kv_cache, x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


def attention_from_config(
    vllm_config: VllmConfig,
    rng: nnx.Rngs,
    quant_config: QuantizationConfig | None,
    prefix: str,
    *,
    attention_class: type[GroupedQueryAttention] = GroupedQueryAttention,
    head_dim: int | None = None,
    qk_norm: bool = False,
    rope_settings: RopeConfig | None = None,
    interleaved_rope: bool = False,
    **options: Any,
) -> GroupedQueryAttention:
    """Grouped-query attention whose sizes and rope are config.json's.

    Args:
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      attention_class: What to make.
      head_dim: D where config.json names none; None is hidden_size / num_attention_heads.
      qk_norm: Whether queries and keys get an RMS norm a head.
      rope_settings: None is what config.json says of all layers.
      interleaved_rope: Whether the rope pairs neighbouring dimensions.
      options: Of `attention_class`, as they are.
    """
    config = vllm_config.model_config.hf_config
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", head_dim or hidden_size // num_heads)
    if "rope" not in options:
        options["rope"] = make_rotary_embedding(
            rope_settings or rope_config(config),
            head_dim=head_dim,
            max_model_len=vllm_config.model_config.max_model_len,
            interleaved=interleaved_rope,
        )
    if qk_norm:
        options |= {name: rms_norm_from_config(vllm_config, rng, head_dim) for name in ("q_norm", "k_norm")}
    return attention_class(
        hidden_size,
        num_heads,
        config.get("num_key_value_heads", num_heads),
        head_dim,
        rng,
        dtype=vllm_config.model_config.dtype,
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
    activation: str | None = None,
    **options: Any,
) -> GatedMLP:
    """The gated feed-forward block whose sizes and activation are config.json's.

    Args:
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      intermediate_size: F; None is config.json's `intermediate_size`.
      activation: Its name; None is config.json's `hidden_act`.
      options: Of `GatedMLP`, as they are.
    """
    config = vllm_config.model_config.hf_config
    return GatedMLP(
        config["hidden_size"],
        config["intermediate_size"] if intermediate_size is None else intermediate_size,
        rng,
        activation=activation_function(activation or config.get("hidden_act", "silu")),
        dtype=vllm_config.model_config.dtype,
        quant_config=quant_config,
        prefix=prefix,
        **options,
    )
