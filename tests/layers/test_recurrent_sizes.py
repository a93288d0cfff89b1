"""Sizes of recurrent layers that cannot be: one clear error, before any weight is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.model_loader import construct_abstractly
from tests.support.places import TESTS

CONFIG = json.loads((TESTS / "data" / "configs" / "qwen3.5-9b.json").read_text())


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("linear_num_key_heads", 0, "linear_num_key_heads=0 and .*heads=32, expected a number that divides"),
        ("linear_num_key_heads", 5, "linear_num_key_heads=5 and .*heads=32, expected a number that divides"),
        ("linear_conv_kernel_dim", 1, "a convolution over 1 tokens is not supported: 2 to 8 are"),
        ("linear_conv_kernel_dim", 99, "a convolution over 99 tokens is not supported: 2 to 8 are"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, key: str, value: int, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"text_config": CONFIG["text_config"] | {key: value}}))
    config = VllmConfig(ModelConfig(str(tmp_path), HFConfig.from_folder(tmp_path)))
    with pytest.raises(ConfigError, match=said):
        construct_abstractly(config)
