"""The decoder-only stack that families share: embed, run the layers, norm, project to logits.

It knows nothing of what a layer is. A family file defines its layer and names it in its `ForCausalLM` class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.embed import JaxEmbed, JaxLmHead
from jaxis.layers.module import JaxModule, calls_are_observed
from jaxis.layers.norm import rms_norm_from_config
from jaxis.layers.scale import scaled
from jaxis.loading.headers import reading_only_headers
from jaxis.models.common.interfaces import JaxIntermediateTensors, LoadableWithIterator

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig

Caches = list[jax.Array] | None


class DecoderModel(JaxModule):
    """Token embeddings, `num_hidden_layers` layers, final norm.

    Args:
      layer_class: Makes a layer of (vllm_config, rng, quant_config, layer_index=, prefix=).
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      norm: The final norm; None is an RMS norm with config.json's `rms_norm_eps`.
      embed_scale: As `JaxEmbed`'s `scale`.
      embedding_multiplier: What enters the first layer is multiplied by it, `inputs_embeds` too.

    Attributes:
      aux_hidden_state_layers: The model also returns the hidden states [T, E] that enter these layers (for speculative
        decoding and for comparing with a reference); none by default. The number of layers itself names the states
        that leave the last one, before the final norm.
    """

    def __init__(
        self,
        layer_class: type[JaxModule],
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        prefix: str,
        *,
        norm: JaxModule | None = None,
        embed_scale: float = 1.0,
        embedding_multiplier: float = 1.0,
    ) -> None:
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.embedding_multiplier = embedding_multiplier
        self.embed_tokens = JaxEmbed(
            config["vocab_size"],
            config["hidden_size"],
            rng,
            scale=embed_scale,
            dtype=dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        self.layers = [
            layer_class(vllm_config, rng, quant_config, layer_index=i, prefix=f"{prefix}.layers.{i}")
            for i in range(config["num_hidden_layers"])
        ]
        self.norm = norm or rms_norm_from_config(vllm_config, rng)
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
        """As `CausalLM.__call__`."""
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
) -> tuple[jax.Array | None, jax.Array]:
    """A function of its own, so that layers alike are traced once: tracing takes longer than loading the program."""
    return nnx.merge(graphdef, state)(kv_cache, x, attention_metadata)


class CausalLM(JaxModule, LoadableWithIterator):
    """A decoder with an output head of its own or tied to the embeddings. A family sets `layer_class`.

    Args:
      vllm_config, rng, quant_config: As for `JaxLinear`.
      prefix: What the model's dotted names begin with where it is a part of another.
      tied_by_default: Whether the head is tied to the embeddings where config.json says nothing of it.
      logits_multiplier: Multiplies the logits.
      logits_soft_cap: Logits become `logits_soft_cap * tanh(logits / logits_soft_cap)`.
      norm, embed_scale, embedding_multiplier: As for `DecoderModel`.
    """

    layer_class: ClassVar[type[JaxModule]]

    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None = None,
        *,
        tied_by_default: bool = False,
        logits_multiplier: float = 1.0,
        logits_soft_cap: float | None = None,
        norm: JaxModule | None = None,
        embed_scale: float = 1.0,
        embedding_multiplier: float = 1.0,
        prefix: str = "",
    ) -> None:
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.logits_multiplier = logits_multiplier
        self.logits_soft_cap = logits_soft_cap
        self.model = DecoderModel(
            self.layer_class,
            vllm_config,
            rng,
            quant_config,
            f"{prefix}model",
            norm=norm,
            embed_scale=embed_scale,
            embedding_multiplier=embedding_multiplier,
        )
        self.lm_head = None
        if not config.get("tie_word_embeddings", tied_by_default):
            self.lm_head = JaxLmHead(
                config["hidden_size"],
                config["vocab_size"],
                rng,
                dtype=dtype,
                quant_config=quant_config,
                prefix=f"{prefix}lm_head",
            )

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
          kv_caches: One paged cache a layer; None runs whole sequences without a cache.
          input_ids: i32 [T].
          attention_metadata: Which tokens belong to which request, and where.
          inputs_embeds: [T, E] in place of the embeddings of `input_ids`.
          intermediate_tensors: An earlier pipeline stage's `hidden_states` [T, E] in place of both.

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
        """Drops what some checkpoints hold besides their parameters, after making sure that it says nothing new."""
        embedding = None
        tied_head = None
        for name, tensor in weights:
            # A buffer that old versions of the reference saved; the rope is computed from the config.
            if name.endswith(".rotary_emb.inv_freq"):
                continue
            if self.lm_head is None and name == "lm_head.weight":
                tied_head = tensor
                continue
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
    # Row by row, so that comparing two large mapped tensors takes no memory.
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True))
