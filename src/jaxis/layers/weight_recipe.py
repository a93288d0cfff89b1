"""Conversion of a checkpoint's tensors to the weight that a layer multiplies by, one matrix at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.weights import (
    Allocate,
    WeightScheme,
    WeightValue,
    as_value,
    as_weight,
    dequantize,
    pack,
    quantize,
)
from jaxis.layers.weight_format import PLAIN, InvalidWeightError, WeightFormat


@dataclass(frozen=True)
class WeightRecipe:
    """Steps from a file's tensors to a weight, in the order of the attributes.

    Attributes:
      format: Format that assembles the weight.
      dequantizes: True to dequantize the weight to the model's type.
      scheme: Quantization of the weight; None leaves it as it is.
      act_qtype: "int8" quantizes the input of products with a weight that the file stores as integers or codes; None
        leaves that to the format.
      packs: True to pack the weight for the native CPU kernels, if they take it.

    All recipes compare equal: once a weight is built, its type alone decides how it is multiplied. Layers whose weights
    have the same type thus share a trace, however these were loaded.
    """

    format: WeightFormat = field(default=PLAIN, compare=False)
    dequantizes: bool = field(default=False, compare=False)
    scheme: WeightScheme | None = field(default=None, compare=False)
    act_qtype: str | None = field(default=None, compare=False)
    packs: bool = field(default=False, compare=False)

    def make(
        self,
        tensors: Mapping[str, np.ndarray],
        shape: tuple[int, ...],
        dtype: DTypeLike,
        allocate: Allocate | None = None,
    ) -> WeightValue:
        """Builds the weight (out, in) from the tensors that `format` specifies, for a model of type `dtype`.

        `allocate` is the memory of a packed weight, as for `kernels.weights.pack`.

        Raises:
          InvalidWeightError: The tensors do not form a valid weight.
          ValueError: The weight cannot be quantized.
        """
        try:
            weight = self.format.assemble(tensors, shape)
        except ValueError as error:
            raise InvalidWeightError(str(error)) from None
        if self.act_qtype is not None:
            weight = as_value(as_weight(weight).with_quantized_input(self.act_qtype))
        if self.dequantizes and not isinstance(weight, np.ndarray):
            weight = _dequantize(weight, dtype)
        if self.packs:
            return pack(weight, dtype=dtype, scheme=self.scheme, allocate=allocate)
        return weight if self.scheme is None else quantize(np.asarray(weight), self.scheme)

    def example(self, shape: tuple[int, ...], dtype: DTypeLike) -> WeightValue:
        """Makes a weight [out, in] as if it were loaded, with meaningless values."""
        specs = self.format.tensors(shape).items()
        tensors = {name: spec.example(number) for number, (name, spec) in enumerate(specs) if not spec.is_zero}
        return self.make(tensors, shape, dtype, lambda panels: np.empty(panels, np.uint8))


_dequantize = jax.jit(dequantize, static_argnums=1)
