"""A model as a pure function of its weights, and the calls of its layers in training.

A layer is recomputed for its derivatives, gathers its weights from other devices, or has its routers observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.kernels.platform import target_platform
from jaxis.kernels.weights import ROWS_AXIS, WeightValue
from jaxis.layers.attention_metadata import AttentionMetadata, ScratchCache
from jaxis.layers.decoder_layer import LayerOutput
from jaxis.layers.experts import JaxExperts
from jaxis.layers.kv_cache_spec import HasCache, KVCacheSpec
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.routing import RouterObserver, Routing
from jaxis.models.common.decoder import CausalLM, layers_are_inlined, run_layer
from jaxis.training.sharding import GATHERED, DevicePart, has_shards, whole

Values = Mapping[str, Any]
"""Values of a model's parameters by dotted name: float arrays, or weights in other formats."""


class FunctionalModel:
    """A model as a pure function of its weights, which are arguments of its methods.

    Attributes:
      has_experts: True for a mixture of experts.
      has_dense_attention: True if the derivative of a layer's attention has scores of all pairs of tokens in memory.
      logical_axes: Logical axes of the parameters, by name.
      other_names: Names of variables that are not weights. A variable shared by several modules has one of its names.
    """

    def __init__(self, model: JaxModule) -> None:
        modules = list(named_modules(model))
        self.has_experts = any(isinstance(module, JaxExperts) for _, module in modules)
        self.has_dense_attention = any(_is_dense(module) for _, module in modules)
        layers = {id(layer) for layer in model.decoder.layers} if isinstance(model, CausalLM) else set()
        self._in_layers = tuple(f"{name}." for name, module in modules if id(module) in layers)
        self._graph, parameters, self._others = nnx.split(model, nnx.Param, ...)
        self._parameters = [(path, param) for path, param in nnx.to_flat_state(parameters)]
        self.other_names = [_name(path) for path, _ in nnx.to_flat_state(self._others)]
        self.logical_axes = {
            _name(path): axes
            for path, param in self._parameters
            if (axes := cast(nnx.Param, param).get_metadata().get("logical_axes")) is not None
        }

    def gathered(self, values: Values) -> Values:
        """Returns the weights, gathered from all devices except those that a layer gathers when it runs."""
        return {name: value if name.startswith(self._in_layers) else whole(value) for name, value in values.items()}

    def bind(self, values: Values, others: Mapping[str, jax.Array] | None = None) -> JaxModule:
        """Returns the model with these weights and, by name, these values of other variables."""
        state = nnx.from_flat_state(
            [(path, cast(nnx.Param, param).replace(values[_name(path)])) for path, param in self._parameters]
        )
        rest = self._others
        if others:
            rest = nnx.from_flat_state(
                [
                    (path, cast(nnx.Variable, variable).replace(others.get(_name(path), variable.get_value())))
                    for path, variable in nnx.to_flat_state(self._others)
                ]
            )
        return nnx.merge(self._graph, state, rest)


def values_of(model: JaxModule) -> dict[str, WeightValue]:
    """Returns the values of a model's parameters by name. A module with two names counts once."""
    _, parameters, _ = nnx.split(model, nnx.Param, ...)
    return {_name(path): cast(nnx.Param, param).get_value() for path, param in nnx.to_flat_state(parameters)}


def bytes_of(tree: Any) -> int:
    """Returns the bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterSums:
    """Statistics of routers, summed over tokens, whose number is a float32 scalar.

    `chosen`, float32 [X], counts tokens that have each expert among their k most likely ones; `probability`, float32
    [X], is the sum of each expert's probabilities.
    """

    chosen: jax.Array
    probability: jax.Array
    num_tokens: jax.Array


@dataclass
class LayerCalls:
    """Runner of a `CausalLM`'s layers.

    Attributes:
      recompute: True to recompute layers for their derivatives.
      observes_routers: True to collect `router_sums` of the routers in the layers called so far.
      is_mapped: True if `jax.vmap` maps the calls over `ROWS_AXIS`.
    """

    recompute: bool
    observes_routers: bool
    is_mapped: bool = False
    router_sums: list[RouterSums] = field(default_factory=list)

    def __call__(self, graph: nnx.GraphDef, state: nnx.State, *arguments: Any) -> LayerOutput:
        call = _call_inline if layers_are_inlined() else _call
        output, sums = call(self.recompute, self.observes_routers, self.is_mapped, graph, state, *arguments)
        self.router_sums.extend(sums)
        return output


def _run(
    recompute: bool, observes: bool, is_mapped: bool, graph: nnx.GraphDef, state: nnx.State, *arguments: Any
) -> Any:
    """Returns the output of a layer and the sums of its routers. Equal layers are traced once."""

    def run(state: nnx.State, kv_cache: Any, x: jax.Array, metadata: Any, *inputs: jax.Array) -> Any:
        sums: list[RouterSums] = []

        observe = None
        if observes:
            observe = _adding_to(sums, jnp.arange(len(metadata.input_positions)) < metadata.num_tokens)
        return run_layer(graph, whole(state), kv_cache, x, metadata, *inputs, observe=observe), sums

    is_paged = any(isinstance(each, AttentionMetadata) and each.scratch is not None for each in arguments)
    if recompute and target_platform() == "cpu" and not has_shards(state) and not is_paged:
        return _recomputed_rows(run, state, *arguments) if is_mapped else recomputed(run, state, *arguments)
    if recompute:
        run = jax.checkpoint(run)
    elif has_shards(state):
        # Weights gathered from other devices are never kept.
        run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_anything_except_these_names(GATHERED))
    return run(state, *arguments)


_call = jax.jit(_run, static_argnums=(0, 1, 2, 3))
_call_inline = jax.jit(_run, static_argnums=(0, 1, 2, 3), inline=True)


def _recomputed_rows(run: Callable[..., Any], *arguments: Any) -> Any:
    """Recomputes all batch rows together. The gradients of weights are then never in memory row by row."""
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def vmap(_: int, is_batched: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
        outputs = recomputed(jax.vmap(run, in_axes=in_axes, axis_name=ROWS_AXIS), *operands)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return mapped(*arguments)


def _adding_to(sums: list[RouterSums], is_token: jax.Array) -> RouterObserver:
    def observe(routing: Routing, logits: jax.Array, _expert_ids: jax.Array) -> None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        _, best = jax.lax.top_k(probabilities, routing.num_experts_per_token)
        counts = jnp.where(is_token, 1.0, 0.0)
        chosen = jnp.zeros(routing.num_experts).at[best].add(counts[:, None])
        sums.append(RouterSums(chosen, counts @ probabilities, jnp.sum(counts)))

    return observe


def hidden_states(
    model: GenerativeModel, row: Any, calls: LayerCalls, scratch: ScratchCache | None = None
) -> jax.Array:
    """Computes the hidden states [L, E] of a batch row, by a forward pass over whole sequences.

    The row is a `TrainingBatch` without its two leading axes. `scratch` is the cache of the engine's forward pass; None
    for the plain one.
    """
    count = row.num_sequences
    metadata = AttentionMetadata(
        input_positions=row.positions,
        block_tables=None,
        seq_lens=row.seq_lens,
        query_start_loc=row.query_start_loc,
        request_distribution=jnp.stack([jnp.zeros_like(count), count, count]),
        scratch=scratch,
    )
    # A model of another class runs its layers itself.
    arguments = {"run_layer": calls} if isinstance(model, CausalLM) else {}
    return model(None, row.ids, metadata, **arguments)[1]


def cast_floats(values: Values, dtype: DTypeLike) -> dict[str, Any]:
    """Casts plain float arrays. Weights in other formats stay as they are."""
    return {
        name: value.astype(dtype) if isinstance(value, DevicePart) or is_float(value) else value
        for name, value in values.items()
    }


def is_float(value: Any) -> TypeGuard[jax.Array]:
    """Returns whether a parameter holds a plain array of floats."""
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)


def is_array(value: Any) -> TypeGuard[jax.Array]:
    """Returns whether a parameter holds a plain array, or its shape."""
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


def _is_dense(module: object) -> bool:
    if not isinstance(module, HasCache):
        return False
    is_plain = isinstance(module.kv_cache_spec, KVCacheSpec)
    return not is_plain or any(getattr(module, name, None) is not None for name in ("soft_cap", "sinks"))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Kept:
    """Arguments of a call, and the indices of the differentiated ones."""

    leaves: list[jax.Array]
    wanted: tuple[int, ...] = field(metadata={"static": True})


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of arrays, and computes it again for its derivatives, so that only arguments are kept in memory.

    `jax.checkpoint` saves no memory on CPU: XLA drops the barriers that delay recomputation. It then recomputes
    everything at once and holds all of it together. Here, recomputation is in a conditional whose predicate depends on
    the cotangent, so it cannot run earlier. Under `jax.vmap`, both branches would run: map the function instead.
    """
    leaves, tree = jax.tree.flatten(arguments)

    @jax.custom_vjp
    def call(*leaves: jax.Array) -> Any:
        return function(*tree.unflatten(leaves))

    def forward(*primals: Any) -> tuple[Any, _Kept]:
        leaves = [primal.value for primal in primals]
        # Integers and booleans, such as an indexer's selection, can be marked too; they have no derivative.
        wanted = tuple(
            i
            for i, primal in enumerate(primals)
            if primal.perturbed and jnp.issubdtype(primal.value.dtype, jnp.floating)
        )
        return call(*leaves), _Kept(leaves, wanted)

    def backward(kept: _Kept, cotangent: Any) -> tuple[Any, ...]:
        known = [each for each in jax.tree.leaves(cotangent) if not isinstance(each, SymbolicZero)]
        cotangent = jax.tree.map(_instantiated, cotangent, is_leaf=lambda each: isinstance(each, SymbolicZero))
        values = [kept.leaves[i] for i in kept.wanted]

        def of_wanted(*values: jax.Array) -> Any:
            leaves = list(kept.leaves)
            for i, value in zip(kept.wanted, values, strict=True):
                leaves[i] = value
            return function(*tree.unflatten(leaves))

        first = jnp.ravel(max(known, key=np.size))[0]
        # False for NaN only, where all results are NaN anyway.
        found = jax.lax.cond(
            first == first,
            lambda: jax.vjp(of_wanted, *values)[1](cotangent),
            lambda: tuple(jnp.full_like(value, jnp.nan) for value in values),
        )
        gradients: list[Any] = [None] * len(kept.leaves)
        for i, gradient in zip(kept.wanted, found, strict=True):
            gradients[i] = gradient
        return tuple(gradients)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*leaves)


def _instantiated(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        zero: Any = cotangent
        return np.zeros(zero.shape, zero.dtype)
    return cotangent
