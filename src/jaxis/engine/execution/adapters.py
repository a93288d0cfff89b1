"""The interface to adapters, which change the model for some sequences of a step; each is known by a digest.

A step with such sequences runs a program of its own: the model with places for the changes of several adapters at once.
Other steps run the same programs as without adapters. The digest b"" stands for the model itself.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import jax

from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.engine.scheduling.places import Places, PlaceUse
from jaxis.errors import ConfigError

HEAD = "head"
"""The part of a model that is `compute_logits`. Adapters that change it have programs of their own."""


class AdaptersInUseError(ConfigError):
    """Raised if `max_cpu_loras` adapters are known and sequences use all of them."""


class Adapters(Places, Protocol):
    """The adapters that an engine knows.

    Attributes:
      named: Name, source and digest of each adapter that was loaded at the start.
    """

    named: list[tuple[str, str, bytes]]

    @property
    def arrays(self) -> list[jax.Array]:
        """The model's arrays with the changes of the adapters that have a place."""
        ...

    def merge(self, arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """Returns the model of a step, in which row t has the adapter at its place.

        `arrays` are those of the attribute, or their tracers. `places` is i32 [T]; 0 for no adapter. `parts` are those
        that the step's adapters change.
        """
        ...

    @property
    def head_arrays(self) -> list[jax.Array]:
        """The part of `arrays` that `compute_logits` reads, if adapters change the head."""
        ...

    def merge_head(self, head_arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """Returns the model rebuilt from `head_arrays`; its `compute_logits` can be called.

        `places`, i32 [S], are those of the rows whose logits are computed; 0 for no adapter.
        """
        ...

    def parts_of(self, adapter: bytes) -> frozenset[str]:
        """Returns the parts that an adapter changes beyond those that all change, such as HEAD.

        Steps without such adapters have other programs.
        """
        ...

    def rebase(self, base: ModelArrays) -> None:
        """Gives the model other weights, of the same shapes and types."""
        ...

    @property
    def use(self) -> PlaceUse:
        """The use of adapter places by sequences."""
        ...

    def place_of(self, adapter: bytes) -> int:
        """Returns the place, from 1 on, of an adapter that has one; 0 for b""."""
        ...

    def check(self, adapter: bytes) -> None:
        """Raises a RequestError for an unknown adapter."""
        ...

    def read(self, source: str | os.PathLike[str]) -> Any:
        """Reads an adapter's files, for `add`. Unlike the other methods, it may be called from any thread.

        Raises:
          JaxisError: The adapter cannot be read, or belongs to another model.
        """
        ...

    def chat_template_of(self, source: str | os.PathLike[str]) -> str | None:
        """The chat template that an adapter brings; None: it has the model's. May be called as `read` is."""
        ...

    def add(self, read: Any, *, keep: bool = False) -> bytes:
        """Makes an adapter known, given the result of `read`; returns its digest.

        With `keep`, it stays until it is removed; otherwise it may be forgotten when there are too many.

        Raises:
          AdaptersInUseError: Too many are known, and in use.
        """
        ...

    def remove(self, adapter: bytes) -> None:
        """Forgets an adapter once the last sequence that has it has ended."""
        ...
