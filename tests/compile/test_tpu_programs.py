"""The programs of real layers, compiled for TPUs that are not there: they fit, copy nothing large, exchange little.

Each family of docs/models.md has two layers of its published sizes, which say nearly all that a whole model's do. These
are tests of performance that need no accelerator: they fail when a change makes a program read or move more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.compilation.abstract_runner import target_mesh
from jaxis.compilation.compiled_program import read_program
from jaxis.compilation.targets import parse_target
from jaxis.engine.execution.sampling_batch import SamplerFeatures
from jaxis.errors import ConfigError
from jaxis.parallel.mesh import DATA_AXIS
from jaxis.training.sharding import DevicePart, whole
from tests.support.compiled_steps import (
    FAMILIES,
    OTHER_BYTES,
    assert_exchanges_only_sums,
    assert_exchanges_twice_a_layer,
    assert_needs_little_memory,
    assert_updates_caches_in_place,
    bytes_without_attention,
    compiler,
    forward,
)

pytestmark = pytest.mark.compile_tpu

TOKENS = (1, 64, 512)
# The most chips, 1, 4 or 8, that can share the heads of the families that 8 cannot.
FEWER_CHIPS = {"gemma-3-1b": "v6e-4", "phi-4": None, "qwen2.5-7b": "v6e-4"}
of_every_family = pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name in FAMILIES for target in ("v6e-1", FEWER_CHIPS.get(name, "v6e-8")) if target is not None],
)


def check_forward(name: str, target: str, num_tokens: int) -> None:
    steps, program = compiler(name, target), forward(name, target, num_tokens)
    assert_updates_caches_in_place(steps, program)
    assert_needs_little_memory(program, num_tokens)
    assert_exchanges_twice_a_layer(program, steps, num_tokens)


def check_decode(name: str, target: str, quantization: str | None = None) -> None:
    steps, program = compiler(name, target, quantization), forward(name, target, 1, quantization)
    assert bytes_without_attention(program) <= 1.05 * steps.reads.of_step(1) + OTHER_BYTES


def check_sampler(name: str, target: str, num_tokens: int) -> None:
    """Each device multiplies its part of the vocabulary, and sends its rows' most likely tokens."""
    steps = compiler(name, target)
    program = steps.sampler(num_tokens)
    num_sequences = steps.runner.num_sequences(num_tokens)
    assert sum(each.nbytes for each in program.text.collectives) <= 2 * 8 * steps.num_devices * num_sequences
    logits_bytes = 4 * num_sequences * steps.runner.vocab_size // steps.num_devices
    assert program.text.hbm_bytes <= 1.05 * steps.reads.head + 12 * logits_bytes + OTHER_BYTES


def check_random_sampler(name: str, target: str, num_tokens: int) -> None:
    """Each device multiplies its part of the vocabulary, and only logits are exchanged."""
    steps = compiler(name, target)
    program = read_program(steps.runner.sampler(num_tokens, SamplerFeatures(greedy_only=False)).compile())
    logits_bytes = 4 * steps.runner.num_sequences(num_tokens) * steps.runner.vocab_size
    assert sum(each.nbytes for each in program.text.collectives) <= 1.1 * logits_bytes + OTHER_BYTES
    assert program.text.hbm_bytes <= 1.05 * steps.reads.head + 12 * logits_bytes + OTHER_BYTES


@pytest.mark.parametrize("target", ["v6e-1", "v6e-4"])
def test_the_programs_of_a_small_model(target):
    check_forward("qwen3-0.6b", target, 64)
    check_decode("qwen3-0.6b", target)
    check_sampler("qwen3-0.6b", target, 64)


def test_a_small_cache_stays_in_memory():
    """Heads of 64 elements on 8 chips: a layer's cache would fit into VMEM, where XLA would copy it to and back."""
    check_forward("llama-3.2-1b", "v6e-8", 1)
    check_decode("llama-3.2-1b", "v6e-8")


