"""Calibration's run through a decoder gives layers what the model itself gives them."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.calibration.decoder_run import DecoderRun
from jaxis.layers.attention_metadata import AttentionMetadata
from tests.support import parity
from tests.support.parity import FAMILIES
from tests.support.quantized_models import load

BY_NAME = {family.name: family for family in FAMILIES}
SEQUENCES = [np.asarray(ids, np.int32) for ids in ([1, 5, 9, 120, 33, 44, 125, 7], [98, 97, 3, 5, 1, 2, 130, 12])]


# Embeddings of layers with keys and values that layers share, several states a token, several caches a layer, and
# a selection of tokens that is handed on.
@pytest.mark.parametrize(
    "name",
    [
        "Gemma 3n",
        pytest.param("Gemma 4, shared keys and values, embeddings of layers", marks=pytest.mark.slow),
        pytest.param("Falcon-H1", marks=pytest.mark.slow),
        pytest.param("GLM-5.2", marks=pytest.mark.slow),
        pytest.param("Jamba", marks=pytest.mark.slow),
    ],
)
def test_layers_get_what_the_model_gives_them(name):
    model = load(Path(parity.checkpoint_folder(BY_NAME[name])))
    decoder = model.decoder
    decoder.aux_hidden_state_layers = tuple(range(len(decoder.layers)))
    metadata = AttentionMetadata.for_whole_sequences([len(SEQUENCES[0])])
    expected = [model(None, jnp.asarray(ids), metadata)[2] for ids in SEQUENCES]
    run = DecoderRun(decoder, {}, SEQUENCES)
    for layer in range(len(decoder.layers)):
        arguments = run.arguments(layer)
        for (_, x, *_), states in zip(arguments, expected, strict=True):
            np.testing.assert_allclose(x, states[layer], rtol=1e-5, atol=1e-5 * np.abs(states[layer]).max())
        run.advance(layer, arguments)
