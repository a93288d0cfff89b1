"""Tiny twins of published configs: the reference, its recording, and the same weights as jaxis loads them."""

import contextlib
import functools
import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch

from jaxis.bringup.verify.check_layers import check_layers
from jaxis.bringup.verify.compare import GATES
from jaxis.bringup.verify.reference import Reference, complete_config
from jaxis.bringup.verify.shrink import tiny_twin
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.models.model_loader import load_model
from jaxis.models.registry import _registered, register_model
from jaxis.parallel.mesh import make_mesh
from tests.support import published_configs
from tests.support.places import TESTS

# Threads cost more than they gain on models this small.
torch.set_num_threads(1)

NUM_TOKENS = 48
TOKEN_IDS = np.random.default_rng(0).integers(0, 131, NUM_TOKENS).tolist()
_folders = []


def published(name):
    """A config.json of `published_configs`, or of data/configs."""
    if hasattr(published_configs, name):
        return getattr(published_configs, name)
    return json.loads((TESTS / "data" / "configs" / f"{name}.json").read_text())


@functools.cache
def twin(name):
    """(Folder of the twin of the published config of this name, the reference's recording)."""
    config = published(name)
    config = tiny_twin(config, complete_config(config))
    folder = tempfile.TemporaryDirectory(prefix="jaxis_twin_")
    _folders.append(folder)  # goes when the process does
    reference = Reference.random(config)
    reference.save(Path(folder.name), config)
    return folder.name, reference.record(TOKEN_IDS)


def load(name, dtype="float32", quant_config=None):
    """The twin as jaxis loads it."""
    folder, _ = twin(name)
    hf_config = HFConfig.from_folder(folder)
    model_config = ModelConfig(folder, hf_config, dtype=jnp.dtype(dtype))
    return load_model(VllmConfig(model_config, quant_config=quant_config), make_mesh())


@contextlib.contextmanager
def registered(architecture, model_class):
    """The class runs the architecture inside."""
    register_model(architecture, model_class)
    try:
        yield
    finally:
        _registered.pop(architecture, None)


def layers_of(name, plant=None, layer=1, dtype="float32"):
    """What `check_layers` says of the twin, with `plant` done to a layer of it."""
    model = load(name, dtype=dtype)
    if plant is not None:
        plant(model.decoder.layers[layer])
    return check_layers(model, TOKEN_IDS, twin(name)[1], GATES[dtype])
