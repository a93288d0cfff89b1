"""The programs of real layers, compiled for GPUs that are not there; see test_tpu_programs.py.

A process compiles for one kind of GPU: `--gpu-target` says which. How many bytes a program moves through HBM its text
does not tell, since the caches of a GPU hold what a TPU's compiler places by itself.
"""

from __future__ import annotations

import pytest

from tests.support.compiled_steps import (
    FAMILIES,
    OTHER_BYTES,
    assert_copies_no_weight,
    assert_exchanges_twice_a_layer,
    assert_needs_little_memory,
    assert_updates_caches_in_place,
    compiler,
    forward,
)

pytestmark = pytest.mark.compile_gpu

# One of each kind of attention and of feed-forward: heads of 128, 256 and 64, latents, experts.
MODELS = ("qwen3-0.6b", "llama-3.1-8b", "gemma-2-9b", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite")
# 8 devices do not divide the heads of these.
NOT_ON_EIGHT = ("gemma-3-1b", "phi-4", "qwen2.5-7b")
# One device does not hold this model, nor the partial sums of its 128 heads in little memory.
NOT_ON_ONE = ("deepseek-v3",)


def check_forward(name: str, target: str, num_tokens: int) -> None:
    steps, program = compiler(name, target), forward(name, target, num_tokens)
    assert_updates_caches_in_place(steps, program)
    assert_needs_little_memory(program, num_tokens)
    assert_copies_no_weight(program, num_tokens)
    # A GPU's host reads the condition of a loop after each iteration.
    assert program.text.num_loops == 0


def check_exchanges(name: str, target: str, num_tokens: int) -> None:
    assert_exchanges_twice_a_layer(forward(name, target, num_tokens), compiler(name, target), num_tokens)


def test_the_programs_of_a_small_model(gpu_target):
    check_forward("qwen3-0.6b", gpu_target, 64)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 64, 512])
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [(name, 1) for name in FAMILIES if name not in NOT_ON_ONE]
    + [(name, 8) for name in FAMILIES if name not in NOT_ON_EIGHT],
)
def test_a_step_of_every_family_copies_no_cache_and_no_weight(gpu_target, name, num_devices, num_tokens):
    check_forward(name, f"{gpu_target}x{num_devices}", num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 64, 512])
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_copies_nothing_large_and_exchanges_little(gpu_target, name, num_devices, num_tokens):
    check_forward(name, f"{gpu_target}x{num_devices}", num_tokens)
    check_exchanges(name, f"{gpu_target}x{num_devices}", num_tokens)


@pytest.mark.slow
def test_a_sampler_exchanges_logits_and_not_the_head(gpu_target):
    steps = compiler("qwen3-0.6b", f"{gpu_target}x4")
    logits_bytes = 4 * steps.runner.num_sequences(64) * steps.runner.vocab_size
    exchanged = sum(each.nbytes for each in steps.sampler(64).text.collectives)
    assert exchanged <= 1.1 * logits_bytes + OTHER_BYTES
