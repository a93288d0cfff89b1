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

# transformers' defaults, which are the sizes of a 7B model.
MAMBA_2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 0,
    "chunk_size": 256,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "pad_token_id": 1,
    "residual_in_fp32": True,
    "state_size": 128,
    "tie_word_embeddings": False,
    "time_step_rank": 256,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 32768,
}

NUM_TOKENS = 48
TOKEN_IDS = np.random.default_rng(0).integers(0, 131, NUM_TOKENS).tolist()
_folders = []


def published(name):
    """A config.json of `published_configs`, of data/configs or, MAMBA_2, of this file."""
    if name == "MAMBA_2":
        return MAMBA_2
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
    """Result of `check_layers` for the twin, with `plant` done to a layer of it."""
    model = load(name, dtype=dtype)
    if plant is not None:
        plant(model.decoder.layers[layer])
    return check_layers(model, TOKEN_IDS, twin(name)[1], GATES[dtype])
