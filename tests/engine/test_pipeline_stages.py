"""Pipeline stages give what one device gives, and each holds its own layers."""

import os

import pytest

from jaxis import LLM
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError
from jaxis.parallel.stages import Stage
from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, GPT_OSS_SIZES, LATENT_SIZES, write_checkpoint


def compare(folder, sizes, kinds="all", num_devices=4, script="stages_script"):
    """Compares answers of stages with those of one device, in a process with devices enough."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=300"
    command = ("-m", f"tests.engine.{script}", str(folder), sizes, *([kinds] if kinds else []))
    printed = run_on_devices(*command, num_devices=num_devices, xla_flags=flags)
    assert printed.count("is as one device") == len(sizes.split(","))


@pytest.mark.multi_device
def test_two_stages(checkpoint):
    compare(checkpoint(), "2x1", "quick", num_devices=2)


@pytest.mark.multi_device
def test_drafts_and_blocks_beyond_the_devices_of_two_stages(checkpoint):
    compare(checkpoint(), "2x1", None, num_devices=2, script="stage_features_script")


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("family", "config", "sizes"),
    [("llama", {"num_hidden_layers": 5}, "3x1,2x2"), ("qwen3_5_text", DELTA_NET_SIZES, "2x1,3x1")],
)
def test_drafts_and_blocks_beyond_the_devices_of_stages(tmp_path, family, config, sizes):
    folder = write_checkpoint(tmp_path / "model", family, **config)
    compare(folder, sizes, None, script="stage_features_script")


@pytest.mark.multi_device
@pytest.mark.parametrize("sizes", ["2x1", "4x1", "2x2"])
def test_stages_of_every_size_in_every_situation(tmp_path, sizes):
    compare(write_checkpoint(tmp_path / "model", num_hidden_layers=5), sizes)


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("family", "config", "sizes", "kinds"),
    [
        ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 3}, "2x1,3x1", "all"),
        ("qwen3_moe", {}, "2x1,2x2", "all"),
        ("gpt_oss", GPT_OSS_SIZES, "2x1,4x1", "quick"),
        ("deepseek_v3", LATENT_SIZES, "2x1,2x2", "quick"),
        ("qwen3_5_text", DELTA_NET_SIZES, "2x1,3x1", "all"),
    ],
)
def test_stages_of_every_family(tmp_path, family, config, sizes, kinds):
    compare(write_checkpoint(tmp_path / "model", family, **config), sizes, kinds)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (5, 4, [1, 1, 2, 1]), (7, 4, [2, 2, 2, 1]), (32, 5, [6, 6, 7, 7, 6])],
)
def test_stages_divide_all_layers_in_order(num_layers, num_stages, sizes):
    own = [Stage(index, num_stages).layers(num_layers) for index in range(num_stages)]
    assert list(map(len, own)) == sizes
    assert [layer for layers in own for layer in layers] == list(range(num_layers))


def test_more_stages_than_devices_are_refused(checkpoint):
    with pytest.raises(
        ConfigError, match="pipeline_parallel_size=500 with tensor_parallel_size=2 needs 1000 cpu devices"
    ):
        LLM(checkpoint(), pipeline_parallel_size=500, tensor_parallel_size=2, show_progress=False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"data_parallel_size": 2, "enable_expert_parallel": True},
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"speculative_config": {"method": "mtp"}},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_stages_cannot_do_is_refused(arguments):
    name = next(name for name in arguments if name not in ("tensor_parallel_size", "enable_expert_parallel"))
    with pytest.raises(ConfigError, match=f"{name}.* does not combine with pipeline_parallel_size=2"):
        EngineArgs(pipeline_parallel_size=2, **arguments)


def test_stages_that_hosts_cannot_share_are_refused():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=3 and nnodes=2: give a multiple of nnodes"):
        EngineArgs(pipeline_parallel_size=3, nnodes=2)
