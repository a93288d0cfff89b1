"""Latent attention on several devices: each has its own heads, and all of the cache."""

import pytest

from tests.support.simulated_devices import run_on_devices

SCRIPT = """
import sys

import jax
import numpy as np
from tests.support import parity
from tests.support.paged_sequences import PagedSequence, PagedSequences
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh

family = next(f for f in parity.FAMILIES if f.name == sys.argv[1])
folder = parity.checkpoint_folder(family)
tokens, expected = parity.prompt(40), parity.reference_run(family, 40)[0]
for size in (2, 3):  # 4 heads: on 3 devices each has all
    mesh = make_mesh(size)
    model = load_model(VllmConfig(ModelConfig(folder, HFConfig.from_folder(folder))), mesh)
    weight = model.model.layers[1].self_attn.kv_b_proj.weight[...]
    assert weight.addressable_shards[0].data.size == weight.size // (1 if size == 3 else size)
    paged = PagedSequences(model, mesh=mesh)
    assert all(cache.array.sharding.is_fully_replicated for cache in paged.caches)
    assert paged.caches[0].array.shape[-1] == 48
    sequence = PagedSequence()
    rows = [paged.step([(sequence, part)], pad_tokens=24, pad_requests=3)[0] for part in (tokens[:21], tokens[21:])]
    error = parity.relative_error(np.concatenate(rows), expected)
    assert error < 1e-4, (size, error)
"""


@pytest.mark.multi_device
@pytest.mark.slow
@pytest.mark.parametrize("family", ["DeepSeek V3", "GLM-5.2"])
def test_every_number_of_devices_gives_transformers_logits(family):
    run_on_devices("-c", SCRIPT, family)
