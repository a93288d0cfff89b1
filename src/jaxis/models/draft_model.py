"""A whole model that drafts tokens for another one of the same vocabulary (arXiv:2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.module import JaxModule


class DraftModel(JaxModule):
    """A model that drafts from tokens alone, with the interface of `PredictionLayer`.

    Args:
      vocab_size: Number of the target's token ids; larger ids are never drafted.

    Attributes:
      reads_next_token: False: the row of a token takes this token itself.
    """

    reads_next_token = False

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size

    def first_states(self, hidden_states: jax.Array, aux_hidden_states: Sequence[jax.Array]) -> jax.Array:
        del aux_hidden_states
        return hidden_states

    def __call__(
        self,
        target: Any,
        kv_caches: list[Any] | None,
        input_ids: jax.Array,
        states: jax.Array,
        attention_metadata: AttentionMetadata,
    ) -> tuple[list[Any] | None, jax.Array]:
        """Runs the model over a flat batch, as `CausalLM` does -> the updated caches and hidden states [T, E]."""
        del target, states
        kv_caches, hidden_states, _ = self.model(kv_caches, input_ids, attention_metadata)
        return kv_caches, hidden_states

    def compute_logits(self, target: Any, states: jax.Array) -> jax.Array:
        """Hidden states [T, E] -> float32 logits [T, V]."""
        del target
        return self.model.compute_logits(states)[:, : self.vocab_size]

    def token_ids(self, indices: jax.Array) -> jax.Array:
        return indices
