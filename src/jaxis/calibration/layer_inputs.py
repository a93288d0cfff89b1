"""Runs of one decoder layer over calibration text, and the inputs of its modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.layers.decoder_layer import LayerOutput
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, calls_observed, named_modules

LayerArguments = tuple[Any, ...]
"""Arguments of a decoder layer for one sequence: its cache's stand-in, x [T, ...], the metadata and the model's
`DecoderModel.layer_inputs`."""

_Calls = dict[str, tuple[jax.Array, ...]]


@dataclass
class LayerInputs:
    """Inputs of a layer's modules, by the modules' names in the layer.

    Attributes:
      moments: Sum of x x^T over all tokens, float32 [in, in], by the names of the linear modules that share the input
        x.
      routed: Arguments of each module of experts, for each sequence: x [T, E], expert ids [T, k] and their weights [T,
        k].
    """

    moments: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)
    routed: dict[str, list[tuple[np.ndarray, ...]]] = field(default_factory=dict)


def collect_inputs(layer: JaxModule, arguments: Sequence[LayerArguments]) -> LayerInputs:
    """Runs a layer over all sequences, of one length, and collects the inputs of its modules."""
    graphdef, state = nnx.split(layer)
    groups = _shared_inputs(layer, arguments[0])
    firsts = tuple(names[0] for names in groups)
    found = LayerInputs()
    sums: dict[str, jax.Array] = {}
    for each in arguments:
        sums, routed = _add_moments(graphdef, firsts, state, each, sums)
        for name, call in routed.items():
            found.routed.setdefault(name, []).append(tuple(map(np.asarray, call)))
    found.moments = {names: np.asarray(sums[names[0]]) for names in groups}
    return found


def run_layer(layer: JaxModule, arguments: Sequence[LayerArguments]) -> list[LayerOutput]:
    graphdef, state = nnx.split(layer)
    return [_run(graphdef, state, each) for each in arguments]


@functools.partial(jax.jit, static_argnums=0)
def _run(graphdef: nnx.GraphDef, state: nnx.State, arguments: LayerArguments) -> LayerOutput:
    return nnx.merge(graphdef, state)(*arguments)


def _shared_inputs(layer: JaxModule, arguments: LayerArguments) -> list[tuple[str, ...]]:
    """Returns the names of the layer's linear modules, grouped by their input."""
    groups: dict[int, list[str]] = {}

    def trace(arguments: LayerArguments) -> None:
        calls = _observe(layer, arguments)
        for name, (value, *others) in calls.items():
            if not others:
                groups.setdefault(id(value), []).append(name)
        # The arrays are held until here, so that no two have the same id.
        del calls

    jax.eval_shape(trace, arguments)
    return [tuple(names) for names in groups.values()]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _add_moments(
    graphdef: nnx.GraphDef,
    names: tuple[str, ...],
    state: nnx.State,
    arguments: LayerArguments,
    sums: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], _Calls]:
    calls = _observe(nnx.merge(graphdef, state), arguments)
    new_sums = {}
    for name in names:
        rows = calls[name][0].reshape(-1, calls[name][0].shape[-1]).astype(jnp.float32)
        moments = jnp.matmul(rows.T, rows, precision="highest")
        new_sums[name] = sums[name] + moments if name in sums else moments
    return new_sums, {name: call for name, call in calls.items() if len(call) == 3}


def _observe(layer: JaxModule, arguments: LayerArguments) -> _Calls:
    """Returns the arguments of linear modules (one) and experts (three), from the last call of each in a run."""
    # Experts also get a mask of padding rows; there are none here.
    observed = {
        id(module): (name, 3 if isinstance(module, JaxExperts) else 1)
        for name, module in named_modules(layer)
        if isinstance(module, JaxLinear | JaxExperts)
    }
    calls: _Calls = {}

    def observe(module: JaxModule, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) in observed:
            name, num_arguments = observed[id(module)]
            calls[name] = args[:num_arguments]
        return call(module, *args, **kwargs)

    with calls_observed(observe):
        layer(*arguments)
    return calls
