"""The decoder-only stack that families share: embed, run the layers, norm, project to logits.

It knows nothing about the layers. A family's file defines its layer and names it in its `ForCausalLM` class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerOutput
from jaxis.layers.leaves import embedding, lm_head, rms_norm
from jaxis.layers.module import JaxModule, calls_are_observed
from jaxis.layers.norm import Norm
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.loading.headers import reading_only_headers
from jaxis.models.common.interfaces import JaxIntermediateTensors, LoadableWithIterator
from jaxis.models.common.prediction_layers import without_prediction_layers

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.config.quantization import QuantizationConfig

Caches = list[jax.Array] | None


class LayerClass(Protocol):
    """Creates a decoder layer, which maps (kv_cache, x [T, E], metadata) to the updated cache and [T, E]."""

    def __call__(self, scope: LayerScope) -> JaxModule:
        """The layer at this scope."""
        ...


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """A family's settings outside its decoder layers.

    Attributes:
      norm: The final norm; None means an RMS norm with config.json's `rms_norm_eps`.
      embed_scale: Multiplies the embeddings, after being rounded to their type.
      embedding_multiplier: Multiplies the first layer's input, including `inputs_embeds`.
      tied_by_default: Whether the head is tied to the embeddings if config.json does not say.
      logits_multiplier: Multiplies the logits.
      logits_soft_cap: Logits become `logits_soft_cap * tanh(logits / logits_soft_cap)`.
      num_prediction_layers: Layers that follow the model's own in the checkpoint, and are not loaded.
    """

    norm: Norm | None = None
    embed_scale: float = 1.0
    embedding_multiplier: float = 1.0
    tied_by_default: bool = False
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    num_prediction_layers: int = 0


class DecoderModel(JaxModule):
    """Token embeddings, `num_hidden_layers` layers, final norm.

    Args:
      scope: The model's scope.
      layer_class: Creates each layer.
      options: Settings outside the layers.

    Attributes:
      aux_hidden_state_layers: The model also returns the hidden states [T, E] that enter these layers (for speculative
        decoding and for comparing with a reference); none by default. The number of layers means the states
        that leave the last one, before the final norm.
    """

    def __init__(self, scope: LayerScope, layer_class: LayerClass, options: DecoderOptions) -> None:
        self.embedding_multiplier = options.embedding_multiplier
        self.embed_tokens = embedding(scope / "embed_tokens", scale=options.embed_scale)
        self.layers = [layer_class(scope.layer(i)) for i in range(scope.config["num_hidden_layers"])]
        self.norm = options.norm or rms_norm(scope / "norm")
        self.aux_hidden_state_layers: tuple[int, ...] = ()

    def __call__(
        self,
        kv_caches: Caches,
        input_ids: jax.Array,
        attention_metadata: AttentionMetadata,
        *,
        inputs_embeds: jax.Array | None = None,
        intermediate_tensors: JaxIntermediateTensors | None = None,
    ) -> tuple[Caches, jax.Array, list[jax.Array]]:
        """See `CausalLM.__call__`."""
        if intermediate_tensors is not None:
            x = intermediate_tensors["hidden_states"]
        else:
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            x = scaled(x, self.embedding_multiplier)
        new_caches: Caches = None if kv_caches is None else []
        aux_hidden_states = []
        for i, layer in enumerate(self.layers):
            if i in self.aux_hidden_state_layers:
                aux_hidden_states.append(x)
            with jax.named_scope(f"layer_{i}"):
                run = layer if calls_are_observed() else functools.partial(_run_layer, *nnx.split(layer))
                kv_cache, x = run(kv_caches and kv_caches[i], x, attention_metadata)
            if new_caches is not None:
                new_caches.append(kv_cache)
        if len(self.layers) in self.aux_hidden_state_layers:
            aux_hidden_states.append(x)
        return new_caches, self.norm(x), aux_hidden_states


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    kv_cache: jax.Array | None,
    x: jax.Array,
    attention_metadata: AttentionMetadata,
) -> LayerOutput:
    """Runs one layer; a separate function, so that equal layers are traced once (tracing is slower than loading)."""
    return nnx.merge(graphdef, state)(kv_cache, x, attention_metadata)


class CausalLM(JaxModule, LoadableWithIterator):
    """A decoder with an output head, which may be tied to the embeddings.

    A family sets `layer_class`, and overrides `check_config` and `options` for whatever else differs. It does not
    override the constructor, which has the signature of the model development guides.

    Args:
      vllm_config: The engine's configuration.
      rng: For the initial weights.
      quant_config: Decides how weights are stored and applied; None leaves them as they are.
      prefix: The dotted name of this model if it is part of another.

    Raises:
      ConfigError: config.json asks for something that the family does not support.
    """

    layer_class: ClassVar[LayerClass]

    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None = None,
        *,
        prefix: str = "",
    ) -> None:
        scope = LayerScope(vllm_config, rng, quant_config, prefix)
        self.check_config(scope.config)
        options = self.options(scope)
        self.logits_multiplier = options.logits_multiplier
        self.logits_soft_cap = options.logits_soft_cap
        self.num_prediction_layers = options.num_prediction_layers
        self.model = DecoderModel(scope / "model", type(self).layer_class, options)
        self.lm_head = None
        if not scope.config.get("tie_word_embeddings", options.tied_by_default):
            self.lm_head = lm_head(scope / "lm_head")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        """Declares keys of config.json that are unused (`ignore`) or supported with some values only (`expect`).

        Raises:
          ConfigError: A key has another value.
        """
        del config

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        """Reads these settings from config.json.

        Args:
          scope: The model's scope.
        """
        del scope
        return DecoderOptions()

    def __call__(
        self,
        kv_caches: Caches,
        input_ids: jax.Array,
        attention_metadata: AttentionMetadata,
        *,
        inputs_embeds: jax.Array | None = None,
        intermediate_tensors: JaxIntermediateTensors | None = None,
    ) -> tuple[Caches, jax.Array, list[jax.Array]]:
        """Runs a flat batch of T tokens.

        Args:
          kv_caches: One paged cache per layer; None runs whole sequences without a cache.
          input_ids: i32 [T].
          attention_metadata: Which tokens belong to which request, and where.
          inputs_embeds: [T, E], used instead of the embeddings of `input_ids`.
          intermediate_tensors: An earlier pipeline stage's `hidden_states` [T, E], used instead of both.

        Returns:
          The updated caches, the hidden states [T, E] after the final norm, and the auxiliary hidden states asked for.
        """
        return self.model(
            kv_caches,
            input_ids,
            attention_metadata,
            inputs_embeds=inputs_embeds,
            intermediate_tensors=intermediate_tensors,
        )

    def compute_logits(self, hidden_states: jax.Array) -> jax.Array:
        """hidden_states [T, E] -> float32 logits [T, V]."""
        head = self.model.embed_tokens.decode if self.lm_head is None else self.lm_head
        logits = head(hidden_states)
        if self.logits_multiplier == 1 and self.logits_soft_cap is None:
            return logits
        logits = scaled(logits, self.logits_multiplier)
        if self.logits_soft_cap is not None:
            logits = self.logits_soft_cap * jnp.tanh(logits / self.logits_soft_cap)
        return materialize(logits)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        return super().load_weights(self.without_redundant_tensors(weights))

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Drops tensors that some checkpoints have beyond the model's parameters: prediction layers and duplicates.

        Raises:
          CheckpointError: A tensor differs from the one that it should duplicate, or cannot be its duplicate.
        """
        embedding = None
        tied_head = None
        for name, tensor in without_prediction_layers(weights, len(self.model.layers), self.num_prediction_layers):
            # Old versions of the reference saved this buffer; here the rope is computed from the config.
            if name.endswith(".rotary_emb.inv_freq"):
                continue
            if self.lm_head is None and name == "lm_head.weight":
                tied_head = tensor
                continue
            if self.lm_head is None and name.startswith("lm_head."):
                raise CheckpointError(
                    f"the checkpoint has {name!r}, of a quantized head, but config.json has tie_word_embeddings=true; "
                    "set it to false to use the head of its own"
                )
            if self.lm_head is None and name == "model.embed_tokens.weight":
                embedding = tensor
            yield name, tensor
        if tied_head is not None and not _same_bytes(tied_head, embedding):
            raise CheckpointError(
                "lm_head.weight differs from model.embed_tokens.weight, but config.json has tie_word_embeddings=true; "
                "set it to false to use the head of its own"
            )


def _same_bytes(a: np.ndarray, b: np.ndarray | None) -> bool:
    if b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    if reading_only_headers():
        return True
    # Row by row, so that comparing two large mapped tensors allocates no memory.
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True))
