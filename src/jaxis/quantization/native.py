"""Layers computed by the native kernels on CPU: weights are packed as they are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.native_constants import MAX_MATRICES
from jaxis.kernels.quantized_matmul import BlockScaledWeight, QuantizedWeight, packed
from jaxis.layers.module import make_parameter
from jaxis.layers.weight_loader import check_loadable
from jaxis.quantization.block_scaled import BlockScaledLinearMethod, StoredBlocksMethod
from jaxis.quantization.compressed_tensors_method import CompressedTensorsMethod
from jaxis.quantization.dequantized import DequantizedLinearMethod
from jaxis.quantization.methods import QuantizedLinearMethod, WeightScheme, place_quantized
from jaxis.quantization.native_experts import native_experts_method

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.experts import JaxExperts
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import ExpertsMethod, LinearMethod, QuantizationConfig


@dataclass(frozen=True)
class NativeQuantizationConfig:
    """A QuantizationConfig that has every weight matrix packed, quantized as `inner` says or not at all."""

    inner: QuantizationConfig | None = None

    @property
    def unquantized(self) -> NativeQuantizationConfig:
        """For layers that stay as they are; see `without_quantization`."""
        return NativeQuantizationConfig()

    def get_quant_method(
        self, layer: JaxLinear | JaxEmbed | JaxExperts, prefix: str
    ) -> LinearMethod | ExpertsMethod | None:
        """As QuantizationConfig's."""
        from jaxis.layers.experts import JaxExperts

        method = None if self.inner is None else self.inner.get_quant_method(layer, prefix)
        if isinstance(layer, JaxExperts):
            return native_experts_method(layer, method)
        if isinstance(method, CompressedTensorsMethod):
            return dataclasses.replace(method, method=NativeLinearMethod(method.scheme.act_qtype))
        if isinstance(method, StoredBlocksMethod | DequantizedLinearMethod):
            return dataclasses.replace(method, method=NativeLinearMethod(None))
        if isinstance(method, QuantizedLinearMethod):
            return NativeLinearMethod(method.scheme.act_qtype, source=method)
        return NativeLinearMethod(None) if method is None else method

    def check_all_used(self) -> None:
        """As QuantizationConfig's."""
        if self.inner is not None:
            self.inner.check_all_used()


@dataclass(frozen=True)
class NativeLinearMethod:
    """`weight` is a parameter whose value is a PackedWeight.

    A checkpoint's bfloat16 stays bfloat16 and is widened in registers, so a float32 model computes with the very
    numbers of the file at half the memory.

    Attributes:
      act_qtype: "int8" quantizes the layer's input as it comes; None does not.
      source: How the weight is quantized as it is read; None leaves it as it is.
    """

    act_qtype: str | None
    source: QuantizedLinearMethod | None = None

    def create_weights(self, layer: JaxLinear | JaxEmbed, rngs: nnx.Rngs, dtype: Any) -> None:
        if self.source is not None:
            self.source.create_weights(layer, rngs, dtype)
            layer.weight.set_metadata(weight_loader=_PackingLoader(self.source))
            return
        layer.weight = make_parameter(
            rngs,
            layer.kernel_init,
            (layer.output_size, layer.input_size),
            dtype,
            axes=layer.kernel_axes,
            weight_loader=_load_packed,
        )

    def apply(self, layer: JaxLinear | JaxEmbed, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        (y,) = packed.matmul(x.astype(jnp.float32), [layer.weight.get_value()], act_qtype=self.act_qtype)
        return y.astype(preferred_element_type or x.dtype)

    def apply_together(self, layers: Sequence[JaxLinear], x: jax.Array) -> list[jax.Array] | None:
        """What `apply` gives for each of the layers, in one kernel; None if they cannot be put together."""
        weights = _one_format(layers)
        if weights is None:
            return None
        results = packed.matmul(x.astype(jnp.float32), weights, act_qtype=self.act_qtype)
        return [y.astype(x.dtype) for y in results]

    def apply_gated(self, gate: JaxLinear, up: JaxLinear, x: jax.Array, activation: str) -> jax.Array | None:
        """`activation(gate(x)) * up(x)` without their biases, in one kernel; None if it cannot be had."""
        weights = _one_format([gate, up])
        if weights is None or weights[0].shape != weights[1].shape:
            return None
        (y,) = packed.matmul(x.astype(jnp.float32), weights, act_qtype=self.act_qtype, activation=activation)
        return y.astype(x.dtype)

    def lookup(self, layer: JaxEmbed, input_ids: jax.Array) -> jax.Array:
        return packed.lookup(input_ids, layer.weight.get_value()).astype(layer.dtype)

    def process_weights_after_loading(self, layer: JaxLinear | JaxEmbed) -> None:
        """Packs what was not packed while it was read; what the kernels do not take stays with plain JAX."""
        weight = layer.weight.get_value()
        if isinstance(weight, QuantizedWeight):
            if not packed.can_pack(weight):
                layer.quant_method = QuantizedLinearMethod(WeightScheme(weight.qtype, self.act_qtype))
                return
            layer.weight.set_value(packed.pack_quantized(weight))
        elif isinstance(weight, BlockScaledWeight):
            if not packed.can_pack(weight):
                layer.quant_method = BlockScaledLinearMethod()
                return
            layer.weight.set_value(packed.pack_blocks(weight))
        elif isinstance(weight, jax.Array):
            layer.weight.set_value(packed.pack(np.asarray(weight)))
        # Which way the weight came does not matter any more: layers alike are traced once.
        layer.quant_method = NativeLinearMethod(self.act_qtype)


def _one_format(layers: Sequence[JaxLinear]) -> list[packed.PackedWeight] | None:
    weights = [layer.weight.get_value() for layer in layers]
    if len(weights) > MAX_MATRICES or not all(isinstance(w, packed.PackedWeight) for w in weights):
        return None
    return weights if len({weight.format for weight in weights}) == 1 else None


@dataclass(frozen=True)
class _PackingLoader:
    """A `weight_loader`: quantizes and packs straight from the mapped file, where the kernels take what comes out."""

    source: QuantizedLinearMethod

    def __call__(self, param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
        check_loadable(param, tensor, shard_id)
        scheme = self.source.scheme
        try:
            weight: Any = packed.quantize_and_pack(
                tensor, scheme.weight_qtype, scheme.tile_size, scheme.weight_calibration_method
            )
            if weight is None:
                weight = place_quantized(self.source.quantize(tensor), param.get_metadata()["logical_axes"])
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        param.set_value(weight)


def _load_packed(param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
    """A `weight_loader`: straight from the mapped file to packed panels."""
    check_loadable(param, tensor, shard_id)
    dtype = param.get_value().dtype
    if dtype == ml_dtypes.bfloat16:
        tensor = tensor.astype(ml_dtypes.bfloat16, copy=False)
    param.set_value(packed.pack(tensor))
