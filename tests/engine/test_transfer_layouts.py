"""Prompts go between engines whose devices share the model differently, unless one of them promises bits."""

import os

import pytest

from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, GPT_OSS_SIZES, LATENT_SIZES, write_checkpoint


def hand_over(folder, pairs, num_devices=4):
    """Hands prompts over in a process with devices enough."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=300"
    command = ("-m", "tests.engine.transfer_layouts_script", str(folder), pairs)
    printed = run_on_devices(*command, num_devices=num_devices, xla_flags=flags)
    assert printed.count("is found") + printed.count("is refused") == len(pairs.split(","))


@pytest.mark.multi_device
def test_two_devices_hand_over_to_four_which_repeat_the_heads(checkpoint):
    hand_over(checkpoint(), "1x2-1x4")


@pytest.mark.multi_device
@pytest.mark.parametrize("pairs", ["1x4-1x2", "1x1-1x2,1x2-1x1", "2x1-2x1,2x1-1x2,1x2-2x2", "native-1x2"])
def test_every_other_way(checkpoint, pairs):
    hand_over(checkpoint(), pairs)


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt_oss", GPT_OSS_SIZES),
        ("deepseek_v3", LATENT_SIZES),
        ("qwen3_5_text", DELTA_NET_SIZES),
    ],
)
def test_windows_latents_and_states(tmp_path, family, config):
    hand_over(write_checkpoint(tmp_path / "model", family, **config), "1x2-1x4,1x4-1x2")
