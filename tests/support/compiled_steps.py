"""Steps of published models' real layers, compiled for a machine, and what is asked of every such program."""

from __future__ import annotations

import functools

from jaxis.compilation.compiled_program import CompiledProgram
from jaxis.compilation.step_costs import StepCompiler
from jaxis.compilation.targets import parse_target
from tests.support.cut_models import NUM_LAYERS, cut_model

MIB = 1 << 20
# A program's own buffers: activations, of which the widest are logits and experts' rows.
TEMPORARY_BYTES = 64 * MIB
TEMPORARY_BYTES_PER_TOKEN = MIB
# Of what is moved beside weights: activations, block tables, constants.
OTHER_BYTES = 2 * MIB
# Of a token's activations: the widest are queries, and the halves of feed-forwards.
COPIED_BYTES_PER_TOKEN = MIB // 16
# What is exchanged beside hidden states, such as the routers' choices.
SMALL_EXCHANGE = MIB // 4
# Of a token's numbers that devices sum: the squares of norms over all heads.
SUMMED_NUMBERS_BYTES = 16

FAMILIES = (
    "command-r",
    "command-r7b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gemma-2-9b",
    "gemma-3-1b",
    "glm-4-9b-0414",
    "glm-4.5",
    "gpt-oss-20b",
    "granite-3.3-8b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "llama-4-scout",
    "mistral-7b",
    "mixtral-8x7b",
    "olmo-2-7b",
    "olmo-3-7b",
    "phi-4",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "starcoder2-3b",
)
"""One or more of each family of docs/models.md, by their configs' names."""


@functools.cache
def compiler(name: str, target: str, quantization: str | None = None) -> StepCompiler:
    """The compiler of a cut model's programs, for all devices of a target."""
    devices = parse_target(target).devices()
    return StepCompiler(cut_model(name, len(devices), quantization=quantization), devices)


@functools.lru_cache(maxsize=4)
def forward(name: str, target: str, num_tokens: int, quantization: str | None = None) -> CompiledProgram:
    return compiler(name, target, quantization).forward(num_tokens)


def assert_updates_caches_in_place(steps: StepCompiler, program: CompiledProgram) -> None:
    """The caches are not copied, neither as a whole nor one layer's at a time."""
    assert program.memory.aliased >= sum(steps.cache_bytes)
    large = [copy for copy in program.text.copies if copy.nbytes >= min(steps.cache_bytes) // 2]
    assert large == []


def assert_needs_little_memory(program: CompiledProgram, num_tokens: int) -> None:
    assert program.memory.temporaries <= TEMPORARY_BYTES + num_tokens * TEMPORARY_BYTES_PER_TOKEN


def assert_copies_no_weight(program: CompiledProgram, num_tokens: int) -> None:
    """Nothing is copied, nor concatenated with others, but what is no larger than activations."""
    bound = OTHER_BYTES + num_tokens * COPIED_BYTES_PER_TOKEN
    assert [copy for copy in program.text.copies if copy.nbytes > bound] == []


def assert_exchanges_twice_a_layer(program: CompiledProgram, steps: StepCompiler, num_tokens: int) -> None:
    """The sums of attention and of feed-forward, and one of the embeddings; a family may do with fewer.

    Embeddings that the devices cannot divide are whole on each, and parallel blocks are summed together.
    """
    if steps.num_devices == 1:
        assert program.text.collectives == []
        return
    small = {"all-reduce": num_tokens * SUMMED_NUMBERS_BYTES}
    large = [each for each in program.text.collectives if each.nbytes > small.get(each.opcode, SMALL_EXCHANGE)]
    sums = [each for each in large if each.nbytes <= 4 * num_tokens * steps.runner.hidden_size and not each.is_in_loop]
    assert {each.opcode for each in large} == {"all-reduce"}
    assert NUM_LAYERS <= len(sums) <= 2 * NUM_LAYERS + 1
    assert len(large) == len(sums)


def assert_exchanges_only_sums(program: CompiledProgram) -> None:
    """No keys, values or parts of activations, however small, go from one device to another."""
    assert {each.opcode for each in program.text.collectives} <= {"all-reduce"}


def bytes_without_attention(program: CompiledProgram) -> int:
    """HBM bytes of everything but attention: of XLA's instructions, and of kernels of products by their own account.

    What attention reads depends on the lengths of sequences; its kernels have the pages of the cache in their names.
    """
    kernels = [each for each in program.text.kernels if "page" not in each.name]
    assert all(each.nbytes is not None for each in kernels), kernels
    return program.text.hbm_bytes + program.text.loop_hbm_bytes + sum(each.nbytes or 0 for each in kernels)
