"""Data ranks give what one device gives, whatever runs on which of them."""

import os

import pytest

from jaxis import LLM
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError
from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, LATENT_SIZES, write_checkpoint

SIZES = {"deepseek_v3": LATENT_SIZES, "qwen3_5_text": DELTA_NET_SIZES}
# A family, sizes, kinds of requests, other arguments.
FEATURE_ROWS = [
    "qwen3|2x1,2x2,4x1|all|{}",
    'qwen3_moe|2x1,2x2,4x1|quick|{"enable_expert_parallel": true}',
    'deepseek_v3|2x1,2x2|quick|{"enable_expert_parallel": true}',
    'gpt_oss|2x1,2x2|quick|{"enable_expert_parallel": true}',
    'mistral|2x1|quick|{"hf_overrides": {"sliding_window": 20}}',
    'qwen3|2x1|quick|{"kv_cache_dtype": "int8"}',
    "qwen3_5_text|2x1,2x2|quick|{}",
]


def compare(folder, sizes, arguments="{}", kinds="all", script="ranks_script"):
    """Compares answers of ranks with those of one device, in a process with devices enough."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=300"
    command = ("-m", f"tests.engine.{script}", str(folder), sizes, arguments, kinds)
    assert run_on_devices(*command, xla_flags=flags).count("is as one device") == len(sizes.split(","))


@pytest.fixture
def sized(tmp_path):
    """Family name -> folder of its tiny checkpoint, of the sizes that it needs."""
    return lambda family: write_checkpoint(tmp_path / family, family, **SIZES.get(family, {}))


@pytest.mark.multi_device
def test_two_ranks_share_experts(checkpoint):
    compare(checkpoint("qwen3_moe"), "2x1", '{"enable_expert_parallel": true}', "quick")


@pytest.mark.multi_device
@pytest.mark.parametrize("row", FEATURE_ROWS)
def test_ranks_of_every_size_share_a_store_draft_and_tell_what_they_hold(sized, row):
    family, sizes, kinds, arguments = row.split("|")
    compare(sized(family), sizes, arguments, kinds, "rank_features_script")


@pytest.mark.multi_device
@pytest.mark.parametrize("size", ["2x1", "2x2", "4x1"])
def test_ranks_of_every_size_in_every_situation(checkpoint, size):
    compare(checkpoint(), size)


@pytest.mark.multi_device
@pytest.mark.parametrize(("family", "kinds"), [("qwen3_moe", "all"), ("deepseek_v3", "quick"), ("gpt_oss", "quick")])
def test_ranks_of_every_size_share_experts(sized, family, kinds):
    compare(sized(family), "2x1,2x2,4x1", '{"enable_expert_parallel": true}', kinds)


@pytest.mark.multi_device
def test_ranks_of_layers_with_a_window(checkpoint):
    compare(checkpoint("mistral"), "2x1,2x2", '{"hf_overrides": {"sliding_window": 20}}', "quick")


@pytest.mark.multi_device
def test_ranks_of_recurrent_states(sized):
    compare(sized("qwen3_5_text"), "2x1,2x2", kinds="quick")


def test_ranks_that_would_share_nothing_are_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 .* add enable_expert_parallel; .* start 2 servers"):
        LLM(checkpoint(), data_parallel_size=2, show_progress=False)


def test_more_ranks_than_devices_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="data_parallel_size=500 with tensor_parallel_size=2 needs 1000 cpu devices"):
        LLM(
            checkpoint(),
            data_parallel_size=500,
            tensor_parallel_size=2,
            enable_expert_parallel=True,
            show_progress=False,
        )


@pytest.mark.parametrize(("data", "tensor", "hosts"), [(3, 1, 2), (2, 3, 4)])
def test_devices_that_hosts_cannot_share_are_refused(data, tensor, hosts):
    message = f"data_parallel_size={data} times tensor_parallel_size={tensor} cannot be shared by nnodes={hosts}"
    with pytest.raises(ConfigError, match=message):
        EngineArgs(data_parallel_size=data, tensor_parallel_size=tensor, nnodes=hosts)
