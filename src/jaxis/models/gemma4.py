"""Gemma 4: full layers with larger heads, whose values are keys in some sizes.

Small models also have layers that attend to the keys and values of earlier ones, and embeddings of each layer's own.
One model has experts beside the dense feed-forward block.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import jax
from flax import nnx

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_settings import settings_of_layer
from jaxis.config.layer_types import FULL_ATTENTION, layer_span, layer_type
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput, SandwichNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.glu import GLU
from jaxis.layers.leaves import experts, linear, rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import make_parameter
from jaxis.layers.normed_router import NormedRouter
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import gemma_activation, gemma_mlp
from jaxis.models.common.layer_embeddings import LayerEmbeddingsModel
from jaxis.models.common.shared_caches import (
    NormedValuesAttention,
    SharedCacheCausalLM,
    cache_owner,
    own_or_shared_attention,
)
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.gemma4 import Gemma4UnifiedVision, Gemma4Vision

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig


FULL_EVERY = 6


@dataclass(frozen=True)
class Gemma4Layer:
    """Settings of a layer's attention, and the size of its feed-forward block.

    Attributes:
      head_dim: D.
      num_kv_heads: K.
      intermediate_size: F.
      values_are_keys: True if one projection gives both keys and values.
      shares_cache_of: Layer whose keys and values this one attends to; None if it has its own.
    """

    head_dim: int
    num_kv_heads: int
    values_are_keys: bool
    shares_cache_of: int | None
    rope: RopeConfig
    span: AttentionSpan
    intermediate_size: int

    @classmethod
    def of(cls, config: HFConfig, index: int) -> Gemma4Layer:
        """Reads a layer's settings. Raises ConfigError if a key is missing, or no layer has a cache to share."""
        kind = _kind(config, index)
        kinds = [_kind(config, i) for i in range(config["num_hidden_layers"])]
        owner = cache_owner(config, kinds, index)
        values_are_keys = config.get("attention_k_eq_v", False) and kind == FULL_ATTENTION
        is_wide = config.get("use_double_wide_mlp", False) and owner is not None
        head_dim, num_kv_heads = _head_sizes(config, index, kind)
        return cls(
            head_dim,
            num_kv_heads,
            values_are_keys,
            owner,
            rope_config(config, kind),
            layer_span(config, kind, default_window=512),
            config["intermediate_size"] * (2 if is_wide else 1),
        )


def _kind(config: HFConfig, index: int) -> str:
    """Returns the layer's type; the last layer has full attention, whatever `layer_types` says."""
    kind = layer_type(config, index, full_every=FULL_EVERY)
    return FULL_ATTENTION if index == config["num_hidden_layers"] - 1 else kind


def _head_sizes(config: HFConfig, index: int, kind: str) -> tuple[int, int]:
    """Returns D and K: from `per_layer_config`, which newer versions of the reference write, or by the layer's type."""
    head_dim: int = config.get("head_dim", 256)
    num_kv_heads: int = config.get("num_key_value_heads", 4)
    if "per_layer_config" in config:
        config.ignore("global_head_dim", "num_global_key_value_heads", because="per_layer_config has the sizes")
        own = settings_of_layer(config, index)
        return own.get("head_dim", head_dim), own.get("num_key_value_heads", num_kv_heads)
    if kind != FULL_ATTENTION:
        return head_dim, num_kv_heads
    if not config.get("attention_k_eq_v", False):
        config.ignore("num_global_key_value_heads", because="the reference reads it only with attention_k_eq_v")
        return config.get("global_head_dim", 512), num_kv_heads
    return config.get("global_head_dim", 512), config.get("num_global_key_value_heads", num_kv_heads)


class KeysAsValuesAttention(NormedValuesAttention):
    """Attention whose keys, before norm and rope, are also the values."""

    kv_projections = ("k_proj",)

    def project(self, x: jax.Array) -> list[jax.Array]:
        q, k = super().project(x)
        return [q, k, k]


