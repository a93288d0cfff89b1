"""The interfaces between model classes, the loader and the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.layers.weight_loader import JaxAutoWeightsLoader


class JaxIntermediateTensors(dict):
    """Named arrays that one pipeline stage passes to the next, `hidden_states` among them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerAdditions:
    """Values [T, layers * E], layer by layer, to add to the outputs of a model's first layers.

    `is_changed`, bool [T], is True for tokens that receive additions.
    """

    is_changed: jax.Array
    values: jax.Array

    def after_layer(self, index: int, x: jax.Array) -> jax.Array:
        """Output x [T, E] of the layer with this index -> x with its additions."""
        size = x.shape[-1]
        added = self.values[:, index * size : (index + 1) * size]
        return jnp.where(self.is_changed[:, None], x + added.astype(x.dtype), x) if added.shape[-1] else x


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
        """Returns the parameter that a tensor of this name fills; a parameter's own name maps to itself."""
        ...


class DraftTarget(Protocol):
    """A model whose embeddings and head are used by layers that draft tokens: a `CausalLM`."""

    @property
    def decoder(self) -> Any:
        """The decoder below the head, a `DecoderModel`."""
        ...

    def compute_logits(self, hidden_states: jax.Array) -> jax.Array:
        """hidden_states [T, E] -> float32 logits [T, V]."""
        ...


@runtime_checkable
class HasHead(Protocol):
    """A model with an output head, which is None if it is the embeddings."""

    lm_head: Any


def has_tied_head(model: object) -> bool:
    """Returns whether a model's head is its embeddings. A model without `lm_head` has a head of another name."""
    return isinstance(model, HasHead) and model.lm_head is None


DRAFT_PREFIX = "draft."
"""Name prefix of the parts of a model that `draft_of` returns."""


def draft_of(model: Any) -> Any:
    """Returns the module that drafts tokens on the model's devices: layers, a head or another model; None without."""
    return getattr(model, "draft", None)


def block_size_of(draft: Any) -> int:
    """Returns the tokens that a module of `draft_of` drafts at once; 0 if it drafts one after the other."""
    return getattr(draft, "block_size", 0)


class LoadableWithIterator:
    """Gives a model class whose names and shapes match the checkpoint's a `load_weights` by the automatic loader."""

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Fills the parameters from (name, tensor) pairs; returns the names of those filled."""
        # A mix-in: the classes that inherit it are modules.
        return JaxAutoWeightsLoader(cast(nnx.Module, self)).load_weights(weights)
