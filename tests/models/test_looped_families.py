"""Families that run layers several times: what parity with the references does not show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis import LLM
from jaxis.bench.cost import prefill_cost
from jaxis.bringup.analyze.source import ModelSource
from jaxis.calibration.calibrate import calibrate
from jaxis.compilation.targets import parse_target
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.model_loader import construct_abstractly
from jaxis.parallel.stages import Stage
from jaxis.planning.plan import Planner, Wanted
from jaxis.quantization.arguments import parse_quantization
from tests.support import parity
from tests.support.parity import FAMILIES
from tests.support.tiny_checkpoints import write_tokenizer


@pytest.fixture(scope="module")
def hrm() -> str:
    return parity.checkpoint_folder(next(f for f in FAMILIES if f.name == "HRM-Text"))


def test_a_step_reads_weights_and_caches_of_layers_as_often_as_they_run(hrm):
    """Reads of HRM-Text, of whose two layers one runs 6 times and the other twice."""
    path = Path(hrm, "config.json")
    source = ModelSource("hrm", str(path), json.loads(path.read_text()), None, "config.json alone")
    part = Planner(source, Wanted(quantization="none")).device_model(parse_target("h100x1"))
    layers = {"lower": 6, "upper": 2}
    weights, start, head = 5 * 32 * 2 * 24 + 3 * 32 * 96, 32, 131 * 32
    assert part.held_bytes == 4 * (len(layers) * weights + start + 2 * head)
    assert part.decode(1, 1).weight_bytes == 4 * (sum(layers.values()) * weights + start + head)
    assert part.decode(1, 10).context_bytes == 4 * 10 * sum(layers.values()) * 2 * 2 * 24
    config = ModelConfig(hrm, HFConfig.from_folder(hrm), dtype=jnp.float32, max_model_len=64)
    assert prefill_cost(VllmConfig(config)).layer_params == sum(layers.values()) * weights


def test_layers_that_run_again_are_in_one_pipeline_stage(hrm):
    config = ModelConfig(hrm, HFConfig.from_folder(hrm), dtype=jnp.float32, max_model_len=64)
    with pytest.raises(ConfigError, match="be divided into stages, since its layers run several times in a step"):
        construct_abstractly(VllmConfig(config), stage=Stage(0, 2))


def test_layers_that_run_again_are_not_calibrated(hrm, tmp_path):
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(hrm, folder)
    write_tokenizer(folder)
    text.write_text("some text " * 1000)
    with pytest.raises(ConfigError, match="no DecoderModel whose layers calibration could run once, one by one"):
        calibrate(folder, text, parse_quantization("int8"), num_tokens=2048)


def test_dory_keeps_keys_and_values_of_each_loop_whatever_its_config_says():
    """With those of the last loop alone, logits of a prompt would depend on its chunks."""
    folder = parity.checkpoint_folder(next(f for f in FAMILIES if f.name == "Dory"))
    with pytest.raises(ConfigError, match="recurrent_kv_cache_mode='last_loop'"):
        LLM(folder, hf_overrides={"recurrent_kv_cache_mode": "last_loop"})


def test_adapters_of_dory_s_head_are_refused():
    """PEFT adds after the scale of the logits."""
    folder = parity.checkpoint_folder(next(f for f in FAMILIES if f.name == "Dory"))
    with pytest.raises(ConfigError, match="no layer that requests can change has a name that ends in 'lm_head'"):
        LLM(folder, enable_lora=True, lora_target_modules=["lm_head"], kv_cache_memory="1MiB", max_model_len=64)


@pytest.mark.parametrize("size", [1, 7])
def test_the_gate_s_logits_do_not_depend_on_the_number_of_tokens(size):
    family = next(f for f in FAMILIES if f.name == "IQuest-Coder Loop")
    gate = parity.loaded_model(family).decoder.layers[0].self_attn.loop_gate
    q = np.random.default_rng(1).standard_normal((1001, *gate.weight.shape)).astype(np.float32)
    together = np.asarray(jax.jit(gate)(q))
    weight, bias = (np.asarray(each[...], np.float64) for each in (gate.weight, gate.bias))
    expected = np.einsum("thd,hd->th", q.astype(np.float64), weight) + bias
    np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-6)
    for i in range(0, 70, size):
        np.testing.assert_array_equal(jax.jit(gate)(q[i : i + size]), together[i : i + size])
