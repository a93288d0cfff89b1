"""Gemma 3n, text only.

Each token has several hidden states, of which a layer computes one. Residuals have a low rank, most gates are 0, each
layer has its own embeddings of tokens, and the last layers attend to the keys and values of earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import layer_span, layer_type
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.kernels.materialize import materialize
from jaxis.layers.altup import AltUp, join_states, split_states
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput, SandwichNormDecoderLayer
from jaxis.layers.laurel import Laurel
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.layers.sparse_glu import GaussianTopK, SparseGLU
from jaxis.models.common.decoder import DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import gemma_activation, gemma_mlp
from jaxis.models.common.layer_embeddings import LayerEmbeddingsModel
from jaxis.models.common.shared_caches import SharedCacheCausalLM, cache_owner, own_or_shared_attention
from jaxis.models.common.text_part import InnerTextPart

FULL_EVERY = 5
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # defaults


@dataclass(frozen=True)
class Gemma3nLayer:
    """Settings of a layer's attention and feed-forward block.

    Attributes:
      shares_cache_of: Layer whose keys and values this one attends to; None if it has its own.
      intermediate_size: F.
      sparsity: Share of the gates to set to 0; 0 for a block that is not sparse.
    """

    shares_cache_of: int | None
    rope: RopeConfig
    span: AttentionSpan
    intermediate_size: int
    sparsity: float

    @classmethod
    def of(cls, config: HFConfig, index: int) -> Gemma3nLayer:
        """Reads a layer's settings. Raises ConfigError if a key is missing, or no layer has a cache to share."""
        kinds = [layer_type(config, i, full_every=FULL_EVERY) for i in range(config["num_hidden_layers"])]
        return cls(
            cache_owner(config, kinds, index, default_sharing=15),
            rope_config(config, kinds[index]),
            layer_span(config, kinds[index], default_window=512),
            _intermediate_size(config, index),
            _sparsity(config, index),
        )


def _intermediate_size(config: HFConfig, index: int) -> int:
    sizes = config["intermediate_size"]
    size = _of_layer(config, "intermediate_size", sizes, index) if isinstance(sizes, list) else sizes
    if type(size) is not int or size < 1:
        raise config.fault("intermediate_size", why="expected integers of at least 1")
    return size


def _sparsity(config: HFConfig, index: int) -> float:
    listed = config.get("activation_sparsity_pattern")
    if listed is None:
        is_sparse = index < _SPARSE_LAYERS < config["num_hidden_layers"]
        return _SPARSITY if is_sparse else 0.0
    sparsity = _of_layer(config, "activation_sparsity_pattern", listed, index)
    if type(sparsity) not in (int, float) or not 0 <= sparsity < 1:
        raise config.fault(
            "activation_sparsity_pattern",
            why=f"expected numbers from 0 to less than 1, not {sparsity!r}: correct the file",
        )
    return float(sparsity)


def _of_layer(config: HFConfig, key: str, listed: Any, index: int) -> Any:
    if not isinstance(listed, list) or len(listed) != config["num_hidden_layers"]:
        raise config.fault(key, why="expected one number for each layer: correct the file")
    return listed[index]


