"""Tiny twins of published configs: the reference, its recording, and the same weights as jaxis loads them."""

import contextlib
import functools
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import published_configs
from jaxis.bringup.compare import GATES
from jaxis.bringup.layers import check_layers
from jaxis.bringup.reference import Reference
from jaxis.bringup.shrink import tiny_twin
from jaxis.config import ModelConfig, VllmConfig
from jaxis.hf_config import HFConfig
from jaxis.loading.model_loader import load_model
from jaxis.models.registry import _registered, register_model
from jaxis.parallel.mesh import make_mesh

NUM_TOKENS = 48
TOKEN_IDS = np.random.default_rng(0).integers(0, 131, NUM_TOKENS).tolist()
_folders = []


@functools.cache
def twin(name):
    """(Folder of the twin of the published config of this name, the reference's recording)."""
    config = tiny_twin(getattr(published_configs, name))
    folder = tempfile.TemporaryDirectory(prefix="jaxis_twin_")
    _folders.append(folder)  # goes when the process does
    reference = Reference.random(config)
    reference.save(Path(folder.name), config)
    return folder.name, reference.record(TOKEN_IDS)


def load(name, model_class=None, dtype="float32", quant_config=None):
    """The twin as jaxis loads it, by another class where one is given."""
    folder, _ = twin(name)
    hf_config = HFConfig.from_folder(folder)
    [architecture] = hf_config["architectures"]
    model_config = ModelConfig(folder, hf_config, dtype=jnp.dtype(dtype))
    with registered(architecture, model_class):
        return load_model(VllmConfig(model_config, quant_config=quant_config), make_mesh())


@contextlib.contextmanager
def registered(architecture, model_class):
    """The class, if it is not None, runs the architecture inside."""
    if model_class is not None:
        register_model(architecture, model_class)
    try:
        yield
    finally:
        _registered.pop(architecture, None)


def layers_of(name, model_class=None, dtype="float32"):
    """What `check_layers` says of the twin."""
    return check_layers(load(name, model_class, dtype), TOKEN_IDS, twin(name)[1], GATES[dtype])
