"""The device mesh: where tensors go, and that several devices give what one gives."""

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxis.errors import ConfigError
from jaxis.parallel.mesh import MESH_AXES, data_spec, logical_sharding, make_mesh, padded_shape
from tests.support.simulated_devices import run_on_devices


def test_one_device_makes_a_mesh_of_two_axes():
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    assert mesh.devices.flat[0] == jax.local_devices()[0]


@pytest.mark.parametrize("size", [0, -1, 1000])
def test_a_size_without_that_many_devices_is_refused(size):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size} needs that many cpu devices; \d+ found"):
        make_mesh(size)


class TestLogicalSharding:
    @staticmethod
    def spec(axes, shape, data=1):
        return logical_sharding(AbstractMesh((data, 4), MESH_AXES), axes, shape).spec

    def test_heads_features_and_vocabulary_are_split(self):
        for axis in ("heads", "kv_heads", "mlp", "vocab"):
            assert self.spec((axis, "embed"), (8, 6)) == P("model", None)
        assert self.spec(("embed", "mlp"), (6, 8)) == P(None, "model")

    def test_an_axis_that_does_not_divide_stays_whole(self):
        assert self.spec(("vocab", "embed"), (131, 64)) == P(None, None)
        assert self.spec(("kv_heads", "embed"), (2, 64)) == P(None, None)

    def test_tables_and_heads_are_padded_to_what_devices_divide(self):
        mesh = AbstractMesh((2, 4), MESH_AXES)
        assert padded_shape(mesh, ("vocab", "embed"), (131, 64)) == (132, 64)
        assert padded_shape(mesh, ("vocab", "embed"), (132, 64)) == (132, 64)
        assert padded_shape(mesh, ("kv_heads", "embed"), (2, 64)) == (2, 64)
        assert padded_shape(mesh, ("vocab",), (131,)) == (131,), "a bias"
        assert padded_shape(AbstractMesh((2, 1), MESH_AXES), ("vocab", "embed"), (131, 64)) == (131, 64)

    def test_whole_experts_lie_on_the_devices_of_both_axes_or_of_one(self):
        axes = ("spread_expert", "mlp", "embed")
        assert self.spec(axes, (8, 8, 8), data=2) == P(("data", "model"), None, None)
        # On four devices of each rank, which then have the same ones; on the two ranks; on none.
        assert self.spec(axes, (12, 8, 8), data=2) == P("model", None, None)
        assert self.spec(axes, (6, 8, 8), data=2) == P("data", "model", None)
        assert self.spec(axes, (5, 8, 8), data=2) == P(None, "model", None)

    def test_a_region_manual_over_data_is_told_of_that_axis_alone(self):
        mesh = AbstractMesh((2, 4), MESH_AXES)
        assert data_spec(logical_sharding(mesh, ("spread_expert", None), (8, 8))) == P("data", None)
        assert data_spec(logical_sharding(mesh, ("mlp", "embed"), (8, 8))) == P(None, None)

    def test_unnamed_axes_stay_whole(self):
        assert self.spec((None, "heads", None), (8, 8, 8)) == P(None, "model", None)
        assert self.spec(None, (8, 8)) == P(None, None)


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

parity.SIZES.update(num_attention_heads=8)  # 2 kv heads, a vocabulary of 131
family = next(f for f in parity.FAMILIES if f.name == sys.argv[1])
folder = parity.checkpoint_folder(family)
tokens, expected = parity.prompt(40), parity.reference_run(family, 40)[0]
assert len(jax.devices()) == 8
for size in map(int, sys.argv[2:]):
    mesh = make_mesh(size)
    model = load_model(VllmConfig(ModelConfig(folder, HFConfig.from_folder(folder))), mesh)
    layer = model.model.layers[0]
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        assert len(weight[...].sharding.device_set) == size
        assert weight[...].addressable_shards[0].data.size == weight[...].size // size
    attention = layer.self_attn
    if attention.qkv_proj is None:  # one head, whole, or all of a device's
        [rows] = {shard.data.shape[0] for shard in attention.k_proj.weight[...].addressable_shards}
        assert rows == attention.head_dim * max(attention.num_kv_heads // size, 1)
    if model.lm_head is not None:  # padded to what the devices divide
        [rows] = {shard.data.shape[0] for shard in model.lm_head.weight[...].addressable_shards}
        assert rows == -(-131 // size)
    paged = PagedSequences(model, mesh=mesh)
    assert jax.tree.leaves(paged.caches[0])[0].addressable_shards[0].data.shape[2] == 2 * max(2, size) // size
    first, second = PagedSequence(), PagedSequence()
    rows = [paged.step([(first, tokens[:19])], pad_tokens=24, pad_requests=3)[0]]
    rows.append(paged.step([(first, tokens[19:20]), (second, tokens[:16])], pad_tokens=24, pad_requests=3)[0])
    forked = paged.fork(second, 16)
    rows.append(paged.step([(first, tokens[20:]), (second, [3]), (forked, [4])], pad_tokens=24, pad_requests=3)[0])
    assert len(jax.tree.leaves(paged.caches[0])[0].sharding.device_set) == size
    error = parity.relative_error(np.concatenate(rows), expected)
    assert error < 1e-4, (size, error)
"""


# Biases; packed projections of the feed-forward block, and of attention too; norms of all heads together, and of each.
SLOW_FAMILIES = ["Llama, biases", "GLM-4-0414", "Phi-4", "OLMo 2", "Command R+, norms on heads"]


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Qwen3, tied", "8"),
        *(pytest.param(name, "2 8", marks=pytest.mark.slow) for name in ["Qwen3, tied", *SLOW_FAMILIES]),
    ],
)
def test_every_number_of_devices_gives_transformers_logits(family, sizes):
    """Two kv heads on one device each, and on four that share one."""
    run_on_devices("-c", SCRIPT, family, *sizes.split(), num_devices=8)
