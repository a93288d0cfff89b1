"""From a checkpoint's tensors to the weight that a layer multiplies by, a matrix at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.weights import Allocate, Weight, WeightScheme, dequantize, pack, quantize
from jaxis.layers.weight_format import PLAIN, InvalidWeightError, WeightFormat


@dataclass(frozen=True)
class WeightRecipe:
    """The transformations of a file's tensors, in this order:

    Attributes:
      format: Makes a weight of them.
      dequantizes: Whether it is then made an array of the model's type.
      scheme: How it is then quantized; None is not at all.
      packs: Whether it is then packed for the native CPU kernels, if they take it.

    Recipes compare equal, because nothing here matters once a weight is there: how it is multiplied is its own type. So
    layers whose weights are alike share a trace, however these came.
    """

    format: WeightFormat = field(default=PLAIN, compare=False)
    dequantizes: bool = field(default=False, compare=False)
    scheme: WeightScheme | None = field(default=None, compare=False)
    packs: bool = field(default=False, compare=False)

    def make(
        self,
        tensors: Mapping[str, np.ndarray],
        shape: tuple[int, ...],
        dtype: DTypeLike,
        allocate: Allocate | None = None,
    ) -> Weight:
        """The weight that these tensors make.

        Args:
          tensors: As `format` wants them.
          shape: (out, in).
          dtype: The model's.
          allocate: Memory for a packed weight, as for `kernels.weights.pack`.

        Raises:
          InvalidWeightError: The tensors are no weight.
          ValueError: It cannot be quantized.
        """
        try:
            weight = self.format.assemble(tensors, shape)
        except ValueError as error:
            raise InvalidWeightError(str(error)) from None
        if self.dequantizes:
            weight = _dequantize(weight, dtype)
        if self.packs:
            return pack(weight, dtype=dtype, scheme=self.scheme, allocate=allocate)
        return weight if self.scheme is None else quantize(np.asarray(weight), self.scheme)


_dequantize = jax.jit(dequantize, static_argnums=1)
