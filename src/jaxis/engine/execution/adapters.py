"""The seam to what changes the model for some sequences of a step: adapters of it, each known by a digest.

A step with such sequences runs a program of its own, of the model with places for the changes of several adapters at
once; other steps run the programs that they would run without. An adapter of the digest b"" is the model itself.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import jax

from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.engine.scheduling.places import Places, PlaceUse
from jaxis.errors import ConfigError

HEAD = "head"
"""The part of a model that `compute_logits` is, with which adapters have programs of their own."""


class VariantsInUseError(ConfigError):
    """As many adapters are known as can be, and sequences use all of them."""


class Adapters(Places, Protocol):
    """The adapters that an engine knows.

    Attributes:
      named: Name, source and digest of each one that was loaded at the start.
    """

    named: list[tuple[str, str, bytes]]

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays of the model with the changes of the adapters that have a place."""
        ...

    def merge(self, arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """The model of a step, in which row t has the adapter at its place.

        Args:
          arrays: Those of `arrays`.
          places: i32 [T]; 0: none.
          parts: Of all of the step's adapters.
        """
        ...

    @property
    def head_arrays(self) -> list[jax.Array]:
        """Those of `arrays` that `compute_logits` reads, if adapters change the head."""
        ...

    def merge_head(self, head_arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """The model rebuilt from `head_arrays`, whose `compute_logits` can be called.

        Args:
          head_arrays: Those of `head_arrays`.
          places: i32 [S], of the rows that logits are computed of; 0: none.
          parts: Of the adapters.
        """
        ...

    def parts_of(self, adapter: bytes) -> frozenset[str]:
        """What an adapter changes beyond what all do, HEAD for one. Steps without such adapters have other programs."""
        ...

    def rebase(self, base: ModelArrays) -> None:
        """Gives the model other weights, of the same shapes and types."""
        ...

    @property
    def use(self) -> PlaceUse:
        """Which of them sequences have."""
        ...

    def place_of(self, adapter: bytes) -> int:
        """The place, from 1 on, of an adapter that has one; 0 for b""."""
        ...

    def check(self, adapter: bytes) -> None:
        """Raises a RequestError for an adapter that is not known."""
        ...

    def read(self, source: str | os.PathLike[str]) -> Any:
        """Reads an adapter from where it is kept, for `add`. May be called from any thread, as nothing else may.

        Raises:
          JaxisError: It cannot be read, or is of another model.
        """
        ...

    def chat_template_of(self, source: str | os.PathLike[str]) -> str | None:
        """The chat template that an adapter brings; None: it has the model's. May be called as `read` is."""
        ...

    def add(self, read: Any, *, keep: bool = False) -> bytes:
        """Makes an adapter known; returns its digest.

        Args:
          read: What `read` gave.
          keep: Until it is removed; otherwise it may be forgotten when there are too many.

        Raises:
          VariantsInUseError: Too many are known, and in use.
        """
        ...

    def remove(self, adapter: bytes) -> None:
        """Forgets an adapter once the last sequence that has it has ended."""
        ...
