"""Features that jaxis lacks inside vLLM are refused by name, by the configuration or for a single request."""

import os
import shutil

import pytest

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")

import transformers
import vllm.version
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.core.sched.output import SchedulerOutput

from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import ConfigError, EngineError
from jaxis.integrations.vllm import contract
from jaxis.integrations.vllm.config_checks import engine_arguments
from jaxis.integrations.vllm.model_runner import ModelRunner
from jaxis.integrations.vllm.platform import JaxisPlatform
from tests.support.places import TESTS

# vLLM wants the code that Ling brings, and transformers 5.19 cannot read the other three.
REFUSED_CONFIGS = {
    *("ling-3.0-flash", "ling-3.0-tiny"),
    *("internlm2.5-7b", "north-mini-code", "step-3.7-flash"),
}


def make_config(model=EMBEDDED_MODEL, **arguments):
    load_general_plugins()
    return EngineArgs(str(model), **arguments).create_engine_config()


def test_the_platform_is_jaxis_and_this_vllm_is_known():
    assert type(current_platform) is JaxisPlatform
    contract.check_version()
    contract.check_contract()


def test_another_version_and_other_fields_are_named(monkeypatch):
    monkeypatch.setattr(vllm.version, "__version_tuple__", (0, 99, 1))
    with pytest.raises(ConfigError, match=r"inside vLLM 0\.31\.x, 0\.32\.x, 0\.33\.x, and vLLM .* is installed"):
        contract.check_version()
    monkeypatch.setattr(contract, "STEP_OTHER", contract.STEP_OTHER[1:])
    monkeypatch.setattr(contract, "GRAMMAR_READ", (*contract.GRAMMAR_READ, "gone"))
    monkeypatch.setattr(contract, "WORKER_METHODS", ("another_method",))
    with pytest.raises(ConfigError) as caught:
        contract.check_contract()
    assert "SchedulerOutput has has_structured_output_requests; " in str(caught.value)
    assert "GrammarOutput lacks gone; " in str(caught.value)
    assert "WorkerBase lacks another_method" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2 is not supported, only 1"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not supported"),
        ({"max_logprobs": 50}, "max_logprobs=50 is not supported: give at most 20"),
        ({"load_format": "sharded_state"}, "load_format='sharded_state' is not supported"),
        ({"additional_config": {"jaxis": {"max_num_seqs": 3}}}, "must be a dict of dtype, quantization"),
        ({"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
         "speculative_config: method='ngram_gpu' is not supported inside vLLM, only 'ngram'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3,
                                 "num_speculative_tokens_per_batch_size": [[1, 8, 2]]}},
         "speculative_config: num_speculative_tokens_per_batch_size=.* is not supported"),
        ({"runner": "pooling", "max_num_batched_tokens": 64, "max_model_len": 128},
         "max_num_batched_tokens=64 is less than max_model_len=128, and a prompt is computed in one step"),
        ({"quantization": "fp8"}, "quantization='fp8' is not how the checkpoint is quantized"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True is not supported"),
    ],
)  # fmt: skip
def test_an_argument_that_would_not_be_honoured_is_named(arguments, line):
    with pytest.raises(ValueError, match=line):
        make_config(**arguments)


def test_an_architecture_that_jaxis_lacks_is_named():
    with pytest.raises(ValueError, match=r"architectures=\['DbrxForCausalLM'\] is not supported"):
        make_config(hf_overrides={"architectures": ["DbrxForCausalLM"]})


def test_published_configurations_come_through_vllms_own_checks(tmp_path, monkeypatch):
    """vLLM has hooks for architectures by name, which may refuse one or change the size of blocks."""
    # vLLM has this class also for Kimi K2, and renames it for the whole process. Under that name, transformers writes
    # checkpoints with the tensors of its own modules, not with those of published ones. So the name is put back.
    monkeypatch.setattr(transformers.DeepseekV3Config, "model_type", transformers.DeepseekV3Config.model_type)
    refused = set()
    for path in sorted((TESTS / "data" / "configs").glob("*.json")):
        folder = tmp_path / path.stem
        folder.mkdir()
        shutil.copy(path, folder / "config.json")
        try:
            config = make_config(folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=256)
        except Exception:
            refused.add(path.stem)
            continue
        assert (config.cache_config.block_size, config.model_config.is_hybrid) == (16, False), path
    assert refused == REFUSED_CONFIGS


def test_arguments_are_those_of_jaxis():
    args = engine_arguments(
        make_config(
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            kv_cache_dtype="bfloat16",
            kv_cache_memory_bytes=1 << 20,
            load_format="dummy",
            seed=5,
            hf_overrides={"rope_theta": 5.0},
            additional_config={"jaxis": {"dtype": "float32", "quantization": "int8"}},
        )
    )
    assert (args.model, args.dtype, args.kv_cache_dtype) == (str(EMBEDDED_MODEL), "float32", "bfloat16")
    assert (args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens) == (512, 4, 128)
    assert (args.kv_cache_memory, args.load_format, args.seed, args.quantization) == (1 << 20, "dummy", 5, "int8")
    assert (args.hf_overrides, args.block_size, args.num_devices) == ({"rope_theta": 5.0}, 16, 1)


def test_a_step_that_asks_for_more_is_refused_by_name():
    step = SchedulerOutput.make_empty()
    step.num_invalid_spec_tokens = {"a": 3}
    step.kv_cache_block_copies = [object()]
    with pytest.raises(EngineError, match="asks for kv_cache_block_copies, num_invalid_spec_tokens, which"):
        ModelRunner.execute(object.__new__(ModelRunner), step)
