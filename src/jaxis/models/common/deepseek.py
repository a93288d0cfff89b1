"""Code shared by DeepSeek V2, V3 and later families: the decoder layer with latent attention, and routing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.mla import LatentAttention, LatentAttentionSizes, MultiHeadLatentAttention
from jaxis.layers.query_scale import QueryScale
from jaxis.layers.rope import RotaryEmbedding, make_rotary_embedding
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.sparse_layers import dense_or_sparse, sigmoid_routing

Attention = TypeVar("Attention", bound=LatentAttention)


class DeepseekDecoderLayer(PreNormDecoderLayer):
    """`x = x + latent_attention(norm(x))`
    `x = x + mlp(norm(x))`, where mlp is a dense block, or a mixture of experts plus one wide shared block.

    Args:
      use_selection_bias: True if the router has a selection bias.
      interleaved_rope: True if the rope pairs neighbouring dimensions.
      mlp_bias: True if the dense and the shared block have biases.
      stack_layout: Layout of stacked experts, as in `JaxExperts`.
      self_attn: Attention module; None means `latent_attention`.

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
        stack_layout: StackLayout | None = None,
        self_attn: MultiHeadLatentAttention | None = None,
    ) -> None:
        if self_attn is None:
            self_attn = latent_attention(scope / "self_attn", interleaved_rope=interleaved_rope)
        mlp = dense_or_sparse(
            scope,
            routing,
            is_sparse=is_sparse,
            num_shared_experts=scope.config["n_shared_experts"] if is_sparse else 0,
            use_bias=mlp_bias,
            stack_layout=stack_layout,
            use_selection_bias=use_selection_bias,
        )
        super().__init__(scope, self_attn=self_attn, mlp=mlp)


class DeepseekCausalLM(CausalLM):
    """Base of models whose checkpoints may have multi-token-prediction layers; each sets its layer class."""

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        return PredictionNames.numbered(config)


def latent_attention(
    scope: LayerScope, *, interleaved_rope: bool = True, query_scale: QueryScale | None = None
) -> MultiHeadLatentAttention:
    """Latent attention with config.json's sizes, rope and scale. Raises ConfigError if sizes are inconsistent.

    `interleaved_rope` pairs neighbouring dimensions. `query_scale` is that of `MultiHeadLatentAttention`.
    """
    settings = LatentAttentionSettings.of(scope)
    # A redundant key that transformers derives from others.
    scope.config.expect("head_dim", settings.sizes.qk_rope_head_dim, settings.sizes.qk_head_dim)
    return settings.make(MultiHeadLatentAttention, scope, interleaved=interleaved_rope, query_scale=query_scale)


@dataclass(frozen=True)
class LatentAttentionSettings:
    """Settings of latent attention in config.json.

    Attributes:
      rope: Settings of the rope; None for no positions.
      max_model_len: Longest sequence that the engine will serve, in tokens.
      scale: Factor of the scores.
      use_bias: True if the projections to latents and of the output have biases.
    """

    sizes: LatentAttentionSizes
    rope: RopeConfig | None
    max_model_len: int
    scale: float
    use_bias: bool

    @classmethod
    def of(cls, scope: LayerScope) -> LatentAttentionSettings:
        """Reads config.json. Raises ConfigError if the sizes are inconsistent."""
        config, rope = scope.config, rope_config(scope.config)
        settings = cls.with_rope(scope, rope)
        sizes = settings.sizes
        if rope.partial_rotary_factor not in (1.0, sizes.qk_rope_head_dim / sizes.qk_head_dim):
            raise config.fault(
                "qk_rope_head_dim",
                why=f"of {sizes.qk_head_dim} dimensions, but partial_rotary_factor={rope.partial_rotary_factor!r}: "
                "correct the file",
            )
        return settings

    @classmethod
    def with_rope(cls, scope: LayerScope, rope: RopeConfig | None) -> LatentAttentionSettings:
        """Reads all settings but the rope. Raises ConfigError if the sizes are inconsistent.

        The rope rotates all `qk_rope_head_dim` dimensions, whatever its `partial_rotary_factor` says; None: no
        positions.
        """
        sizes = latent_attention_sizes(scope.config)
        scale = sizes.qk_head_dim**-0.5
        if rope is not None:
            if not sizes.qk_rope_head_dim:
                raise scope.config.fault("qk_rope_head_dim", why="but heads have a rope: expected at least 1")
            # The sizes of a head say which share is rotated: all of the rope's own dimensions are.
            rope = dataclasses.replace(rope, partial_rotary_factor=1.0)
            scale *= yarn_mscale(rope) ** 2
        return cls(sizes, rope, scope.max_model_len, scale, scope.config.get("attention_bias", False))

    def make(
        self, attention: Callable[..., Attention], scope: LayerScope, *, interleaved: bool = True, **options: Any
    ) -> Attention:
        """Makes a layer of these settings; `options` are its others, and `interleaved` is as in `make_rope`."""
        rope = None if self.rope is None else self.make_rope(interleaved=interleaved)
        return attention(scope, self.sizes, rope=rope, scale=self.scale, use_bias=self.use_bias, **options)

    def make_rope(self, *, interleaved: bool) -> RotaryEmbedding:
        """Makes the rope, which must have settings; `interleaved` pairs neighbouring dimensions."""
        assert self.rope is not None
        return make_rotary_embedding(
            self.rope,
            head_dim=self.sizes.qk_rope_head_dim,
            max_model_len=self.max_model_len,
            interleaved=interleaved,
        )


def yarn_mscale(rope: RopeConfig) -> float:
    """The factor on queries and keys for a context extended by YaRN."""
    if rope.mscale_all_dim is None or rope.factor is None or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def deepseek_v3_routing(config: HFConfig) -> Routing:
    """Makes the routing that a config.json describes, DeepSeek V3's, with sigmoid scores.

    The best experts of the best groups are chosen by scores with a bias, and weighed by scores without it.

    Raises ConfigError if config.json asks for another method.
    """
    return sigmoid_routing(
        config,
        renormalize=config["norm_topk_prob"],
        scaling_factor=config["routed_scaling_factor"],
        num_groups=config["n_group"],
        num_allowed_groups=config["topk_group"],
    )


def latent_attention_sizes(config: HFConfig) -> LatentAttentionSizes:
    """Reads latent attention's sizes under DeepSeek's keys. Raises ConfigError if the sizes are inconsistent."""
    sizes = LatentAttentionSizes(
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        # MiniCPM3's files lack this key; other families' files always have it.
        v_head_dim=config.get("v_head_dim", config["hidden_size"] // config["num_attention_heads"]),
    )
    # Redundant keys that transformers derives from the others.
    config.expect_all(num_key_value_heads=sizes.num_heads, qk_head_dim=sizes.qk_head_dim)
    return sizes
