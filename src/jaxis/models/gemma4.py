"""Gemma 4, text: heads of another size in full layers, values that are keys, layers that attend to the keys and values
of an earlier one, embeddings of each layer's own, and experts beside the dense feed-forward block."""

from __future__ import annotations

import jax
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
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
from jaxis.models.common.decoder import DecoderOptions, LayerClass
from jaxis.models.common.gemma import gemma_activation, gemma_mlp
from jaxis.models.common.gemma4_layers import Gemma4Layer
from jaxis.models.common.layer_embeddings import LayerEmbeddingsModel
from jaxis.models.common.shared_caches import SharedCacheCausalLM, own_or_shared_attention
from jaxis.models.common.text_part import InnerTextPart


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
                values_are_keys=layer.values_are_keys,
            ),
            mlp=gemma_mlp(scope / "mlp", layer.intermediate_size),
        )
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
        """x [T, E] and the layer's own embeddings [T, P], if it has any -> the updated cache and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_norm(self._feed_forward(x))
        if self.per_layer_input_gate is not None and self.per_layer_projection is not None:
            assert per_layer_input is not None
            gated = self.activation(self.per_layer_input_gate(x)) * per_layer_input
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return kv_cache, x * self.layer_scalar[...]

    def _feed_forward(self, x: jax.Array) -> jax.Array:
        """x [T, E], not normed -> [T, E]."""
        y = self.mlp(self.pre_norm(x))
        if self.router is None or self.experts is None:
            return y
        of_experts = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(of_experts)


class Gemma4Model(LayerEmbeddingsModel):
    def __init__(self, scope: LayerScope, layer_class: LayerClass, options: DecoderOptions) -> None:
        config = scope.config
        super().__init__(
            scope,
            layer_class,
            options,
            layer_size=_per_layer_size(config),
            num_embeddings=_num_layer_embeddings(config) if _per_layer_size(config) else 0,
        )


class Gemma4ForCausalLM(SharedCacheCausalLM):
    layer_class = Gemma4DecoderLayer
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
        elif (size := _num_layer_embeddings(config)) < config["vocab_size"]:
            raise ConfigError(
                f"{config.source} has vocab_size_per_layer_input={size} and vocab_size={config['vocab_size']}: tokens "
                "past the first would have no embeddings in the layers"
            )

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            tied_by_default=True,
            logits_soft_cap=scope.config.get("final_logit_softcapping"),
            embed_scale=scope.config["hidden_size"] ** 0.5,
        )


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """The text of the 12B, whose config.json has other defaults."""


def _has_experts(config: HFConfig) -> bool:
    return config.get("enable_moe_block", False)


def _per_layer_size(config: HFConfig) -> int:
    """P; 0 if layers have no embeddings of their own."""
    return config.get_nullable("hidden_size_per_layer_input", 256) or 0


def _num_layer_embeddings(config: HFConfig) -> int:
    return config.get("vocab_size_per_layer_input", config["vocab_size"])


_OTHER_KEYS = (
    *("vision_config", "audio_config", "image_token_id", "audio_token_id", "video_token_id", "boi_token_id"),
    *("eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image"),
)


class Gemma4ForConditionalGeneration(InnerTextPart, Gemma4ForCausalLM):
    """E2B, E4B, 26B-A4B and 31B as published; images, video and audio are not supported."""

    text_model_types = ("gemma4_text",)
    other_parts = ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio")
    other_keys = _OTHER_KEYS


class Gemma4UnifiedForConditionalGeneration(InnerTextPart, Gemma4UnifiedForCausalLM):
    """12B as published, in which images and audio have no towers; they are not supported."""

    text_model_types = ("gemma4_unified_text",)
    other_parts = ("model.vision_embedder", "model.embed_vision", "model.embed_audio")
    other_keys = _OTHER_KEYS
