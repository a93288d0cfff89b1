"""Devices that do not divide a vocabulary have equal parts of its tables; nobody sees the rows that fill them up."""

import json
import os

import pytest

from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import write_checkpoint

# Neither 2, 3 nor 4 divides it.
VOCAB_SIZE = 515


def weights_only(qtype):
    """Activations that are rounded to int8, too, round another way where the order of a sum is another."""
    return json.dumps({"quantization": [{"module_path": ".*", "weight_qtype": qtype}]})


def compare(folder, sizes, kinds="few", arguments="{}"):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=300"
    command = ("-m", "tests.engine.padded_vocabulary_script", str(folder), sizes, kinds, arguments)
    assert run_on_devices(*command, xla_flags=flags).count(" is as ") == len(sizes.split(","))


@pytest.mark.multi_device
def test_four_devices(tmp_path):
    compare(write_checkpoint(tmp_path / "model", vocab_size=VOCAB_SIZE), "1x1x4")


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("config", "sizes", "kinds", "arguments"),
    [
        ({"tie_word_embeddings": True}, "1x1x4,2x1x2,1x2x2", "all", "{}"),
        ({}, "1x1x4,2x1x2,1x2x2", "all", "{}"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "1x1x3", "all", "{}"),
        ({"tie_word_embeddings": True}, "1x1x4", "quick", weights_only("int8")),
        ({}, "1x1x4,2x1x2,1x2x2", "quick", weights_only("int4")),
        ({}, "1x1x4", "quick", '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}'),
    ],
)
def test_devices_stages_and_ranks(tmp_path, config, sizes, kinds, arguments):
    compare(write_checkpoint(tmp_path / "model", vocab_size=VOCAB_SIZE, **config), sizes, kinds, arguments)
