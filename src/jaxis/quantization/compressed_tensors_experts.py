"""Layers of experts whose weights a checkpoint holds in the compressed-tensors format, each expert by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.quantized_matmul import QuantizedWeight
from jaxis.layers.expert_stacks import fill_expert
from jaxis.quantization.compressed_tensors_method import VALUES_PER_WORD, unpack_rows
from jaxis.quantization.experts import STACK_AXES, stack_shape
from jaxis.quantization.methods import WeightScheme
from jaxis.quantization.stored import SCALE_DTYPES

if TYPE_CHECKING:
    from jaxis.layers.experts import JaxExperts
    from jaxis.quantization.config import ExpertsMethod


@dataclass(frozen=True)
class CompressedTensorsExpertsMethod:
    """Has a stack for each kind of tensor of the file; once they are loaded, the layer is as if quantized online.

    Attributes:
      format, scheme: As for `CompressedTensorsMethod`.
      method: Takes over once they are loaded.
    """

    format: str
    scheme: WeightScheme
    method: ExpertsMethod

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        for name in STACK_AXES:
            for suffix, (shape, dtypes) in self._stacks(stack_shape(layer, name)).items():
                known = tuple(np.dtype(dtype) for dtype in dtypes)
                setattr(layer, name + suffix, nnx.Param(jnp.zeros(shape, known[0]), dtypes=known))

    def _stacks(self, shape: tuple[int, int, int]) -> dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]:
        """What the stacks' names end with -> their shape and types, for weights [X, out, in]."""
        num_experts, rows, columns = shape
        groups = 1 if self.scheme.tile_size is None else columns // self.scheme.tile_size
        scale = {"_weight_scale": ((num_experts, rows, groups), SCALE_DTYPES)}
        if self.format == "int-quantized":
            return {"": (shape, (np.int8,))} | scale
        found = {"_weight_packed": ((num_experts, rows, -(-columns // VALUES_PER_WORD)), (np.int32,))} | scale
        found["_weight_shape"] = ((num_experts, 2), (np.int32, np.int64))
        if self.scheme.weight_calibration_method == "minmax":
            found["_weight_zero_point"] = ((num_experts, -(-rows // VALUES_PER_WORD), groups), (np.int32,))
        return found

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        param = getattr(layer, stack_name)
        dtypes = param.get_metadata()["dtypes"]
        if tensor.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise CheckpointError(f"is {tensor.dtype} in the checkpoint, but must be {expected} here")

        def write(stack: np.ndarray | None, target: jax.ShapeDtypeStruct) -> np.ndarray:
            if stack is None:
                stack = np.empty(target.shape, tensor.dtype)
            if stack.dtype != tensor.dtype:
                raise CheckpointError("has another type than those of other experts")
            stack[expert] = tensor
            return stack

        fill_expert(param, expert, tensor.shape, write)

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """Puts QuantizedWeights in the place of the file's stacks and hands the layer over."""
        for name, axes in STACK_AXES.items():
            weight = self._weight(layer, name)
            for suffix in self._stacks(stack_shape(layer, name)):
                delattr(layer, name + suffix)
            setattr(layer, name, nnx.Param(weight, logical_axes=("expert", *axes)))
        layer.quant_method = self.method
        self.method.process_weights_after_loading(layer)

    def _weight(self, layer: JaxExperts, name: str) -> QuantizedWeight:
        """Of numpy arrays [X, ...]."""
        shape = stack_shape(layer, name)
        scale = getattr(layer, f"{name}_weight_scale").get_value()
        if self.scheme.tile_size is None or scale.dtype == np.float16:
            scale = scale.astype(np.float32)
        if self.format == "int-quantized":
            return QuantizedWeight(getattr(layer, name).get_value(), scale)
        for expert, stored in enumerate(getattr(layer, f"{name}_weight_shape").get_value().tolist()):
            if stored != list(shape[1:]):
                raise CheckpointError(f"{name} of expert {expert} is stored as {stored}, but is {list(shape[1:])} here")
        words = getattr(layer, f"{name}_weight_packed").get_value()
        pairs = words.astype("<i4", copy=False).view(np.uint8)[..., : shape[2] // 2]
        if self.scheme.weight_calibration_method != "minmax":
            return QuantizedWeight(pairs, scale)
        points = np.stack([unpack_rows(each) for each in getattr(layer, f"{name}_weight_zero_point").get_value()])
        return QuantizedWeight(pairs, scale, points[:, : shape[1]])
