"""A cache of latents whose tokens several devices share: the same attention, in a part of the memory."""

import pytest

from jaxis import LLM
from jaxis.errors import ConfigError
from tests.support import parity
from tests.support.simulated_devices import run_on_devices

KERNEL = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxis.kernels.latent_attention import context_parallel, layout
from jaxis.parallel.mesh import make_mesh
from tests.support.attention_steps import BFLOAT16, MIX, paged
from tests.support.latent_steps import SCALE, Operands, cached, expected, make_latent_step

VALUE_DIM = 32
STEPS = [MIX, [(20, 1)], [(0, 1)], [(127, 1)], [(9, 1), (8, 0), (7, 0)], [(0, 17), (0, 16)]]
for num_devices in (2, 4):
    mesh = make_mesh(num_devices)
    for requests in STEPS if num_devices == 2 else STEPS[:1]:
        for dtype in (np.float32, BFLOAT16, np.int8) if requests is MIX else (np.float32,):
            step = make_latent_step(requests, block_size=8, pad_tokens=11, pad_requests=3)
            q, entries, cache, *others = map(jnp.asarray, Operands.of(step, VALUE_DIM, dtype).all)
            cache = paged(jax.device_put(cache, NamedSharding(mesh, PartitionSpec(None, "model"))))
            attend = jax.jit(functools.partial(context_parallel.latent_attention, value_dim=VALUE_DIM, scale=SCALE))
            with jax.set_mesh(mesh):
                cache, out = attend(q, entries, cache, *others)
            cache = cache.array
            assert cache.addressable_shards[0].data.shape[1] == 8 // num_devices
            assert np.isfinite(out).all()
            atol = 2e-2 if dtype == BFLOAT16 else 2e-5
            np.testing.assert_allclose(out[: step.num_tokens], expected(step, VALUE_DIM, dtype), rtol=0, atol=atol)
            decoded = [
                np.asarray(layout.decode(jnp.asarray(x), VALUE_DIM)).astype(np.float32)
                for x in (np.asarray(cache), cached(step.kv_cache, VALUE_DIM, dtype))
            ]
            np.testing.assert_allclose(*decoded, rtol=1e-6)
"""

ENGINE = """
import sys
import numpy as np
from jaxis import LLM, SamplingParams
from tests.support import parity

family, num_devices, cache_dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
family = next(f for f in parity.FAMILIES if f.name == family)
folder, prompt = parity.checkpoint_folder(family), parity.prompt(60)
prompts = [prompt, prompt[:40] + prompt[:9], prompt[:1], prompt[7:30]]
params = [SamplingParams(temperature=t, seed=3, max_tokens=12) for t in (0.0, 0.0, 0.8, 0.0)]
results = []
for size in (1, num_devices):
    with LLM(
        folder, max_num_batched_tokens=32, max_num_seqs=4, block_size=8, kv_cache_dtype=cache_dtype,
        kv_cache_memory=1 << 20, tensor_parallel_size=size, decode_context_parallel_size=size, show_progress=False,
    ) as llm:
        runner = llm.engine.runner
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        again = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert tokens == again and llm.engine.scheduler.block_manager.prefix_cache_hits > 0
        results.append((tokens, llm.compute_logits(prompt), next(iter(runner.kv_bytes_per_block.values()))))
        caches = [cache.array for cache in runner.executor.state.caches if not isinstance(cache, tuple)]
        assert all(cache.addressable_shards[0].data.size * size == cache.size for cache in caches)
(tokens, logits, block_bytes), (divided_tokens, divided_logits, divided_block_bytes) = results
# On one device, the native kernels' caches have other shapes, but the same bytes.
assert divided_block_bytes == block_bytes, (divided_block_bytes, block_bytes)
error = np.abs(divided_logits - logits).max() / np.abs(logits).max()
assert error < (1e-4 if cache_dtype == "auto" else 2e-3), error
assert divided_tokens == tokens
if cache_dtype == "auto":
    expected = parity.reference_run(family, 60)[0]
    assert parity.relative_error(divided_logits, expected) < 1e-4
print("error", error)
"""


@pytest.mark.slow
@pytest.mark.multi_device
def test_parts_of_the_context_add_up_to_dense_attention():
    run_on_devices("-c", KERNEL)


@pytest.mark.multi_device
@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("num_devices", ["2", "4"])
@pytest.mark.parametrize("family", ["DeepSeek V3", "Kimi Linear"])
def test_devices_that_share_the_context_give_the_tokens_of_one(family, num_devices, cache_dtype):
    run_on_devices("-c", ENGINE, family, num_devices, cache_dtype)


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("Qwen3", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "which this model does not have"),
        ("DeepSeek V3", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "1 or tensor_parallel_size=4"),
        (
            "DeepSeek V3",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 1},
            "does not divide block_size=1",
        ),
    ],
)
def test_what_cannot_share_the_context_is_refused(family, arguments, message):
    folder = parity.checkpoint_folder(next(f for f in parity.FAMILIES if f.name == family))
    with pytest.raises(ConfigError, match=message):
        LLM(folder, show_progress=False, **arguments)
