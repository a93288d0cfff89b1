"""The interfaces between model classes, the loader and the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import numpy as np
from flax import nnx

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.weight_loader import JaxAutoWeightsLoader


class JaxIntermediateTensors(dict):
    """Named arrays that one pipeline stage passes to the next, including `hidden_states`."""


@runtime_checkable
class DropsRedundantTensors(Protocol):
    """A model whose checkpoints may contain the same tensor twice."""

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Drops tensors that duplicate others, after checking that they do."""
        ...


@runtime_checkable
class RenamesTensors(Protocol):
    """A model whose checkpoints have other names for some of its parameters."""

    def parameter_name(self, name_in_file: str) -> str:
        """The name of the parameter that a tensor of this name fills; of a parameter's own name, that name."""
        ...


class DraftTarget(Protocol):
    """A model for which layers draft tokens with its own embeddings and head: a `CausalLM`."""

    @property
    def decoder(self) -> Any:
        """The decoder below the head, a `DecoderModel`."""
        ...

    def compute_logits(self, hidden_states: jax.Array) -> jax.Array:
        """hidden_states [T, E] -> float32 logits [T, V]."""
        ...


@runtime_checkable
class DraftsBlocks(Protocol):
    """Layers that draft all tokens of a block in one pass, not one after the other: a `DFlashHead`."""

    @property
    def block_size(self) -> int:
        """Most tokens of a block: the newest one, and those that are drafted behind it."""
        ...

    def write_context(
        self, kv_caches: Sequence[Any], aux_hidden_states: Sequence[jax.Array], metadata: AttentionMetadata
    ) -> list[Any]:
        """The caches, with a step's tokens, of which the target's layers return these states, each [T, E]."""
        ...

    def draft_blocks(
        self,
        target: DraftTarget,
        kv_caches: Sequence[Any],
        newest_ids: jax.Array,
        num_drafts: int,
        metadata: AttentionMetadata,
    ) -> tuple[list[Any], jax.Array]:
        """The caches, and float32 logits [R * num_drafts, V] of the tokens after the newest ones i32 [R]."""
        ...


DRAFT_PREFIX = "draft."
"""How the names of the parts of a model begin that `draft_of` returns."""


def draft_of(model: Any) -> Any:
    """What drafts tokens for a model on its devices: layers, a head or another model, a module of it; None without."""
    return getattr(model, "draft", None)


@runtime_checkable
class DraftsByChain(Protocol):
    """Layers of which each drafts one token, from what the one before it has returned: a `PredictionChain`."""

    @property
    def num_layers(self) -> int:
        """L. Layer l reads, in the row of a token, the token l + 1 places after it."""
        ...

    def first_states(self, hidden_states: jax.Array, aux_hidden_states: Sequence[jax.Array]) -> jax.Array:
        """What the target's tokens give the first layer: states [T, E]."""
        ...

    def run_layer(
        self,
        index: int,
        target: DraftTarget,
        kv_caches: list[Any] | None,
        next_ids: jax.Array,
        states: jax.Array,
        attention_metadata: AttentionMetadata,
    ) -> tuple[list[Any] | None, jax.Array]:
        """Runs a layer over a flat batch: the caches of all, and its states [T, E]."""
        ...

    def layer_input(self, first_states: jax.Array, previous: jax.Array) -> jax.Array:
        """The states that a layer after the first reads: the first ones, or what the layer before it has returned."""
        ...

    def layer_logits(self, index: int, target: DraftTarget, states: jax.Array) -> jax.Array:
        """A layer's states [T, E] -> float32 logits [T, V] of the token after those that it read."""
        ...


class LoadableWithIterator:
    """Gives a model class whose names and shapes match the checkpoint's a `load_weights` by the automatic loader."""

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Fills the parameters from (name, tensor) pairs; returns the names of those filled."""
        # A mix-in: the classes that inherit it are modules.
        return JaxAutoWeightsLoader(cast(nnx.Module, self)).load_weights(weights)
