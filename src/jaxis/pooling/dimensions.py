"""Sizes that vectors may be cut to (Matryoshka representation learning, arXiv:2205.13147). Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxis.errors import RequestError


@dataclass(frozen=True)
class Dimensions:
    """Sizes that a model's vectors may be cut to.

    Attributes:
      size: E, the elements of a vector.
      any: True if the model was trained for every size up to `size`.
      some: Sizes that the model was trained for; empty if there are none, or if any size is allowed.
      normalize: True if vectors have length 1.
    """

    size: int = 0
    any: bool = False
    some: tuple[int, ...] = ()
    normalize: bool = False

    def check(self, dimensions: int | None, param: str = "dimensions") -> None:
        """Raises RequestError, about `param`, if vectors cannot have this size; None is always allowed."""
        if dimensions is None or dimensions == self.size or dimensions in self.some:
            return
        if self.any and 1 <= dimensions < self.size:
            return
        if self.some:
            can = f"be cut to {', '.join(map(str, self.some))} elements"
        elif self.any:
            can = f"be cut to less than their {self.size} elements"
        else:
            can = (
                f"have {self.size} elements and are not known to be trained for fewer: leave it out, or, if the "
                "model's card says that they are, load it with --hf-overrides '{\"is_matryoshka\": true}'"
            )
        raise RequestError(f"={dimensions} cannot be honoured: this model's vectors {can}", param=param)

    def cut(self, vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Cuts vectors, and normalizes them again if they were normalized.

        Args:
          vectors: float32 [texts, E].
          dimensions: New size, as `check` allows it; None: no cut.
        """
        if dimensions is None or dimensions == vectors.shape[1]:
            return vectors
        vectors = vectors[:, :dimensions]
        if self.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors
