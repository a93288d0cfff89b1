"""Cuts a program into slices of bounded work, so that other programs can run between them.

The slices consist of the program's own operations (its jaxpr). Equal layers give equal slices, which compile once. The
cuts depend only on the program and the bound, so that the same input always gives the same bits, whatever runs between
two slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxis.kernels import native

_FEWEST_ROWS = 64  # of a piece of a product: fewer use a processor poorly
_ELEMENT_FLOPS = 32  # cost of an element of an operation that is no product
# Operations that call a jaxpr, and the parameter with the jaxpr.
_CALLS = {"jit": "jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vmap_call": "call"}
_MOVES = frozenset({"reshape", "broadcast_in_dim", "squeeze", "slice", "transpose", "bitcast_convert_type", "iota"})

_Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Slice:
    """Operations that run as one program.

    Attributes:
      program: Program of the slice; equal programs are the same object.
      inputs: Values that it reads.
      outputs: Values that it computes.
      last_used: Values that no later slice reads.
    """

    program: SliceProgram
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last_used: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SliceProgram:
    """A program that slices run.

    Attributes:
      function: Function from arrays to a list of arrays.
      structs: Shapes and types of its arguments.
      num_outputs: Number of arrays in its result.
    """

    function: Callable[..., list[Any]]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    num_outputs: int


@dataclass(frozen=True, eq=False)
class SlicedProgram:
    """A program in slices.

    Attributes:
      slices: Slices in the order of execution.
      inputs: Values of the program's arguments.
      constants: Arrays of the values that are known.
      output: Value of the program's result.
    """

    slices: tuple[Slice, ...]
    inputs: tuple[int, ...]
    constants: dict[int, Any]
    output: int

    @property
    def programs(self) -> list[SliceProgram]:
        """Distinct programs in the order of their first run."""
        return list(dict.fromkeys(each.program for each in self.slices))


@dataclass(frozen=True)
class _Operation:
    """An operation: `token` identifies its computation, `flops` is its cost; inputs and outputs are values."""

    function: Callable[..., Sequence[Any]]
    token: Hashable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float


def cut(
    function: Callable[..., jax.Array],
    structs: Sequence[jax.ShapeDtypeStruct],
    max_flops: float,
    sharding: jax.sharding.Sharding,
) -> SlicedProgram:
    """Cuts a function's operations into slices.

    Args:
      function: Function from arrays to one array.
      structs: Shapes and types of its arguments.
      max_flops: Largest number of floating-point operations in a slice, as far as products and maps can be cut.
      sharding: Sharding of the values between slices.
    """
    closed = jax.make_jaxpr(function)(*structs)
    cutter = _Cutter(max_flops, sharding)
    inputs = [cutter.value(struct) for struct in structs]
    [output] = cutter.add(closed.jaxpr, closed.consts, inputs, layer=None)
    return cutter.slices(tuple(inputs), output)


class _Cutter:
    """Collects operations and cuts them into slices."""

    def __init__(self, max_flops: float, sharding: jax.sharding.Sharding) -> None:
        self._max_flops, self._sharding = max_flops, sharding
        self._structs: list[jax.ShapeDtypeStruct] = []
        self._constants: dict[int, Any] = {}
        self._indices: dict[int, int] = {}
        self._groups: list[list[_Operation]] = []  # one operation or one layer each
        self._programs: dict[Hashable, SliceProgram] = {}

    def value(self, struct: jax.ShapeDtypeStruct) -> int:
        self._structs.append(struct)
        return len(self._structs) - 1

    def _value_like(self, shape: Sequence[int], dtype: Any) -> int:
        return self.value(jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self._sharding))

    def _constant(self, array: Any) -> int:
        value = self._value_like(array.shape, array.dtype)
        self._constants[value] = array
        return value

    def _index(self, index: int) -> int:
        if index not in self._indices:
            self._indices[index] = self._constant(np.asarray(index, np.int32))
        return self._indices[index]

    def add(
        self, jaxpr: Jaxpr, constants: Iterable[Any], inputs: Sequence[int], layer: list[_Operation] | None
    ) -> list[int]:
        """Adds the operations of a jaxpr to a layer or as separate groups; returns the values of its results."""
        values: dict[Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {var: self._constant(each) for var, each in zip(jaxpr.constvars, constants, strict=True)}
        used = {var for eqn in jaxpr.eqns for var in eqn.invars if isinstance(var, Var)}
        used |= {var for var in jaxpr.outvars if isinstance(var, Var)}

        def read(var: Var | Literal) -> int:
            return self._constant(np.asarray(var.val, _aval(var).dtype)) if isinstance(var, Literal) else values[var]

        for eqn in jaxpr.eqns:
            group = layer
            if group is None:
                group = []
                self._groups.append(group)
            if (parameter := _CALLS.get(eqn.primitive.name)) is not None:
                inner = eqn.params[parameter]
                results = self.add(inner.jaxpr, inner.consts, [read(var) for var in eqn.invars], group)
                values |= dict(zip(eqn.outvars, results, strict=True))
                continue
            outvars = [var for var in eqn.outvars if var in used]
            invars = list(dict.fromkeys(var for var in eqn.invars if isinstance(var, Var)))
            outputs = [self._value_like(_aval(var).shape, _aval(var).dtype) for var in outvars]
            values |= dict(zip(outvars, outputs, strict=True))
            flops = _flops(eqn)
            if flops > self._max_flops and _has_rows(eqn):
                self._add_product(eqn, [read(var) for var in eqn.invars], outputs[0], flops, group)
            elif flops > self._max_flops and eqn.primitive.name == "scan" and not eqn.params["num_carry"]:
                self._add_map(eqn, [read(var) for var in eqn.invars], dict(zip(outvars, outputs, strict=True)), group)
            else:
                alone = Jaxpr([], invars, outvars, [eqn], eqn.effects, jaxpr.debug_info.with_unknown_names())
                function = jaxpr_as_fun(ClosedJaxpr(alone, []))
                taken = tuple(values[var] for var in invars)
                group.append(_Operation(function, id(eqn), taken, tuple(outputs), flops))
        return [read(var) for var in jaxpr.outvars]

    def _add_product(
        self, eqn: JaxprEqn, inputs: Sequence[int], output: int, flops: float, group: list[_Operation]
    ) -> None:
        """Adds a product in pieces of rows."""
        params, num_rows = dict(eqn.params), _aval(eqn.invars[0]).shape[0]
        rows = _piece(num_rows, flops / num_rows, self._max_flops, _FEWEST_ROWS)
        shape, dtype = _aval(eqn.outvars[0]).shape, _aval(eqn.outvars[0]).dtype
        if eqn.primitive.multiple_results:
            params["result_avals"] = (ShapedArray((rows, *shape[1:]), dtype),)

        def piece(left: jax.Array, *others: jax.Array) -> list[jax.Array]:
            part = jax.lax.dynamic_slice_in_dim(left, others[-1] * rows, rows)
            result = eqn.primitive.bind(part, *others[:-1], **params)
            return list(result) if eqn.primitive.multiple_results else [result]

        pieces = []
        for i in range(num_rows // rows):
            pieces.append(self._value_like((rows, *shape[1:]), dtype))
            taken = (*inputs, self._index(i))
            group.append(_Operation(piece, (id(eqn), "piece"), taken, (pieces[-1],), flops * rows / num_rows))
        group.append(_Operation(_joined, (id(eqn), "join"), tuple(pieces), (output,), 0))

    def _add_map(self, eqn: JaxprEqn, inputs: Sequence[int], outputs: dict[Var, int], group: list[_Operation]) -> None:
        """Adds a map over leading axes in pieces of several steps."""
        length, num_constants, body = eqn.params["length"], eqn.params["num_consts"], jaxpr_as_fun(eqn.params["jaxpr"])
        flops = _flops(eqn)
        steps = _piece(length, flops / length, self._max_flops, 1)
        kept = [i for i, var in enumerate(eqn.outvars) if var in outputs]

        def piece(*operands: jax.Array) -> list[jax.Array]:
            constants, mapped, index = operands[:num_constants], operands[num_constants:-1], operands[-1]
            parts = [jax.lax.dynamic_slice_in_dim(each, index * steps, steps) for each in mapped]
            _, results = jax.lax.scan(lambda _, at: (None, body(*constants, *at)), None, parts)
            return [results[i] for i in kept]

        pieces: list[tuple[int, ...]] = []
        for i in range(length // steps):
            avals = [_aval(eqn.outvars[k]) for k in kept]
            pieces.append(tuple(self._value_like((steps, *aval.shape[1:]), aval.dtype) for aval in avals))
            taken = (*inputs, self._index(i))
            group.append(_Operation(piece, (id(eqn), "piece"), taken, pieces[-1], flops * steps / length))
        for k, of_output in zip(kept, zip(*pieces, strict=True), strict=True):
            group.append(_Operation(_joined, (id(eqn), "join", k), of_output, (outputs[eqn.outvars[k]],), 0))

    def slices(self, inputs: tuple[int, ...], output: int) -> SlicedProgram:
        """Returns the collected operations in slices; layers that exceed a slice are split into separate slices."""
        runs: list[list[_Operation]] = [[]]
        for group in self._groups:
            is_large = sum(each.flops for each in group) > self._max_flops
            if is_large and runs[-1]:
                runs.append([])
            for part in [[each] for each in group] if is_large else [group]:
                if runs[-1] and sum(each.flops for each in (*runs[-1], *part)) > self._max_flops:
                    runs.append([])
                runs[-1] += part
            if is_large:
                runs.append([])
        runs = [run for run in runs if run]
        last_use = {value: i for i, run in enumerate(runs) for each in run for value in each.inputs}
        last_use[output] = len(runs)
        kept = {*inputs, *self._constants}
        slices = []
        for i, run in enumerate(runs):
            made = {value for each in run for value in each.outputs}
            taken = tuple(dict.fromkeys(value for each in run for value in each.inputs if value not in made))
            left = tuple(value for each in run for value in each.outputs if last_use.get(value, -1) > i)
            done = tuple(value for value in taken if last_use[value] == i and value not in kept)
            slices.append(Slice(self._program(run, taken, left), taken, left, done))
        used = {value for each in slices for value in each.inputs}
        constants = {value: each for value, each in self._constants.items() if value in used}
        return SlicedProgram(tuple(slices), inputs, constants, output)

    def _program(self, run: Sequence[_Operation], taken: tuple[int, ...], left: tuple[int, ...]) -> SliceProgram:
        """Returns the program of a slice, which numbers the slice's values from 0."""
        local = {value: i for i, value in enumerate(taken)}
        for each in run:
            for value in each.outputs:
                local.setdefault(value, len(local))
        steps = [(each.function, [local[v] for v in each.inputs], [local[v] for v in each.outputs]) for each in run]
        results = [local[value] for value in left]

        def function(*arrays: Any) -> list[Any]:
            values = dict(enumerate(arrays))
            for apply, arguments, outputs in steps:
                values |= zip(outputs, apply(*(values[i] for i in arguments)), strict=True)
            return [values[i] for i in results]

        structs = tuple(self._structs[value] for value in taken)
        names = tuple((each.token, *map(tuple, step[1:])) for each, step in zip(run, steps, strict=True))
        return self._programs.setdefault(
            (names, tuple(results), structs), SliceProgram(function, structs, len(results))
        )


def _aval(var: Var | Literal) -> ShapedArray:
    aval = var.aval
    assert isinstance(aval, ShapedArray)  # towers compute with arrays only
    return aval


def _joined(*pieces: jax.Array) -> list[jax.Array]:
    return [jnp.concatenate(pieces)]


def _has_rows(eqn: JaxprEqn) -> bool:
    """Returns whether an operation is a product whose first axis belongs to its left operand alone."""
    if _kernel(eqn) == "matmul":
        num_rows = _aval(eqn.invars[0]).shape[0]
        return len(eqn.outvars) == 1 and all(_aval(var).shape[:1] != (num_rows,) for var in eqn.invars[1:])
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
    return not batched and 0 not in contracted


def _piece(size: int, flops_of_one: float, max_flops: float, least: int) -> int:
    """Returns the largest divisor of `size` that costs at most `max_flops`, else the smallest not below `least`."""
    divisors = [each for each in range(min(least, size), size + 1) if size % each == 0]
    return max((each for each in divisors if each * flops_of_one <= max_flops), default=divisors[0])


def _kernel(eqn: JaxprEqn) -> str | None:
    """Returns the native kernel that an operation calls; None for other operations."""
    return native.kernel_name(eqn.params["target_name"]) if eqn.primitive.name == "ffi_call" else None


def _flops_of_product(rows: _Shape, _panels: _Shape, product: _Shape) -> float:
    return 2.0 * math.prod(rows) * product[1]


def _flops_of_attention(queries: _Shape, keys: _Shape, _attended: _Shape) -> float:
    return 4.0 * math.prod(queries) * keys[1]


_KERNEL_FLOPS = {"matmul": _flops_of_product, "sequence_attention": _flops_of_attention}


def _flops(eqn: JaxprEqn) -> float:
    """Returns the approximate cost of an operation; a loop of unknown length counts as one pass."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = _aval(eqn.invars[0]).shape
        return 2.0 * _aval(eqn.outvars[0]).size * math.prod(left[i] for i in contracted)
    if (kernel := _kernel(eqn)) is not None and kernel in _KERNEL_FLOPS:
        return _KERNEL_FLOPS[kernel](*(_aval(var).shape for var in (*eqn.invars[:2], *eqn.outvars[:1])))
    inner = [each for param in eqn.params.values() for each in (param if isinstance(param, tuple) else (param,))]
    jaxprs = [each.jaxpr if isinstance(each, ClosedJaxpr) else each for each in inner]
    jaxprs = [each for each in jaxprs if isinstance(each, Jaxpr)]
    if jaxprs:
        return eqn.params.get("length", 1) * sum(_flops(each) for jaxpr in jaxprs for each in jaxpr.eqns)
    size = sum(_aval(var).size for var in eqn.outvars)
    return 0 if eqn.primitive.name in _MOVES else _ELEMENT_FLOPS * float(size)
