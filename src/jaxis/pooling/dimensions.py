"""How many elements a vector may be cut to (Matryoshka representation learning, arXiv:2205.13147). Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxis.errors import RequestError


@dataclass(frozen=True)
class Dimensions:
    """To how many elements a model's vectors may be cut.

    Attributes:
      size: E, the elements of a vector.
      any: Whether the model was trained for every number of elements up to `size`.
      some: The numbers that it was trained for; empty if there are none, or if any will do.
      normalize: Whether vectors have length 1.
    """

    size: int = 0
    any: bool = False
    some: tuple[int, ...] = ()
    normalize: bool = False

    def check(self, dimensions: int | None, param: str = "dimensions") -> None:
        """Raises RequestError, about `param`, if vectors cannot have so many elements; None leaves them as they are."""
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
        """Vectors of so many elements, of length 1 again if they had that.

        Args:
          vectors: float32 [texts, E].
          dimensions: As `check` allows it.
        """
        if dimensions is None or dimensions == vectors.shape[1]:
            return vectors
        vectors = vectors[:, :dimensions]
        if self.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors
