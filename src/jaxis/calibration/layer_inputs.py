"""What goes into the linear modules of a decoder layer, over a text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, calls_observed, named_modules

_Calls = dict[str, tuple[jax.Array, ...]]


@dataclass
class LayerInputs:
    """The inputs of a layer's modules, by their names in the layer.

    Attributes:
      moments: Names of linear modules that share an input -> the sum of x x^T over all tokens, float32 [in, in].
      routed: Name of a module of experts -> for each sequence, its arguments: x [T, E], expert ids [T, k] and their
        weights [T, k].
    """

    moments: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)
    routed: dict[str, list[tuple[np.ndarray, ...]]] = field(default_factory=dict)


def collect_inputs(layer: JaxModule, hidden_states: Sequence[jax.Array]) -> LayerInputs:
    """Runs a layer over all sequences.

    Args:
      layer: A decoder layer.
      hidden_states: Its input [T, E] for each sequence, all of one length.
    """
    graphdef, state = nnx.split(layer)
    metadata = _metadata(hidden_states[0])
    groups = _shared_inputs(layer, hidden_states[0], metadata)
    firsts = tuple(names[0] for names in groups)
    found = LayerInputs()
    sums: dict[str, jax.Array] = {}
    for x in hidden_states:
        sums, routed = _add_moments(graphdef, firsts, state, x, metadata, sums)
        for name, arguments in routed.items():
            found.routed.setdefault(name, []).append(tuple(map(np.asarray, arguments)))
    found.moments = {names: np.asarray(sums[names[0]]) for names in groups}
    return found


def run_layer(layer: JaxModule, hidden_states: Sequence[jax.Array]) -> list[jax.Array]:
    """A layer's output [T, E] for each sequence."""
    graphdef, state = nnx.split(layer)
    metadata = _metadata(hidden_states[0])
    return [_run(graphdef, state, x, metadata) for x in hidden_states]


def _metadata(x: jax.Array) -> AttentionMetadata:
    return AttentionMetadata.for_whole_sequences([len(x)])


@functools.partial(jax.jit, static_argnums=0)
def _run(graphdef: nnx.GraphDef, state: nnx.State, x: jax.Array, metadata: AttentionMetadata) -> jax.Array:
    return nnx.merge(graphdef, state)(None, x, metadata)[1]


def _shared_inputs(layer: JaxModule, x: jax.Array, metadata: AttentionMetadata) -> list[tuple[str, ...]]:
    """The names of the layer's linear modules, those with the same input together."""
    groups: dict[int, list[str]] = {}

    def trace(x: jax.Array) -> None:
        calls = _observe(layer, x, metadata)
        for name, (value, *others) in calls.items():
            if not others:
                groups.setdefault(id(value), []).append(name)
        # The arrays are held until here, so that no two have the same id.
        del calls

    jax.eval_shape(trace, x)
    return [tuple(names) for names in groups.values()]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def _add_moments(
    graphdef: nnx.GraphDef,
    names: tuple[str, ...],
    state: nnx.State,
    x: jax.Array,
    metadata: AttentionMetadata,
    sums: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], _Calls]:
    calls = _observe(nnx.merge(graphdef, state), x, metadata)
    new_sums = {}
    for name in names:
        rows = calls[name][0].reshape(-1, calls[name][0].shape[-1]).astype(jnp.float32)
        moments = jnp.matmul(rows.T, rows, precision="highest")
        new_sums[name] = sums[name] + moments if name in sums else moments
    return new_sums, {name: arguments for name, arguments in calls.items() if len(arguments) == 3}


def _observe(layer: JaxModule, x: jax.Array, metadata: AttentionMetadata) -> _Calls:
    """The arguments of the layer's linear modules (one) and experts (three) in a run; of the last call of each."""
    names = {id(m): name for name, m in named_modules(layer) if isinstance(m, JaxLinear | JaxExperts)}
    calls: _Calls = {}

    def observe(module: JaxModule, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) in names:
            calls[names[id(module)]] = args
        return call(module, *args, **kwargs)

    with calls_observed(observe):
        layer(None, x, metadata)
    return calls