def test_devices_exchange_no_keys_or_values_of_heads_that_they_share():
    """2 key-value heads on 8 chips, and gates and ups in one matrix."""
    check_forward("glm-4-9b-0414", "v6e-8", 64)
    assert_exchanges_only_sums(forward("glm-4-9b-0414", "v6e-8", 64))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize(
    ("name", "target"), [("qwen3-30b-a3b", "v6e-8"), ("starcoder2-3b", "v6e-8"), ("gemma-3-1b", "v6e-4")]
)
def test_fewer_key_value_heads_than_chips(name, target, num_tokens):
    check_forward(name, target, num_tokens)
    assert_exchanges_only_sums(forward(name, target, num_tokens))


@pytest.mark.parametrize(("name", "num_heads"), [("qwen2.5-7b", 28), ("gemma-3-1b", 4)])
def test_heads_that_chips_cannot_share_are_one_clear_error(name, num_heads):
    message = f"tensor_parallel_size=8 does not divide the model's {num_heads} attention heads: give 1, 2 or 4"
    with pytest.raises(ConfigError, match=f"^{message}"):
        compiler(name, "v6e-8")


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", TOKENS)
@of_every_family
def test_a_step_copies_nothing_large_and_exchanges_little(name, target, num_tokens):
    check_forward(name, target, num_tokens)


@pytest.mark.slow
@of_every_family
def test_a_decode_reads_the_weights_that_it_needs_once(name, target):
    check_decode(name, target)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_decode_of_a_small_model_reads_quantized_weights_as_they_are_stored(quantization):
    """And a row of a table of bytes, not the table."""
    check_decode("qwen3-0.6b", "v5e-1", quantization)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantization", "target"),
    [
        ("qwen3-8b", "int8", "v6e-1"),
        ("qwen3-8b", "int4", "v5e-1"),
        ("mixtral-8x7b", "int8", "v5e-4"),
        ("mixtral-8x7b", "int4", "v6e-8"),
        # 2,880 features in groups of 32 have no equal parts of whole groups on 8 chips.
        ("gpt-oss-120b", "int8", "v6e-8"),
        ("gpt-oss-120b", "int4", "v6e-4"),
        ("gpt-oss-120b", "stored", "v6e-4"),
        ("deepseek-v3", "int8", "v6e-32"),
        ("deepseek-v3", "int4", "v6e-16"),
        # Each chip's 32 features are a quarter of a block.
        ("deepseek-v3", "stored", "v5e-64"),
    ],
)
def test_a_decode_reads_quantized_weights_as_they_are_stored(name, quantization, target):
    check_decode(name, target, quantization)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("target", ["v6e-1", "v6e-8"])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "command-r", "gemma-2-9b", "llama-3.1-8b"])
def test_a_sampler_exchanges_tokens_or_logits_and_not_the_head(name, target, num_tokens):
    check_sampler(name, target, num_tokens)
    check_random_sampler(name, target, num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e-1", "v5p:2x2", "tpu7x-8"])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-1b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_other_tpus_compile_too(name, target):
    """One model of each kind of attention: key-value heads of 128, 256 and 64, and latents."""
    check_forward(name, target, 64)


def test_gradients_of_gathered_weights_are_scattered():
    """Each device is sent its part of a sum alone, not the whole."""
    devices = parse_target("v5e-16").devices()
    mesh = target_mesh(devices, len(devices))

    def gradient(part: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda shard: jnp.sum(jnp.square(x @ whole(shard))))(DevicePart(part, 0)).part

    summed = jax.shard_map(
        gradient, mesh=mesh, in_specs=PartitionSpec(DATA_AXIS), out_specs=PartitionSpec(DATA_AXIS), check_vma=False
    )
    divided = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    shapes = [(4096, 12288), (512 * len(devices), 4096)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=divided) for shape in shapes]
    with jax.set_mesh(mesh):
        program = read_program(jax.jit(summed).lower(*arrays).compile())
    opcodes = {each.opcode for each in program.text.collectives}
    assert "reduce-scatter" in opcodes
    assert "all-reduce" not in opcodes
