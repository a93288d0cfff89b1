"""Runs sequences through a model's decoder, one layer after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.calibration.layer_inputs import LayerArguments, run_layer
from jaxis.errors import CheckpointError
from jaxis.kernels.weights import WeightScheme, dequantize, quantize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import named_modules
from jaxis.layers.scale import scaled
from jaxis.models.common.decoder import DecoderModel


class DecoderRun:
    """The hidden states of all sequences before a layer, in a decoder with quantized modules outside its layers.

    Only embedding rows of tokens that occur are kept.

    `sequences` are token ids [T], all of one length. Modules of the unquantized decoder outside the layers get their
    quantized values. Raises CheckpointError if a weight outside the layers cannot be quantized by its scheme.
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
        """Returns the arguments of the layer of this index for each sequence, float32."""
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
        outputs = run_layer(self._decoder.layers[layer], arguments)
        for caches, (updated, _) in zip(self._caches, outputs, strict=True):
            self._decoder.keep_cache_of_layer(caches, layer, updated)
        self._hidden_states = [x for _, x in outputs]


def _round_outside_layers(decoder: DecoderModel, schemes: Mapping[str, WeightScheme], ids: np.ndarray) -> None:
    """Gives modules outside the layers their quantized values; embeddings keep only the rows `ids`."""
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
    """Quantizes and dequantizes a weight [out, in]; returns it unchanged without a scheme."""
    if scheme is None:
        return weight
    try:
        return dequantize(quantize(np.asarray(weight), scheme), weight.dtype)
    except ValueError as error:
        raise CheckpointError(f"the weight of {name} {error}") from None
