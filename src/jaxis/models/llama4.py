"""Llama 4 (text): chunked attention with rope and whole-context layers without, experts that scale their input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.rope_config import rope_config
from jaxis.errors import ConfigError
from jaxis.kernels.rms_norm import rms_norm
from jaxis.layers.attention import GroupedQueryAttention, attention, turn
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.layers.experts import StackLayout
from jaxis.layers.module import JaxModule
from jaxis.layers.moe import moe_from_config
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.routing import Routing
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.text_part import TextPart

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.quantization.config import QuantizationConfig


class Llama4Attention(GroupedQueryAttention):
    """Grouped-query attention with two things between rope and scores: an L2 norm, or a temperature.

    Args:
      l2_norm_epsilon: Not None: query and key heads are divided by their root mean square, with this epsilon.
      temperatures: Not None: (floor_scale, factors). Queries at position p are multiplied by factor
        `(p + 1) // floor_scale` (arXiv:2501.19399).
      args, options: Of `GroupedQueryAttention`.
    """

    def __init__(
        self,
        *args: Any,
        l2_norm_epsilon: float | None,
        temperatures: tuple[int, tuple[float, ...]] | None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.l2_norm_epsilon = l2_norm_epsilon
        self.temperatures = temperatures

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        q, k, v = (y.reshape(x.shape[0], -1, self.head_dim) for y in self._project(x))
        q, k = turn(self.rope, q, k, metadata, is_paged=kv_cache is not None)
        if self.l2_norm_epsilon is not None:
            no_weight = jnp.ones(self.head_dim, jnp.float32)
            q, k = (rms_norm(x, no_weight, epsilon=self.l2_norm_epsilon) for x in (q, k))
        if self.temperatures is not None:
            floor_scale, factors = self.temperatures
            factor = jnp.take(
                np.asarray(factors, np.float32), (metadata.input_positions + 1) // floor_scale, mode="clip"
            )
            q = (q * factor[:, None, None]).astype(q.dtype)
        kv_cache, out = attention(
            kv_cache,
            q,
            k,
            v,
            metadata,
            rope=None,
            scale=self.scale,
            attention_chunk_size=self.attention_chunk_size,
        )
        return kv_cache, self.o_proj(out.reshape(x.shape[0], -1))


class Llama4DecoderLayer(PreNormDecoderLayer):
    feed_forward_name = "feed_forward"

    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        *,
        layer_index: int,
        prefix: str,
    ) -> None:
        super().__init__(
            vllm_config,
            rng,
            self_attn=_attention(vllm_config, rng, quant_config, layer_index, f"{prefix}.self_attn"),
            mlp=_feed_forward(vllm_config, rng, quant_config, layer_index, f"{prefix}.feed_forward"),
        )


class Llama4ForCausalLM(CausalLM):
    layer_class = Llama4DecoderLayer


class Llama4ForConditionalGeneration(TextPart):
    """The published checkpoints, which also see; images are not served."""

    language_model_class = Llama4ForCausalLM
    other_parts = ("vision_model", "multi_modal_projector")
    other_keys = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")


def _attention(
    vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None, layer_index: int, prefix: str
) -> Llama4Attention:
    config = vllm_config.model_config.hf_config
    head_dim = config.get("head_dim", 128)
    rope = make_rotary_embedding(
        rope_config(config),
        head_dim=head_dim,
        max_model_len=vllm_config.model_config.max_model_len,
        interleaved=True,
    )
    temperatures = _temperatures(config)
    has_temperature, has_norm = config.get("attn_temperature_tuning", True), config.get("use_qk_norm", True)
    has_rope, chunk_size = _has_rope(config, layer_index), _chunk_size(config, layer_index)
    attention_bias = config.get("attention_bias", False)
    return attention_from_config(
        vllm_config,
        rng,
        quant_config,
        prefix,
        attention_class=Llama4Attention,
        head_dim=head_dim,
        rope=rope if has_rope else None,
        l2_norm_epsilon=config["rms_norm_eps"] if has_norm and has_rope else None,
        temperatures=temperatures if has_temperature and not has_rope else None,
        attention_chunk_size=chunk_size,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )


def _temperatures(config: HFConfig) -> tuple[int, tuple[float, ...]]:
    """`floor_scale`, and the factor of each stretch of so many positions."""
    floor_scale, attn_scale = config.get("floor_scale", 8192), config.get("attn_scale", 0.1)
    num_factors = config["max_position_embeddings"] // floor_scale + 1
    factors = 1 + attn_scale * np.log1p(np.arange(num_factors, dtype=np.float32))
    return floor_scale, tuple(factors.astype(np.float32).tolist())


def _has_rope(config: HFConfig, layer_index: int) -> bool:
    """`no_rope_layers` has a 1, despite its name, for each layer that has a rope; empty is as if it were not there."""
    interval, layers = config.get("no_rope_layer_interval", 4), config.get("no_rope_layers")
    return bool(layers[layer_index]) if layers else (layer_index + 1) % interval != 0


def _chunk_size(config: HFConfig, layer_index: int) -> int | None:
    """Chunks where `layer_types` says so, or else in layers that have a rope."""
    types, size = config.get("layer_types"), config.get("attention_chunk_size", 8192)
    if types is None:
        return size if _has_rope(config, layer_index) else None
    if types[layer_index] not in ("chunked_attention", "full_attention"):
        raise ConfigError(f"layer_types[{layer_index}]={types[layer_index]!r} in {config.source} is not supported")
    return size if types[layer_index] == "chunked_attention" else None


def _feed_forward(
    vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None, layer_index: int, prefix: str
) -> JaxModule:
    config = vllm_config.model_config.hf_config
    dense_size, sparse_size = config["intermediate_size_mlp"], config["intermediate_size"]
    routing = Routing(
        num_experts=config["num_local_experts"],
        num_experts_per_token=config.get("num_experts_per_tok", 1),
        score_function="sigmoid",
        scales_input=True,
    )
    moe_layers, step = config.get("moe_layers"), config.get("interleave_moe_layer_step", 1)
    is_sparse = (layer_index + 1) % step == 0 if moe_layers is None else layer_index in moe_layers
    if not is_sparse:
        return mlp_from_config(vllm_config, rng, quant_config, prefix, intermediate_size=dense_size)
    return moe_from_config(
        vllm_config,
        rng,
        quant_config,
        prefix,
        routing=routing,
        intermediate_size=sparse_size,
        stack_layout=StackLayout(transposed=True),
        router_name="router",
        shared_experts_name="shared_expert",
        shared_experts=mlp_from_config(
            vllm_config, rng, quant_config, f"{prefix}.shared_expert", intermediate_size=sparse_size
        ),
    )
