"""PackedWeight: a weight packed for the native kernels on CPU, and the products with it.

native/src/matmul.h describes the layout. Products can be differentiated with respect to everything but the packed data.
A weight that is trained also holds the floats that it was packed from, which get its derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels import huge_pages, native
from jaxis.kernels.gates import gated
from jaxis.kernels.host_threads import for_each_part
from jaxis.kernels.native_constants import ACTIVATIONS, GATES, MAX_MATRICES, PANEL_ROWS
from jaxis.kernels.weights import quantize_native
from jaxis.kernels.weights.packed_format import GROUP_SIZES, PackedFormat, PanelSources
from jaxis.kernels.weights.scheme import BITS, NOT_FINITE, WeightScheme, check_quantizable
from jaxis.kernels.weights.weight import Allocate, ExpertStacks, Weight, WeightValue

_BYTES_PER_TASK = 1 << 20

Arrays: TypeAlias = Sequence[jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight(Weight):
    """A packed weight [out, in], or a stack of weights.

    Attributes:
      data: uint8 [..., panels, panel's bytes], 32 rows per panel.
      out_size: Rows of each weight.
      master: float32 [..., out, in], the floats that `data` was packed from, for derivatives with respect to them:
        rounding does not change these ("straight through"). No product reads it.
    """

    data: jax.Array | np.ndarray
    out_size: int = field(metadata={"static": True})
    format: PackedFormat = field(metadata={"static": True})
    master: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-2], self.out_size, self.format.in_size)

    @property
    def storage(self) -> str:
        if not self.format.bits:
            return self.format.qtype
        return f"int{self.format.bits}" if self.format.levels is None else f"{self.format.bits}-bit"

    @property
    def is_packed(self) -> bool:
        return True

    @property
    def quantizes_input(self) -> bool:
        return self.format.act_qtype is not None

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        (y,) = matmul(x, [self], act_qtype=self.format.act_qtype)
        return y.astype(preferred_element_type or x.dtype)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        return self.lookup(jnp.arange(self.out_size, dtype=jnp.int32), dtype)

    def lookup(self, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
        return _rows(self.out_size, self.format)(ids, self.data, self.master).astype(dtype)

    def take_rows(self, rows: np.ndarray) -> Self:
        raise TypeError("rows of a packed weight cannot be taken one by one")

    def with_rows(self, num_rows: int) -> Self:
        raise TypeError("a packed weight cannot be padded")

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> Self:
        return self

    def fused_matmul(
        self,
        x: jax.Array,
        weights: Sequence[PackedWeight],
        addends: Sequence[jax.Array] = (),
        factors: Sequence[jax.Array] = (),
    ) -> list[jax.Array] | None:
        if len(weights) > MAX_MATRICES or len({weight.format for weight in weights}) != 1:
            return None
        results = matmul(x, weights, addends, factors, act_qtype=self.format.act_qtype)
        return [y.astype(x.dtype) for y in results]

    def gated_matmul(
        self,
        x: jax.Array,
        up: PackedWeight,
        activation: str,
        addends: Sequence[jax.Array] = (),
        factors: Sequence[jax.Array] = (),
    ) -> jax.Array | None:
        if self.format != up.format or self.shape != up.shape:
            return None
        act_qtype = self.format.act_qtype
        (y,) = matmul(x, [self, up], addends, factors, act_qtype=act_qtype, activation=activation)
        return y.astype(x.dtype)

    def head_matmul(self, x: jax.Array) -> jax.Array:
        return _head_product(self.out_size, self.format)(x.astype(jnp.float32), self.data, self.master).astype(x.dtype)

    def experts(
        self, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks
    ) -> jax.Array:
        """Computes `functions.experts` in one kernel, for `stacks` whose `up` is this weight."""
        num_tokens, k = expert_ids.shape
        inputs = x.astype(jnp.float32)
        if stacks.scales_input:
            # One row per slot with its weight applied, so that the kernel needs no special case.
            inputs = (inputs[:, None] * expert_weights[:, :, None]).reshape(num_tokens * k, -1)
            expert_ids, expert_weights = expert_ids.reshape(-1, 1), jnp.ones((num_tokens * k, 1), jnp.float32)
        gate, down, unit = stacks.gate, stacks.down, stacks.gated_unit.kernel_arguments
        biases = [stacks.gate_bias, stacks.up_bias, stacks.down_bias]
        if gate is None:  # the kernel does not read it
            gate, biases[0] = self, stacks.up_bias
        assert isinstance(gate, PackedWeight)
        assert isinstance(down, PackedWeight)
        assert unit is not None
        biases = [bias.astype(jnp.float32) for bias in biases if bias is not None]
        packed = PackedExperts(gate, self, down, biases, act_qtype=gate.format.act_qtype, **unit)
        if (additions := stacks.additions) is None:
            y = packed(inputs, expert_ids, expert_weights)
            return (y.reshape(num_tokens, k, -1).sum(1) if stacks.scales_input else y).astype(x.dtype)
        slots = additions.slots.reshape(-1)
        rows = inputs if stacks.scales_input else inputs.repeat(k, axis=0)
        to_gate, to_up = (
            None if each is None else each.reshape(*expert_ids.shape, -1) for each in additions.of_hidden(rows, slots)
        )
        assert to_up is not None
        addends = to_up if to_gate is None else to_gate, to_up
        y, hidden = packed.with_hidden(inputs, expert_ids, expert_weights, addends)
        if stacks.scales_input:
            y = y.reshape(num_tokens, k, -1).sum(1)
        change = additions.of_outputs(hidden.reshape(num_tokens * k, -1), slots) * expert_weights.reshape(-1, 1)
        is_changed = (additions.slots > 0).any(1, keepdims=True)
        return jnp.where(is_changed, y + change.reshape(num_tokens, k, -1).sum(1), y).astype(x.dtype)


def can_pack_experts(examples: Sequence[WeightValue]) -> bool:
    """Returns whether the kernel of a layer of experts takes stacks of such weights, each packed as far as it can be.

    The kernel quantizes the input of all their products, or of none.
    """
    packed = [example for example in examples if isinstance(example, PackedWeight)]
    return len(packed) == len(examples) and len({example.format.act_qtype for example in packed}) == 1


def pack(weight: np.ndarray, allocate: Allocate | None = None) -> PackedWeight:
    """Packs a weight [out, in]: bfloat16 stays bfloat16, every other type becomes float32.

    `allocate` is that of `Weight.pack`.
    """
    qtype = "bfloat16" if weight.dtype == ml_dtypes.bfloat16 else "float32"
    if qtype == "float32":
        weight = weight.astype(np.float32, copy=False)
    rows, columns = weight.shape
    return pack_panels(rows, PackedFormat(qtype, columns), PanelSources(weight), allocate)


def quantize_and_pack(
    weight: np.ndarray, scheme: WeightScheme, allocate: Allocate | None = None
) -> PackedWeight | None:
    """Computes `quantize(weight, scheme).pack(allocate=allocate)` in one pass over the weight, with its ValueError.

    Returns None if the kernels do not take the weight, or no native code can quantize it.
    """
    in_size, qtype = weight.shape[1], scheme.weight_qtype
    check_quantizable(in_size, scheme)
    is_whole_row = scheme.group_size is None and qtype == "int8"
    is_grouped = scheme.group_size in GROUP_SIZES and scheme.group_size < in_size
    if not (is_whole_row or is_grouped) or weight.size == 0 or not quantize_native.usable(weight):
        return None
    weight_format = _format_of(in_size, scheme)
    panels = _empty_panels(len(weight), weight_format, allocate)
    if not quantize_native.quantize_panels(weight, scheme, panels, PANEL_ROWS):
        raise ValueError(NOT_FINITE)
    return PackedWeight(panels if allocate is not None else device_array(panels), len(weight), weight_format)


def _format_of(in_size: int, scheme: WeightScheme) -> PackedFormat:
    """Returns the format of weights that `quantize_and_pack` makes; native/src/quantize.cc has the same."""
    if scheme.group_size is None:
        return PackedFormat("int8", in_size, act_qtype=scheme.act_qtype)
    bits, method = BITS[scheme.weight_qtype], scheme.weight_calibration_method
    has_units = bits == 8 or method == "affine"
    return PackedFormat(
        "codes",
        in_size,
        scheme.group_size,
        bits=bits,
        offset=0 if method in ("minmax", "affine") else 1 << (bits - 1),
        scale="uint8" if has_units else "bfloat16",
        minimum="int8" if method == "affine" else "none",
        has_zero_points=method == "minmax",
        super_scale="float32" if has_units else "none",
        super_block=in_size if has_units else 0,
        act_qtype=scheme.act_qtype,
    )


def pack_panels(
    rows: int, weight_format: PackedFormat, sources: PanelSources, allocate: Allocate | None
) -> PackedWeight:
    """Packs a weight of `rows` rows in this format; `allocate` is that of `Weight.pack`."""
    library = native.library()
    assert library is not None
    packed = _empty_panels(rows, weight_format, allocate)
    num_panels, panel_bytes = packed.shape
    arrays = (
        sources.data,
        sources.scale,
        sources.high,
        sources.zero_point,
        sources.minimum,
        sources.super_scale,
        sources.super_minimum,
    )
    # Held in a variable, so that copies by ascontiguousarray live until they are packed.
    contiguous = [None if a is None else np.ascontiguousarray(a) for a in arrays]
    pointers = [None if a is None else a.ctypes.data for a in contiguous]
    is_signed = sources.bits > 0 and sources.data.dtype == np.int8
    encoded = weight_format.encode()

    def pack_range(first: int, last: int) -> None:
        is_packed = library.jaxis_pack(
            encoded.ctypes.data,
            encoded.size,
            rows,
            weight_format.in_size,
            sources.bits,
            is_signed,
            *pointers,
            packed.ctypes.data,
            first,
            last,
        )
        assert is_packed  # a panel size implies that the kernel can pack

    for_each_part(pack_range, num_panels, max(1, _BYTES_PER_TASK // panel_bytes))
    return PackedWeight(packed if allocate is not None else device_array(packed), rows, weight_format)


def matmul(
    x: jax.Array,
    weights: Sequence[PackedWeight],
    addends: Sequence[jax.Array] = (),
    factors: Sequence[jax.Array] = (),
    *,
    act_qtype: str | None = None,
    activation: str | None = None,
) -> list[jax.Array]:
    """Multiplies one x, read (and quantized) once, with up to four weights of the same format: float32 [..., out] each.

    Args:
      x: Floats [..., in], multiplied as float32; bfloat16 may be faster than others.
      weights: Weights [out, in].
      addends: float32 [..., out], added to each product; empty for none.
      factors: float32 [..., out], multiply each sum with an addend; empty for none.
      act_qtype: "int8" quantizes x dynamically, as in `quantized_matmul`; with "integers", x is already of whole
        numbers from -127 to 127; None does not.
      activation: "silu" or "gelu_tanh": the only result is `activation(x w0^T) * (x w1^T)`, with the addends and
        factors in the brackets.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    forms = tuple((weight.out_size, weight.format) for weight in weights)
    product = _product(forms, act_qtype, activation, is_bfloat16=x.dtype == jnp.bfloat16)
    panels, masters = [weight.data for weight in weights], [weight.master for weight in weights]
    flat = [[each.reshape(len(rows), -1) for each in arrays] for arrays in (addends, factors)]
    return [result.reshape(*x.shape[:-1], result.shape[-1]) for result in product(rows, panels, masters, *flat)]


@functools.cache
def _product(
    forms: tuple[tuple[int, PackedFormat], ...],
    act_qtype: str | None,
    activation: str | None,
    *,
    is_bfloat16: bool,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns `matmul` of x [T, in], panels of weights with these forms (rows, format), masters, addends, factors.

    x is float32, and `is_bfloat16` says that bfloat16 has its numbers too.

    Its derivative is that of products with the floats that the weights stand for; rounding of the input is ignored.
    """
    sizes, weight_format = [size for size, _ in forms], forms[0][1]

    def kernel(
        rows: jax.Array, panels: Arrays, masters: Sequence[jax.Array | None], addends: Arrays, factors: Arrays
    ) -> tuple[jax.Array, ...]:
        del masters
        outputs = [jax.ShapeDtypeStruct((rows.shape[0], size), jnp.float32) for size in sizes]
        return tuple(
            native.call(
                "matmul",
                outputs if activation is None else outputs[:1],
                rows,
                *panels,
                *addends,
                *factors,
                n=np.asarray(sizes, np.int64),
                quantize_activations=act_qtype is not None,
                x_is_integer=act_qtype == "integers",
                x_is_bfloat16=is_bfloat16,
                activation=np.int32(ACTIVATIONS[activation or "none"]),
                format=weight_format.encode(),
            )
        )

    def definition(
        rows: jax.Array, panels: Arrays, masters: Sequence[jax.Array | None], addends: Arrays, factors: Arrays
    ) -> tuple[jax.Array, ...]:
        weights = [PackedWeight(data, *form, master) for data, form, master in zip(panels, forms, masters, strict=True)]
        products = [_in_blocks(rows, weight) for weight in weights]
        if addends:
            products = [y + addend for y, addend in zip(products, addends, strict=True)]
        if factors:
            products = [y * factor for y, factor in zip(products, factors, strict=True)]
        if activation is None:
            return tuple(products)
        return _gate(activation, *products)

    if activation is None:
        return native.transformable(kernel, definition)
    products = _product(forms, act_qtype, None, is_bfloat16=is_bfloat16)
    return _deriving_from_products(native.transformable(kernel, definition), products, activation)


def _deriving_from_products(
    fused: Callable[..., tuple[jax.Array, ...]], product: Callable[..., tuple[jax.Array, ...]], activation: str
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns `fused`, which keeps the two products if it is differentiated, instead of computing them again."""

    def separate(*operands: Any) -> tuple[jax.Array, ...]:
        gate, up = product(*operands)
        # The same operations on each element as in the fused kernel.
        return (gated(up, gate, activation),) if activation in GATES else _gate(activation, gate, up)

    def forward(*operands: Any) -> tuple[tuple[jax.Array, ...], Callable[..., Any]]:
        result, derive = jax.vjp(separate, *operands)
        return result if activation in GATES else fused(*operands), derive

    def backward(derive: Callable[..., Any], cotangents: tuple[jax.Array, ...]) -> Any:
        return derive(cotangents)

    wrapped = jax.custom_vjp(fused)
    wrapped.defvjp(forward, backward)
    return wrapped


def _gate(activation: str, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
    return (_DEFINITIONS[activation](gate) * up,)


def floats_of(weight: PackedWeight) -> jax.Array:
    """Returns the floats that a weight [..., out, in] stands for, with its derivative."""
    master = weight.master
    if master is not None and weight.format.qtype == "float32":
        return master
    matrix = dataclasses.replace(weight, master=None)
    if weight.data.ndim > 2:
        rounded = jax.lax.map(lambda data: dataclasses.replace(matrix, data=data).dequantize(), weight.data)
    else:
        rounded = matrix.dequantize()
    return rounded if master is None else master + jax.lax.stop_gradient(rounded - master)


@functools.cache
def _head_product(out_size: int, weight_format: PackedFormat) -> Callable[..., jax.Array]:
    """Returns `PackedWeight.head_matmul` of x [T, H, in], the panels of a stack and its master, all in float32."""

    def kernel(x: jax.Array, data: jax.Array, master: jax.Array | None) -> jax.Array:
        del master
        output = jax.ShapeDtypeStruct((*x.shape[:2], out_size), jnp.float32)
        quantizes = weight_format.act_qtype is not None
        return native.call(
            "head_matmul", output, x, data, quantize_activations=quantizes, format=weight_format.encode()
        )

    def definition(x: jax.Array, data: jax.Array, master: jax.Array | None) -> jax.Array:
        return jnp.einsum("thi,hoi->tho", x, floats_of(PackedWeight(data, out_size, weight_format, master)))

    return native.transformable(kernel, definition)


@functools.cache
def _rows(out_size: int, weight_format: PackedFormat) -> Callable[..., jax.Array]:
    """Returns `PackedWeight.lookup` of ids, panels and master, in float32."""

    def kernel(ids: jax.Array, data: jax.Array, master: jax.Array | None) -> jax.Array:
        del master
        output = jax.ShapeDtypeStruct((*ids.shape, weight_format.in_size), jnp.float32)
        size = np.int64(out_size)
        return native.call("packed_rows", output, ids, data, n=size, format=weight_format.encode())

    def definition(ids: jax.Array, data: jax.Array, master: jax.Array | None) -> jax.Array:
        rows = kernel(ids, data, None)
        if master is None:
            return rows
        chosen = jnp.take(master, ids, axis=0, mode="clip")
        return chosen + jax.lax.stop_gradient(rows - chosen)

    return native.transformable(kernel, definition)


_DEFINITIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
_BLOCK_ROWS = 8192


def _in_blocks(x: jax.Array, weight: PackedWeight) -> jax.Array:
    """Multiplies x [T, in] -> [T, out] by XLA, with at most _BLOCK_ROWS rows of the weight at a time in float32."""
    if weight.out_size <= _BLOCK_ROWS or weight.master is not None:
        return x @ floats_of(weight).T
    return _by_blocks(x, weight)


@jax.custom_vjp
def _by_blocks(x: jax.Array, weight: PackedWeight) -> jax.Array:
    num_blocks = -(-weight.out_size // _BLOCK_ROWS)
    ids = jnp.arange(num_blocks * _BLOCK_ROWS, dtype=jnp.int32).reshape(num_blocks, -1)
    products = jax.lax.map(lambda block: x @ weight.lookup(block, jnp.float32).T, ids)
    return jnp.moveaxis(products, 0, 1).reshape(len(x), -1)[:, : weight.out_size]


def _by_blocks_forward(x: jax.Array, weight: PackedWeight) -> tuple[jax.Array, PackedWeight]:
    return _by_blocks(x, weight), weight


def _by_blocks_backward(weight: PackedWeight, dy: jax.Array) -> tuple[jax.Array, None]:
    """Returns the derivative by x alone. JAX's own would first copy dy, which spans a vocabulary, block by block."""

    def of_rows(start: int | jax.Array, count: int) -> jax.Array:
        ids = start + jnp.arange(count, dtype=jnp.int32)
        return jax.lax.dynamic_slice_in_dim(dy, start, count, axis=1) @ weight.lookup(ids, jnp.float32)

    num_blocks, rest = divmod(weight.out_size, _BLOCK_ROWS)
    start = jnp.zeros((len(dy), weight.format.in_size), jnp.float32)
    dx = jax.lax.fori_loop(0, num_blocks, lambda i, dx: dx + of_rows(i * _BLOCK_ROWS, _BLOCK_ROWS), start)
    return (dx + of_rows(num_blocks * _BLOCK_ROWS, rest) if rest else dx), None


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)


@dataclass(frozen=True)
class PackedExperts:
    """X experts in the form that their kernel takes.

    Attributes:
      gate, up, down: Stacks of X weights, [F, E], [F, E] and [E, F].
      biases: float32 biases of gate [X, F], up [X, F] and down [X, E]; empty for none.
      activation: "silu" or "gelu_tanh", applied to the gate, which is then multiplied by up; or "clamped_swiglu":
        `g * sigmoid(alpha * g) * (clip(up, -limit, limit) + 1)` with `g = min(gate, limit)`; or "capped_swiglu":
        `min(silu(gate), limit) * clip(up, -limit, limit)`; or "limited_swiglu", which limits the gate before; or
        "situ", `SiTU` with beta = alpha and linear_beta = limit, 0 for none; or
        "relu2", `max(up, 0) ** 2`, for which `gate` is not read: it may be `up`.
      act_qtype: "int8" quantizes the inputs of the products dynamically, as for `quantized_matmul`; None does not.
    """

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    biases: Sequence[jax.Array] = ()
    _: KW_ONLY
    activation: str
    alpha: float = 0.0
    limit: float = 0.0
    act_qtype: str | None = None

    def __call__(self, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        """Returns the sum over each token's slots of `weight * down(activation(gate(x), up(x)))` by the slot's expert.

        Reads the weights of each used expert once, and no others. Results are batch-invariant, bit for bit: a token's
        slots are summed in the order of their experts. x and the result are float32 [T, E], expert_ids i32 [T, k], of
        which ids outside [0, X) contribute nothing, and expert_weights float32 [T, k].
        """
        [y] = self._call([jax.ShapeDtypeStruct(x.shape, jnp.float32)], x, expert_ids, expert_weights)
        return y

    def with_hidden(
        self,
        x: jax.Array,
        expert_ids: jax.Array,
        expert_weights: jax.Array,
        addends: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the same sum, float32 [T, E], and the input of each slot's `down`, float32 [T, k, F].

        The addends, float32 [T, k, F] each, are added to the products and biases, the gate's only where `gate` is read.
        """
        outputs = [jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct(addends[1].shape, jnp.float32)]
        y, hidden = self._call(outputs, x, expert_ids, expert_weights, addends)
        return y, hidden

    def _call(
        self,
        outputs: Sequence[jax.ShapeDtypeStruct],
        x: jax.Array,
        expert_ids: jax.Array,
        expert_weights: jax.Array,
        addends: Sequence[jax.Array] = (),
    ) -> Sequence[jax.Array]:
        weights = self.gate, self.up, self.down
        return native.call(
            "experts",
            outputs,
            *(x, expert_ids, expert_weights),
            *(weight.data for weight in weights),
            *self.biases,
            *addends,
            gate_format=self.gate.format.encode(),
            up_format=self.up.format.encode(),
            down_format=self.down.format.encode(),
            num_experts=np.int64(len(self.gate.data)),
            hidden_size=np.int64(self.gate.out_size),
            quantize_activations=self.act_qtype is not None,
            activation=np.int32(ACTIVATIONS[self.activation]),
            alpha=np.float32(self.alpha),
            limit=np.float32(self.limit),
        )


def device_array(packed: np.ndarray) -> jax.Array:
    """Returns packed panels as a JAX array that shares their memory."""
    # Without may_alias, JAX would copy the data into small pages.
    return jax.device_put(packed, may_alias=True)


def _empty_panels(rows: int, weight_format: PackedFormat, allocate: Allocate | None) -> np.ndarray:
    library = native.library()
    assert library is not None
    encoded = weight_format.encode()
    panel_bytes = library.jaxis_panel_bytes(encoded.ctypes.data, encoded.size, weight_format.in_size)
    if panel_bytes < 0:
        raise ValueError(f"no kernel takes weights of the format {weight_format}")
    num_panels = -(-rows // PANEL_ROWS)
    return (allocate or huge_pages.empty_pages)((num_panels, panel_bytes))
