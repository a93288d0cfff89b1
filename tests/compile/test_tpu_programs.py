"""The programs of real layers, compiled for TPUs that are not there: they fit, copy nothing large, exchange little.

Each family of docs/models.md has two layers of its published sizes, which say nearly all that a whole model's do. These
are tests of performance that need no accelerator: they fail when a change makes a program read or move more.
"""

from __future__ import annotations

import pytest

from tests.support.compiled_steps import (
    FAMILIES,
    OTHER_BYTES,
    assert_exchanges_twice_a_layer,
    assert_needs_little_memory,
    assert_updates_caches_in_place,
    bytes_without_attention,
    compiler,
    forward,
)

pytestmark = pytest.mark.compile_tpu

TOKENS = (1, 64, 512)


def check_forward(name: str, target: str, num_tokens: int) -> None:
    steps, program = compiler(name, target), forward(name, target, num_tokens)
    assert_updates_caches_in_place(steps, program)
    assert_needs_little_memory(program, num_tokens)
    assert_exchanges_twice_a_layer(program, steps, num_tokens)


def check_decode(name: str, target: str, quantization: str | None = None) -> None:
    steps, program = compiler(name, target, quantization), forward(name, target, 1, quantization)
    assert bytes_without_attention(program) <= 1.05 * steps.reads.of_step(1) + OTHER_BYTES


def check_sampler(name: str, target: str, num_tokens: int) -> None:
    """Each device multiplies its part of the vocabulary, and only logits are exchanged."""
    steps = compiler(name, target)
    program = steps.sampler(num_tokens)
    logits_bytes = 4 * steps.runner.num_sequences(num_tokens) * steps.runner.vocab_size
    assert sum(each.nbytes for each in program.text.collectives) <= 1.1 * logits_bytes + OTHER_BYTES
    assert program.text.hbm_bytes <= 1.05 * steps.reads.head + 12 * logits_bytes + OTHER_BYTES


@pytest.mark.parametrize("target", ["v6e-1", "v6e-4"])
def test_the_programs_of_a_small_model(target):
    check_forward("qwen3-0.6b", target, 64)
    check_decode("qwen3-0.6b", target)
    check_sampler("qwen3-0.6b", target, 64)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("target", ["v6e-1", "v6e-8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_copies_nothing_large_and_exchanges_little(name, target, num_tokens):
    check_forward(name, target, num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v6e-1", "v6e-8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_decode_reads_the_weights_that_it_needs_once(name, target):
    check_decode(name, target)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3-8b", "mixtral-8x7b"])
def test_a_decode_reads_narrow_weights_narrow(name, quantization):
    check_decode(name, "v6e-1", quantization)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("target", ["v6e-1", "v6e-8"])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "command-r", "gemma-2-9b", "llama-3.1-8b"])
def test_a_sampler_exchanges_logits_and_not_the_head(name, target, num_tokens):
    check_sampler(name, target, num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e-1", "v5p:2x2", "tpu7x-8"])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-1b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_other_tpus_compile_too(name, target):
    """One model of each kind of attention: key-value heads of 128, 256 and 64, and latents."""
    check_forward(name, target, 64)