class Gemma3nDecoderLayer(SandwichNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        layer = Gemma3nLayer.of(config, scope.layer_index)
        activation = activation_function(gemma_activation(config))
        sparse_unit = SparseGLU(activation, GaussianTopK(layer.sparsity)) if layer.sparsity else None
        super().__init__(
            scope,
            self_attn=own_or_shared_attention(scope / "self_attn", layer, head_dim=config.get("head_dim", 256)),
            mlp=gemma_mlp(scope / "mlp", layer.intermediate_size, gated_unit=sparse_unit),
        )
        hidden_size, size = config["hidden_size"], _per_layer_size(config)
        self.activation = activation
        self.altup = AltUp(scope / "altup", _num_states(config), config.get("altup_active_idx", 0))
        self.scales_corrected = config.get("altup_correct_scale", True)
        self.laurel = Laurel(scope / "laurel", config.get("laurel_rank", 64))
        self.per_layer_input_gate = linear(scope / "per_layer_input_gate", hidden_size, size, axes=(None, "embed"))
        self.per_layer_projection = linear(scope / "per_layer_projection", size, hidden_size, axes=("embed", None))
        self.post_per_layer_input_norm = rms_norm(scope)

    def __call__(
        self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata, per_layer_input: jax.Array
    ) -> LayerOutput:
        """x [T, A, E] and the layer's own embeddings [T, P] -> the updated cache and [T, A, E]."""
        predictions = self.altup.predict(x)
        active = predictions[:, self.altup.active]
        normed = self.input_layernorm(active)
        kv_cache, attended = self.mixer(kv_cache, normed, metadata)
        residual = active + self.post_attention_layernorm(attended) + self.laurel(normed)
        residual = materialize(scaled(residual, 2**-0.5))
        computed = residual + self.post_feedforward_layernorm(
            self.mlp(self.pre_feedforward_layernorm(residual), metadata)
        )
        corrected = self.altup.correct(predictions, computed)
        first = corrected[:, self.altup.active]
        if self.scales_corrected:
            first = first * self.altup.correct_output_scale[...]
        gated = self.activation(self.per_layer_input_gate(first)) * per_layer_input
        update = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return kv_cache, corrected.at[:, 1:].add(update[:, None])


class Gemma3nModel(LayerEmbeddingsModel):
    """The decoder, whose layers pass on A hidden states per token, [T, A, E]."""

    @classmethod
    def layer_table(cls, config: HFConfig) -> tuple[int, int]:
        return _per_layer_size(config), config.get("vocab_size_per_layer_input", 262_144)

    def add_parts(self, scope: LayerScope) -> None:
        super().add_parts(scope)
        config = scope.config
        size: int = config["hidden_size"]
        self.altup_projections, self.altup_unembed_projections = (
            [linear(scope / f"{name}.{i}", size, size, axes=(None, "embed")) for i in range(_num_states(config) - 1)]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def first_input(self, x: jax.Array) -> jax.Array:
        return split_states(x, self.altup_projections)

    def last_output(self, x: jax.Array) -> jax.Array:
        return join_states(x, self.altup_unembed_projections)


class Gemma3nForCausalLM(SharedCacheCausalLM):
    layer_class = Gemma3nDecoderLayer
    tied_by_default = True
    model_class = Gemma3nModel

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        active, num_states = config.get("altup_active_idx", 0), _num_states(config)
        if not 0 <= active < num_states:
            raise config.fault(
                "altup_active_idx", "altup_num_inputs", why="expected an index of the inputs, from 0: correct the file"
            )
        config.ignore("altup_coef_clip", "altup_lr_multiplier", because="it is for training")
        config.ignore("query_pre_attn_scalar", because="scores are not scaled")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            logits_soft_cap=scope.config.get("final_logit_softcapping", 30.0),
            embed_scale=scope.config["hidden_size"] ** 0.5,
        )


def _num_states(config: HFConfig) -> int:
    """Returns A, the number of hidden states per token."""
    return config.get("altup_num_inputs", 4)


def _per_layer_size(config: HFConfig) -> int:
    """Returns P, the size of a layer's own embeddings."""
    return config.get("hidden_size_per_layer_input", 256)


class Gemma3nForConditionalGeneration(InnerTextPart, Gemma3nForCausalLM):
    """E2B and E4B as published; images, video and audio are not supported."""

    is_tied_outside = True
    text_model_types = ("gemma3n_text",)
    other_parts = ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio")
    other_keys = ("audio_config", "vision_soft_tokens_per_image", "audio_soft_tokens_per_image")


FAMILY = Family(
    "Gemma 3n E2B, E4B (text)",
    (Gemma3nForCausalLM, Gemma3nForConditionalGeneration),
    "four hidden states a token, of which layers compute one (AltUp); residuals of a low rank (LAuReL); most "
    "gates of the first ten layers are 0; embeddings of each layer's own; the last layers attend to the keys "
    "and values of earlier ones",
    gguf=("gemma3n",),
    tiny={"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": lambda twin: twin["vocab_size"]},
)
