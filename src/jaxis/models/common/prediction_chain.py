"""Several multi-token-prediction layers (arXiv:2412.19437), each with weights and a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import HasCache
from jaxis.layers.module import JaxModule, named_modules
from jaxis.models.common.interfaces import DraftTarget
from jaxis.models.common.prediction_layers import PredictionLayer


class PredictionChain(JaxModule):
    """Layer l predicts the token l + 2 places after each token, as in training: in the row of token i, it reads the
    hidden state of that row and the embedding of token i + l + 1.

    The newest rows read tokens that layers before have drafted. They are computed again, in all layers, once these
    tokens are known (`DraftLayers`), as transformers' `MTPCandidateGenerator` does. SGLang does so for models with
    recurrent layers only, and else leaves what wrong drafts have written in the caches.

    Args:
      layers: In their order, at least two.
      chains_states: Whether each reads the hidden states of the one before it, as in DeepSeek's paper; else all read
        the target's.

    Attributes:
      reads_next_token: See `PredictionLayer`.
    """

    reads_next_token = True

    def __init__(self, layers: Sequence[PredictionLayer], chains_states: bool) -> None:
        self.layers = list(layers)
        self.chains_states = chains_states

    @property
    def num_layers(self) -> int:
        """See `DraftsByChain`."""
        return len(self.layers)

    def first_states(self, hidden_states: jax.Array, aux_hidden_states: Sequence[jax.Array]) -> jax.Array:
        """See `DraftsByChain`."""
        return self.layers[0].first_states(hidden_states, aux_hidden_states)

    def layer_input(self, first_states: jax.Array, previous: jax.Array) -> jax.Array:
        """See `DraftsByChain`."""
        return previous if self.chains_states else first_states

    def run_layer(
        self,
        index: int,
        target: DraftTarget,
        kv_caches: list[Any] | None,
        next_ids: jax.Array,
        states: jax.Array,
        attention_metadata: AttentionMetadata,
    ) -> tuple[list[Any] | None, jax.Array]:
        """See `DraftsByChain`, and `PredictionLayer`.

        Args:
          index: Of the layer, from 0.
          target: The model whose embeddings it uses.
          kv_caches: Those of all layers; None runs whole sequences without a cache.
          next_ids: i32 [T], of each token the one `index + 1` places after it.
          states: [T, E].
          attention_metadata: Of the tokens.
        """
        layer = self.layers[index]
        if kv_caches is None:
            return layer(target, None, next_ids, states, attention_metadata)
        begin = sum(map(_num_caches, self.layers[:index]))
        end = begin + _num_caches(layer)
        own, states = layer(target, kv_caches[begin:end], next_ids, states, attention_metadata)
        return [*kv_caches[:begin], *(own or ()), *kv_caches[end:]], states

    def layer_logits(self, index: int, target: DraftTarget, states: jax.Array) -> jax.Array:
        """See `DraftsByChain`."""
        return self.layers[index].compute_logits(target, states)


def _num_caches(layer: PredictionLayer) -> int:
    return sum(isinstance(module, HasCache) for _, module in named_modules(layer))
