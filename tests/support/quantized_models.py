"""Models loaded without an engine, so that nothing need compile as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.kernels import native as kernels
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.module import JaxModule
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.wrappers import PackingConfig

IDS = [1, 5, 9, 200, 33, 400]


def load(
    folder: Path,
    quantization: Any = None,
    *,
    load_format: str = "auto",
    dtype: Any = jnp.float32,
    native: bool = False,
    prediction_layer: bool = False,
) -> JaxModule:
    """The checkpoint's model, as `LLM(folder, quantization=...)` loads it, for plain JAX or for the native kernels."""
    if native and not kernels.usable():
        pytest.skip("needs the native kernels")
    hf_config = HFConfig.from_folder(folder)
    quant_config = quantization_of_checkpoint(hf_config, parse_quantization(quantization), TensorListing(folder))
    config = VllmConfig(
        ModelConfig(str(folder), hf_config, dtype=dtype, max_model_len=64),
        load_config=LoadConfig(load_format=load_format, prediction_layer=prediction_layer),
        quant_config=PackingConfig(quant_config) if native else quant_config,
    )
    return load_model(config, make_mesh())


def logits(model: JaxModule, ids: list[int] = IDS) -> np.ndarray:
    """float32 [T, V]."""
    _, hidden, _ = model(None, jnp.asarray(ids), AttentionMetadata.for_whole_sequences([len(ids)]))
    return np.asarray(model.compute_logits(hidden))


def values(model: JaxModule) -> dict[str, Any]:
    """Parameter's name -> its value, an array or a QuantizedWeight."""
    return {name: param.get_value() for name, param in model.named_parameters()}


def assert_equal(one: JaxModule, other: JaxModule) -> None:
    """The same bits, and the same ways to compute with them."""
    ours, theirs = values(one), values(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert jax.tree.structure(value) == jax.tree.structure(theirs[name])
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(theirs[name]), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b, err_msg=name)
    # Whatever else decides what is computed: both would share a trace.
    assert nnx.graphdef(one) == nnx.graphdef(other)
