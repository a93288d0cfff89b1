"""Runs a model decoder layer by decoder layer, recording what its modules take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.weights import WeightScheme, dequantize, quantize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, calls_observed, named_modules
from jaxis.layers.scale import scaled
from jaxis.models.common.decoder import DecoderModel

# What goes into the linear modules of a decoder layer, over calibration text.


LayerArguments = tuple[Any, ...]
"""What a decoder layer is called with for one sequence: what stands in the place of its cache, x [T, ...], the metadata
and the model's `DecoderModel.layer_inputs` for it."""

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


def collect_inputs(layer: JaxModule, arguments: Sequence[LayerArguments]) -> LayerInputs:
    """Runs a layer over all sequences.

    Args:
      layer: A decoder layer.
      arguments: With which it is called for each sequence, all of one length.
    """
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
    """A layer's output for each sequence."""
    graphdef, state = nnx.split(layer)
    return [_run(graphdef, state, each) for each in arguments]


@functools.partial(jax.jit, static_argnums=0)
def _run(graphdef: nnx.GraphDef, state: nnx.State, arguments: LayerArguments) -> LayerOutput:
    return nnx.merge(graphdef, state)(*arguments)


def _shared_inputs(layer: JaxModule, arguments: LayerArguments) -> list[tuple[str, ...]]:
    """The names of the layer's linear modules, those with the same input together."""
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
    """The arguments of the layer's linear modules (one) and experts (three) in a run; of the last call of each."""
    # Experts are also told which rows are padding: none is here.
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


# Sequences on their way through a decoder, one layer after the other.


class DecoderRun:
    """All sequences before a layer of a decoder whose modules outside its layers are quantized already.

    Of the decoder's embeddings, only the rows of tokens that occur are kept.

    Args:
      decoder: The decoder, unquantized; the modules outside its layers get the weights that they have when quantized.
      schemes: How modules of the decoder are quantized, by their names in it.
      sequences: Token ids [T] of each, all of one length.

    Raises:
      CheckpointError: A weight outside the layers cannot be quantized so.
    """

    def __init__(
        self, decoder: DecoderModel, schemes: Mapping[str, WeightScheme], sequences: Sequence[np.ndarray]
    ) -> None:
        self._decoder = decoder
        self._metadata = AttentionMetadata.for_whole_sequences([len(sequences[0])])
        ids, numbers = np.unique(np.stack(sequences), return_inverse=True)
        _round_outside_layers(decoder, schemes, ids)
        self._hidden_states: list[jax.Array] = []
        self._layer_inputs: list[Sequence[tuple[jax.Array, ...]]] = []
        self._caches: list[list[LayerCache]] = []
        for sequence, rows in zip(sequences, numbers.reshape(len(sequences), -1), strict=True):
            embeddings = decoder.embed(jnp.asarray(rows))
            x = decoder.first_input(scaled(embeddings, decoder.embedding_multiplier))
            self._hidden_states.append(x.astype(jnp.float32))
            self._layer_inputs.append(decoder.layer_inputs(jnp.asarray(sequence), embeddings))
            self._caches.append(decoder.step_caches(None))

    def arguments(self, layer: int) -> list[LayerArguments]:
        """What the layer of this index is called with for each sequence, float32."""
        return [
            (
                self._decoder.cache_of_layer(caches, layer),
                x,
                self._metadata,
                *(each.astype(jnp.float32) for each in layer_inputs[layer]),
            )
            for x, caches, layer_inputs in zip(self._hidden_states, self._caches, self._layer_inputs, strict=True)
        ]

    def advance(self, layer: int, arguments: Sequence[LayerArguments]) -> None:
        """Runs the layer of this index with its `arguments`."""
        outputs = run_layer(self._decoder.layers[layer], arguments)
        for caches, (updated, _) in zip(self._caches, outputs, strict=True):
            self._decoder.keep_cache_of_layer(caches, layer, updated)
        self._hidden_states = [x for _, x in outputs]


def _round_outside_layers(decoder: DecoderModel, schemes: Mapping[str, WeightScheme], ids: np.ndarray) -> None:
    """Gives modules outside the layers the weights that they have when quantized; of tables, the rows `ids`."""
    for name, module in named_modules(decoder):
        if name.startswith("layers.") or not isinstance(module, JaxLinear | JaxEmbed):
            continue
        weight = module.weight.get_value()
        scheme = schemes.get(name)
        if module is decoder.embed_tokens:
            module.weight.set_value(_rounded(name, weight[jnp.asarray(ids)], scheme))
        elif isinstance(module, JaxEmbed):
            rows = jnp.asarray(ids[ids < len(weight)])
            module.weight.set_value(weight.at[rows].set(_rounded(name, weight[rows], scheme)))
        else:
            module.weight.set_value(_rounded(name, weight, scheme))


def _rounded(name: str, weight: jax.Array, scheme: WeightScheme | None) -> jax.Array:
    """What a weight [out, in] stands for when it is quantized; itself without a scheme."""
    if scheme is None:
        return weight
    try:
        return dequantize(quantize(np.asarray(weight), scheme), weight.dtype)
    except ValueError as error:
        raise CheckpointError(f"the weight of {name} {error}") from None
