"""Sizes against what transformers counts, what quantization makes, and plain arithmetic."""

import dataclasses

import numpy as np
import pytest

from jaxis.bringup.analyze.analysis import analyze
from jaxis.config import ModelConfig, SchedulerConfig, VllmConfig
from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.kv_cache import num_cache_blocks
from jaxis.engine.memory_account import MemoryAccount, MemoryPlace
from jaxis.errors import EngineError
from jaxis.kernels.weights import WeightScheme, quantize
from jaxis.loading.checkpoint import Checkpoint
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization_rules import SHORT_NAMES

WINDOW = AttentionSpan(8)
PER_BLOCK = {FULL_CONTEXT: 100, WINDOW: 1000}
CONFIG = VllmConfig(ModelConfig("", HFConfig({}), max_model_len=500), scheduler_config=SchedulerConfig(1, 64))


def test_parameters_are_those_that_transformers_counts(checkpoint):
    from transformers import AutoModelForCausalLM

    for family in ("llama", "qwen2"):
        reference = AutoModelForCausalLM.from_pretrained(checkpoint(family))
        counts = analyze(checkpoint(family)).sizes.parameters
        assert counts.total == reference.num_parameters()
        assert counts.embedding == reference.get_input_embeddings().weight.numel()
        assert counts.active == reference.num_parameters() - counts.embedding


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_weights_have_the_bytes_that_quantizing_gives(checkpoint, name):
    fits = {fit.weights: fit.weight_bytes for fit in analyze(checkpoint()).sizes.fits}
    rules = RuleQuantizationConfig(SHORT_NAMES[name], must_match=False)
    expected = wide = 0
    with Checkpoint(checkpoint()) as weights:
        for tensor_name in weights.names():
            tensor = np.asarray(weights.tensor(tensor_name))
            wide += 4 * tensor.size
            if tensor.ndim == 2:
                rule = rules.find(tensor_name.removesuffix(".weight"))
                expected += quantize(
                    tensor, WeightScheme(rule.weight_qtype, rule.tile_size, rule.weight_calibration_method)
                ).nbytes
            else:
                expected += 4 * tensor.size
    assert fits[name] == expected
    assert fits["float32"] == wide


@pytest.mark.parametrize("free", [0, 99, 1_101, 16_000, 1_000_000])
def test_a_context_fits_as_far_as_the_engines_caches_hold_it(free):
    account = MemoryAccount(CONFIG, [MemoryPlace(5000, (PER_BLOCK, 0))])
    cache = dataclasses.replace(CONFIG.cache_config, kv_cache_memory_bytes=free)
    try:
        _, expected = num_cache_blocks(dataclasses.replace(CONFIG, cache_config=cache), PER_BLOCK, make_mesh())
    except EngineError:  # no room for a block
        expected = 0
    assert account.longest_context(5000 + free) == expected


def test_a_given_memory_is_asked_about(checkpoint):
    small, large = (analyze(checkpoint(), memory=memory) for memory in ("1K", "1G"))
    assert (small.sizes.memory_name, small.sizes.memory_bytes, small.fits) == ("given", 1024, False)
    assert large.fits
    assert small.can_run