class Gemma4DecoderLayer(SandwichNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        layer = Gemma4Layer.of(config, scope.layer_index)
        super().__init__(
            scope,
            self_attn=own_or_shared_attention(
                scope / "self_attn",
                layer,
                head_dim=layer.head_dim,
                num_kv_heads=layer.num_kv_heads,
                own=KeysAsValuesAttention if layer.values_are_keys else NormedValuesAttention,
            ),
            mlp=gemma_mlp(scope / "mlp", layer.intermediate_size),
        )
        # Tokens of an image see each other in windows only.
        self.is_causal = layer.span == FULL_CONTEXT
        self.layer_scalar = make_parameter(scope.rngs, nnx.initializers.ones, (1,), scope.dtype, axes=(None,))
        self.activation = activation_function(gemma_activation(config))
        self.router = self.experts = None
        if _has_experts(config):
            routing = Routing(
                num_experts=config["num_experts"], num_experts_per_token=config["top_k_experts"], renormalize=True
            )
            self.router = NormedRouter(scope / "router", routing)
            self.experts = experts(
                scope / "experts",
                routing,
                config["moe_intermediate_size"],
                gated_unit=GLU(self.activation),
                stack_layout=StackLayout(transposed=False),
            )
            self.pre_feedforward_layernorm_2 = rms_norm(scope)
            self.post_feedforward_layernorm_1 = rms_norm(scope)
            self.post_feedforward_layernorm_2 = rms_norm(scope)
        self.per_layer_input_gate = self.per_layer_projection = None
        if size := _per_layer_size(config):
            hidden_size: int = config["hidden_size"]
            self.per_layer_input_gate = linear(scope / "per_layer_input_gate", hidden_size, size, axes=(None, "embed"))
            self.per_layer_projection = linear(scope / "per_layer_projection", size, hidden_size, axes=("embed", None))
            self.post_per_layer_input_norm = rms_norm(scope)

    def __call__(
        self,
        kv_cache: LayerCache,
        x: jax.Array,
        metadata: AttentionMetadata,
        per_layer_input: jax.Array | None = None,
    ) -> LayerOutput:
        """x [T, E] and the layer's own embeddings [T, P], if any -> the updated cache and [T, E]."""
        seen = dataclasses.replace(metadata, bidirectional=None) if self.is_causal else metadata
        kv_cache, attended = self.mixer(kv_cache, self.input_layernorm(x), seen)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self._feed_forward(x, metadata))
        if self.per_layer_input_gate is not None and self.per_layer_projection is not None:
            assert per_layer_input is not None
            gated = self.activation(self.per_layer_input_gate(x)) * per_layer_input
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        # Training does not change this scalar.
        return kv_cache, x * jax.lax.stop_gradient(self.layer_scalar[...])

    def _feed_forward(self, x: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """x [T, E] before the norm -> [T, E]."""
        y = self.mlp(self.pre_feedforward_layernorm(x), metadata)
        if self.router is None or self.experts is None:
            return y
        of_experts = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x), metadata)
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(of_experts)


class Gemma4Model(LayerEmbeddingsModel):
    @classmethod
    def layer_table(cls, config: HFConfig) -> tuple[int, int]:
        return _per_layer_size(config), _num_layer_embeddings(config) if _per_layer_size(config) else 0


class Gemma4ForCausalLM(SharedCacheCausalLM):
    layer_class = Gemma4DecoderLayer
    tied_by_default = True
    model_class = Gemma4Model

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        # "vision": only between the tokens of an image.
        config.expect("use_bidirectional_attention", None, False, "vision")
        if not _has_experts(config):
            for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                config.ignore(key, because="there are no experts without enable_moe_block")
        if not _per_layer_size(config):
            config.ignore("vocab_size_per_layer_input", because="layers have no embeddings of their own")
        elif _num_layer_embeddings(config) < config["vocab_size"]:
            why = "so that tokens past the first would have no embeddings in the layers"
            raise config.fault("vocab_size_per_layer_input", "vocab_size", why=why)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            logits_soft_cap=scope.config.get("final_logit_softcapping"),
            embed_scale=scope.config["hidden_size"] ** 0.5,
        )


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """The text model of the 12B, whose config.json has other defaults."""


def _has_experts(config: HFConfig) -> bool:
    return config.get("enable_moe_block", False)


def _per_layer_size(config: HFConfig) -> int:
    """Returns P, the size of a layer's own embeddings; 0 without them."""
    return config.get("hidden_size_per_layer_input", 256) or 0


def _num_layer_embeddings(config: HFConfig) -> int:
    return config.get("vocab_size_per_layer_input", config["vocab_size"])


_PLACEHOLDERS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}


class Gemma4ForConditionalGeneration(InnerTextPart, Gemma4ForCausalLM):
    """E2B, E4B, 26B-A4B and 31B as published, with their image encoder; video and audio are not supported."""

    is_tied_outside = True
    tower = Gemma4Vision
    text_model_types = ("gemma4_text",)
    other_parts = ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio")
    other_keys = ("audio_config", "vision_soft_tokens_per_image")

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        super().__init__(vllm_config, rng, quant_config)
        config, model = vllm_config.model_config.hf_config, cast(Gemma4Model, self.model)
        model.placeholders = tuple(config.get(key, default) for key, default in _PLACEHOLDERS.items())
        model.padding_id = config.get_text_config().get("pad_token_id", 0)


class Gemma4UnifiedForConditionalGeneration(InnerTextPart, Gemma4UnifiedForCausalLM):
    """12B as published, whose image encoder has no transformer; video and audio are not supported."""

    is_tied_outside = True
    tower = Gemma4UnifiedVision
    text_model_types = ("gemma4_unified_text",)
    other_parts = ("model.vision_embedder", "model.embed_vision", "model.embed_audio")
    other_keys = ("audio_config", "vision_soft_tokens_per_image")


_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

FAMILY = Family(
    "Gemma 4 E2B, E4B, 12B, 26B-A4B, 31B",
    (
        Gemma4ForCausalLM,
        Gemma4UnifiedForCausalLM,
        Gemma4ForConditionalGeneration,
        Gemma4UnifiedForConditionalGeneration,
    ),
    "a window in most layers; heads of 512 in the full ones, whose values are their keys from 12B on; the "
    "last layers of E2B and E4B attend to the keys and values of earlier ones, and every layer has embeddings "
    "of its own; 26B-A4B has 128 experts beside the dense feed-forward",
    gguf=("gemma4",),
    defaults={
        "gemma4_text": {"rope_parameters": _ROPES},
        "gemma4_unified_text": {"rope_parameters": _ROPES, "hidden_size_per_layer_input": 0},
    },
    tiny={
        "global_head_dim": 48,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 16,  # whose root is exact in bfloat16, as it is published
        "vocab_size_per_layer_input": lambda twin: twin["vocab_size"],
    },
)
